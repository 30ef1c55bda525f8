"""Requests of tenants that have what they may have: they wait in order, apart from everybody else's."""

import time
from collections import Counter, OrderedDict

from service.scheduling.quotas import Quotas
from service.settings import Settings
from service.worker.jobs import Job

Partition = tuple[str, int]
_LOOK_AGAIN_S = 1.0
"""What a tenant may have changes with what other workers have, and with the file."""
_SHARE, _SHARE_OF_ALL = 0.125, 0.5
"""Of the requests and bytes that this worker may hold: what one tenant's line may have, and all lines together."""
_READ_ON_AT = 0.75


class _Line:
    """A tenant's jobs that wait here, in the order in which they came."""

    def __init__(self) -> None:
        self.jobs: OrderedDict[Job, None] = OrderedDict()
        self.partitions: Counter[Partition] = Counter()
        self.bytes = 0
        self.crowded = False

    def add(self, job: Job) -> None:
        self.jobs[job] = None
        self.partitions[job.origin.topic, job.origin.partition] += 1
        self.bytes += job.record.size

    def remove(self, job: Job) -> None:
        del self.jobs[job]
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
        self._most = settings.worker.max_waiting
        self._most_bytes = settings.worker.max_waiting_bytes
        self._lines: dict[str, _Line] = {}
        self._held: set[Job] = set()
        self._charges: dict[Job, float] = {}

    def passes(self, job: Job) -> bool:
        """Take a job. False: it waits in its tenant's line."""
        tenant = job.request.tenant
        if job in self._charges or not self._applies(job):
            return True
        self._held.add(job)
        self._quotas.hold(tenant, job.record.size)
        if tenant not in self._lines and self._quotas.wait_s(tenant, time.time()) == 0:
            self._begin(job)
            return True
        self._lines.setdefault(tenant, _Line()).add(job)
        return False

    def released(self) -> list[Job]:
        """Take those out that need not wait any longer."""
        free = []
        for tenant, line in list(self._lines.items()):
            while line.jobs and self._quotas.wait_s(tenant, time.time()) == 0:
                job = next(iter(line.jobs))
                self.withdraw(job)
                self._begin(job)
                free.append(job)
        return free

    @property
    def waiting(self) -> int:
        """How many wait in all lines."""
        return sum(len(line.jobs) for line in self._lines.values())

    def next_s(self) -> float | None:
        """In how many seconds to look again; None: when something changes."""
        now = time.time()
        waits = (self._quotas.wait_s(tenant, now) for tenant in self._lines)
        return min((*waits, _LOOK_AGAIN_S)) if self._lines else None

    def withdraw(self, job: Job) -> None:
        """A job leaves its line."""
        line = self._lines[job.request.tenant]
        line.remove(job)
        if not line.jobs:
            del self._lines[job.request.tenant]

    def forget(self, job: Job) -> None:
        """A job that was taken here has gone, whatever became of it. Does nothing for another one."""
        if job in self._held:
            self._held.remove(job)
            self._quotas.let_go(job.request.tenant, job.record.size)
        if (charge := self._charges.pop(job, None)) is not None:
            self._quotas.end(job.request.tenant, charge)

    def crowded(self) -> frozenset[Partition]:
        """The partitions that long lines come from: read any further, they would take the room of everybody else."""
        of_all = sum(map(self._share, self._lines.values()))
        for tenant, line in self._lines.items():
            share = max(self._share(line) / _SHARE, of_all / _SHARE_OF_ALL)
            line.crowded = self._quotas.is_full(tenant) or share >= (_READ_ON_AT if line.crowded else 1)
        return frozenset(came for line in self._lines.values() if line.crowded for came in line.partitions)

    def _share(self, line: _Line) -> float:
        return max(len(line.jobs) / self._most, line.bytes / self._most_bytes)

    def _begin(self, job: Job) -> None:
        self._charges[job] = self._quotas.begin(job.request.tenant, job.tokens, time.time())

    def _applies(self, job: Job) -> bool:
        return self._quotas.limited(job.request.tenant) and self._topics.takes_requests(job.origin.topic)
