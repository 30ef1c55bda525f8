"""Requests at a steady rate while a pool's parts are replaced, one after the other; then everything is counted."""

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from deploy.local.cluster import LocalCluster
from tests.chaos.asking import ALIASES
from tests.chaos.check import origin_of
from tests.chaos.plan import Kind
from tests.chaos.reader import Read, reading
from tests.chaos.run import Run, Scale
from tests.support.bus import until
from tests.upgrade.older import unpack
from tests.upgrade.pauses import Phase, longest_pause, pauses, waits

READY_WITHIN_S = 120.0
CAUGHT_UP_WITHIN_S = 180.0
NOTICED_WITHIN_S = 120.0
GROWN_BY = 2


@dataclass(frozen=True)
class Upgrade:
    """``quiet_s``: how long nothing happens before, between and after. ``older``: a commit; the pool has one worker of
    its code and one of the present one, and is handed over both ways; None: workers, a broker and partitions change.
    """

    workers: int = 3
    rate: float = 40.0
    quiet_s: float = 10.0
    partitions: int = 12
    seed: int = 1
    older: str | None = None


class UpgradeRun(Run):
    """A chaos run in which what happens is an operator's doing, step by step."""

    def __init__(self, upgrade: Upgrade, cluster: LocalCluster, folder: Path) -> None:
        scale = Scale(
            requests=0,
            faults=0,
            seed=upgrade.seed,
            rate=upgrade.rate,
            workers=upgrade.workers,
            kinds=frozenset(),
            hold_s=0.0,
            park_after_s=30.0,
            partitions=upgrade.partitions,
        )
        super().__init__(scale, cluster, folder)
        self.upgrade = upgrade
        self.phases: list[Phase] = []
        self._serving = list(range(upgrade.workers))
        self._enough = False
        if upgrade.older is not None:
            self._checkout = unpack(folder, upgrade.older)
            self.workers.checkouts[0] = self._checkout

    async def _traffic(self) -> dict[str, int]:
        for index in self._serving:
            await self.workers.until_said(index, "worker.ready", within_s=READY_WITHIN_S)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.asking.at_a_rate(self._until_enough(), self.upgrade.rate))
            for name, step in self._steps():
                await self._phase(f"quiet before {name}", lambda: asyncio.sleep(self.upgrade.quiet_s))
                await self._phase(name, step)
            await self._phase("quiet at the end", lambda: asyncio.sleep(self.upgrade.quiet_s))
            self._enough = True
        return dict(Counter(phase.name for phase in self.phases if not phase.name.startswith("quiet")))

    def _until_enough(self) -> Iterator[int]:
        return itertools.takewhile(lambda _number: not self._enough, itertools.count())

    def _steps(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        if self.upgrade.older is not None:
            return [
                ("the older one is killed", lambda: self._killed(0)),
                ("the newer one is killed", lambda: self._killed(1)),
                ("the newer one is replaced by an older one", lambda: self._replace(1, older=True)),
                ("an older one is replaced by a newer one", lambda: self._replace(0)),
            ]
        workers = [
            (f"worker {index} is replaced", lambda index=index: self._replace(index)) for index in list(self._serving)
        ]
        return [*workers, ("a broker is replaced", self._replace_a_broker), ("partitions are added", self._grow)]

    async def _phase(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        began = time.time()
        await step()
        self.phases.append(Phase(name, began, time.time()))
        print(f"{self.phases[-1].ended - began:7.1f} s  {name}", flush=True)

    async def _replace(self, index: int, *, older: bool = False) -> None:
        """A new worker is there before the old one is told to go."""
        number = self.workers.add(self.values, checkout=self._checkout if older else None)
        await self.workers.until_said(number, "worker.ready", within_s=READY_WITHIN_S)
        await self.workers.retire(index)
        self._serving[self._serving.index(index)] = number

    async def _killed(self, index: int) -> None:
        """By SIGKILL, with what it has in hand; it is back after the other one has taken over."""
        before = self.workers.said(index, "worker.ready")
        self.wrecker.deaths.append(time.time())
        self.workers.kill(index, back_after_s=2 * self.settings.worker.session_timeout_s)
        await self.workers.until_said(index, "worker.ready", times=before + 1, within_s=READY_WITHIN_S)

    async def _replace_a_broker(self) -> None:
        """The last one: stopped, its data gone, started with the same number; until it has all that the others have."""
        began = time.time()
        async with self._admin() as admin:
            topics = await admin.list_topics()
            await asyncio.to_thread(self.cluster.brokers[-1].replace)

            async def caught_up() -> bool:
                return not _lacking(await admin.describe_topics(topics))

            await until(caught_up, within_s=CAUGHT_UP_WITHIN_S)
        self.wrecker.disturbances.append((Kind.BROKER, began, time.time()))

    async def _grow(self) -> None:
        """Twice the partitions of what requests and results are written to, until some that are new were answered."""
        topics = self.topics
        names = [topics.requests, topics.throttled, topics.results, topics.chunks, topics.usage]
        wanted = [*map(topics.named, names), *map(topics.for_alias, ALIASES)]
        async with self._admin() as admin:
            answers = await admin.create_partitions(
                {name: NewPartitions(GROWN_BY * self.upgrade.partitions) for name in wanted}
            )
        refused = [f"{name}: {message}" for name, code, message in answers.topic_errors if code]
        assert not refused, refused
        async with asyncio.timeout(NOTICED_WITHIN_S), reading(self.bootstrap, topics.named(topics.results)) as results:
            seen: set[int] = set()
            while len(seen) < self.upgrade.partitions:
                seen |= {partition for _, partition in _origins(await results.more()) if self._is_new(partition)}

    def _is_new(self, partition: int) -> bool:
        return partition >= self.upgrade.partitions

    async def _figures(self, faults: dict[str, int], ends: Sequence[Any]) -> dict[str, Any]:
        figures = await super()._figures(faults, ends)
        results = await self._all(self.topics.results)
        moments = [record.at for record in results]
        answered = {(record.key or b"").decode("utf-8", "replace"): record.at for record in results}
        asked = {id_: request.at for id_, request in self.asking.asked.items()}
        new = sum(self._is_new(partition) for _, partition in _origins(results))
        by = Counter(json.loads(record.value or b"").get("worker") for record in results)
        told = {
            "pause_max_s": longest_pause(moments, self.phases),
            "pauses_s": pauses(moments, self.phases),
            "wait_max_s": max(waits(asked, answered, self.phases).values()),
            "waits_s": waits(asked, answered, self.phases),
            "answered_in_new_partitions": new,
            "results_in_new_partitions": sum(self._is_new(record.partition) for record in results),
            "results_by_worker": dict(by),
        }
        return {**figures, **told}

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            yield admin
        finally:
            await admin.close()


def _origins(results: Sequence[Read]) -> Iterator[tuple[str, int]]:
    """The topic and the partition of what each result answers."""
    for record in results:
        topic, partition, _ = origin_of(json.loads(record.value or b"")).rsplit("/", 2)
        if partition.isdecimal():
            yield topic, int(partition)


def _lacking(described: Sequence[dict[str, Any]]) -> list[str]:
    """The partitions that some broker that should have them does not have, or not all of."""
    return [
        f"{topic['topic']}/{partition['partition']}"
        for topic in described
        for partition in topic["partitions"] or [{"partition": "?", "isr": (), "replicas": (None,)}]
        if len(partition["isr"]) < len(partition["replicas"])
    ]
