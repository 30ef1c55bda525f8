"""Requests of tenants that have what they may have: they wait in order, apart from everybody else's.

A line that is long would hold up the partitions that it comes from, and with them whoever else writes there. So all of
it goes to the topic ``throttled``, and what its tenant asks from then on goes after it, until the last one that went is
done. There a tenant's requests lie in one partition, in their order, and no others than those of such tenants; its
owner reads it as far as it has room for the line. A request is moved in the transaction that finishes it where it was,
as one that is parked, so nothing is lost or doubled by a death. Whoever takes over a partition does not know who was
moved: requests of that tenant which come then may begin before those that were moved, until its line is long again.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator

from service.scheduling.quotas import Quotas
from service.settings import Settings
from service.worker.jobs import Job

Partition = tuple[str, int]
_LOOK_AGAIN_S = 1.0
"""What a tenant may have changes with what other workers have, and with the file."""
_SHARE, _SHARE_OF_ALL, _SHARE_LEAVING = 0.125, 0.5, 0.25
"""Of the requests and bytes that this worker may hold: what one tenant's line may have, all lines together, and what
is just being moved."""
_READ_ON_AT = 0.75
_LEAVING, _LEAVING_BYTES = 500, 4 << 20
"""How many are moved at once, and when they are large."""


class _Line:
    """Jobs that wait here, in the order in which they came."""

    def __init__(self) -> None:
        self.jobs: OrderedDict[Job, None] = OrderedDict()
        self.movable: dict[Job, None] = {}
        """Those of them that may wait elsewhere."""
        self.partitions: Counter[Partition] = Counter()
        self.bytes = 0
        self.crowded = False

    def add(self, job: Job, *, movable: bool = False) -> None:
        self.jobs[job] = None
        if movable:
            self.movable[job] = None
        self.partitions[job.origin.topic, job.origin.partition] += 1
        self.bytes += job.record.size

    def remove(self, job: Job) -> None:
        del self.jobs[job]
        self.movable.pop(job, None)
        self.bytes -= job.record.size
        came = job.origin.topic, job.origin.partition
        self.partitions[came] -= 1
        if not self.partitions[came]:
            del self.partitions[came]


class Throttle:
    """A line for each tenant that is over its quota. What was asked over HTTP is none of its: it was let in there."""

    def __init__(self, *, quotas: Quotas, settings: Settings) -> None:
        self._quotas = quotas
        self._topics = settings.topics
        self.topic = settings.topics.named(settings.topics.throttled)
        self._most = settings.worker.max_waiting
        self._most_bytes = settings.worker.max_waiting_bytes
        self._lines: dict[str, _Line] = {}
        self._leaving = _Line()
        """What is being moved."""
        self._staying: set[Job] = set()
        """What could not be moved."""
        self._held: set[Job] = set()
        self._charges: dict[Job, float] = {}
        self.moved = 0
        """How many were given to be moved so far."""

    def passes(self, job: Job) -> bool:
        """Take a job, or take one back that could not be moved. False: it waits in its tenant's line."""
        tenant = job.request.tenant
        if job in self._charges or not self._applies(job):
            return True
        if job in self._leaving.jobs:
            self._leaving.remove(job)
            self._staying.add(job)
        if job not in self._held:
            self._held.add(job)
            self._quotas.hold(tenant, job.record.size)
        first = tenant not in self._lines and not self._follows(job)
        if first and self._quotas.wait_s(tenant, time.monotonic()) == 0:
            self._begin(job)
            return True
        self._lines.setdefault(tenant, _Line()).add(job, movable=self._may_move(job))
        return False

    def released(self) -> list[Job]:
        """Take those out that need not wait any longer."""
        free = []
        for tenant, line in list(self._lines.items()):
            while line.jobs and self._quotas.wait_s(tenant, time.monotonic()) == 0:
                job = next(iter(line.jobs))
                if self._follows(job):
                    break
                self.withdraw(job)
                self._begin(job)
                free.append(job)
        return free

    def overflowing(self) -> list[Job]:
        """Those that are to wait in the topic ``throttled``, in their order; move each of them.

        Only so many at once: a partition's moves are one transaction, which results wait for and which has a deadline.
        """
        self._look()
        moving = list(self._behind_others())
        self.moved += len(moving)
        return moving

    def _behind_others(self) -> Iterator[Job]:
        for tenant, line in self._lines.items():
            behind = any(topic == self.topic for topic, _ in line.partitions)
            if not (line.crowded or behind or self._quotas.waits_elsewhere(tenant)):
                continue
            for job in line.movable:
                if self._leaving.bytes >= _LEAVING_BYTES or len(self._leaving.jobs) >= _LEAVING:
                    return
                self._quotas.moved(tenant, job.request.id)
                self._leaving.add(job)
                yield job

    @property
    def waiting(self) -> int:
        """How many wait in all lines."""
        return sum(len(line.jobs) for line in self._lines.values())

    def next_s(self) -> float | None:
        """In how many seconds to look again; None: when something changes."""
        now = time.monotonic()
        firsts = {tenant: next(iter(line.jobs)) for tenant, line in self._lines.items()}
        waits = (self._quotas.wait_s(tenant, now) for tenant, job in firsts.items() if not self._follows(job))
        return min((*waits, _LOOK_AGAIN_S)) if self._lines else None

    def withdraw(self, job: Job) -> None:
        """A job leaves its line."""
        line = self._lines[job.request.tenant]
        line.remove(job)
        if not line.jobs:
            del self._lines[job.request.tenant]

    def forget(self, job: Job) -> None:
        """A job that was taken here has gone, whatever became of it. Does nothing for another one."""
        if job in self._leaving.jobs:
            self._leaving.remove(job)
        self._staying.discard(job)
        if job in self._held:
            self._held.remove(job)
            self._quotas.let_go(job.request.tenant, job.record.size)
        if (charge := self._charges.pop(job, None)) is not None:
            self._quotas.end(job.request.tenant, charge)

    def crowded(self) -> frozenset[Partition]:
        """The partitions that long lines come from: read any further, they would take the room of everybody else."""
        self._look()
        lines = (self._leaving, *self._lines.values())
        return frozenset(came for line in lines if line.crowded for came in line.partitions)

    def _look(self) -> None:
        """See which lines are too long."""
        of_all = sum(map(self._share, self._lines.values()))
        for tenant, line in self._lines.items():
            share = max(self._share(line) / _SHARE, of_all / _SHARE_OF_ALL)
            line.crowded = self._quotas.is_full(tenant) or share >= (_READ_ON_AT if line.crowded else 1)
        share = self._share(self._leaving) / _SHARE_LEAVING
        self._leaving.crowded = share >= (_READ_ON_AT if self._leaving.crowded else 1)

    def _share(self, line: _Line) -> float:
        return max(len(line.jobs) / self._most, line.bytes / self._most_bytes)

    def _follows(self, job: Job) -> bool:
        """Whether it must not begin before others of its tenant's, which wait elsewhere."""
        return self._may_move(job) and self._quotas.waits_elsewhere(job.request.tenant)

    def _may_move(self, job: Job) -> bool:
        """A part of a session is wanted here, where the others are."""
        return job.origin.topic != self.topic and job.request.session is None and job not in self._staying

    def _begin(self, job: Job) -> None:
        self._charges[job] = self._quotas.begin(job.request.tenant, job.tokens, time.monotonic())

    def _applies(self, job: Job) -> bool:
        return self._quotas.limited(job.request.tenant) and self._topics.takes_requests(job.origin.topic)
