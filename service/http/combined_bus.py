"""A broker and HTTP as one bus: what comes from the broker goes back to it, what was asked over HTTP to who asked."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from schemas.base import Origin, Record
from schemas.control import Control
from schemas.progress import Progress
from schemas.requests import ReplyTo
from schemas.results import Chunk
from schemas.status import Presence, Status
from service.http.memory_bus import InMemoryBus
from service.ports import Announcements, Received, RequestSource, Say, Settled, Settlement, Settlements, SourceState


class CombinedBus:
    """The ports RequestSource, Settlements and Announcements on top of both; the broker's parts stay their owner's."""

    def __init__(
        self, *, memory: InMemoryBus, source: RequestSource, settlements: Settlements, announcements: Announcements
    ) -> None:
        self._memory = memory
        self._broker = source
        self._settlements = settlements
        self._announcements = announcements
        self._reads: dict[RequestSource, asyncio.Task[Received]] = {}

    # --- RequestSource ---

    async def receive(self) -> Received:
        """What came from either; a turn of reading is never cancelled."""
        sources: tuple[RequestSource, ...] = (self._memory, self._broker)
        for source in sources:
            if source not in self._reads:
                self._reads[source] = asyncio.create_task(source.receive(), name="receive")
        await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
        brought = [self._reads.pop(source).result() for source in sources if self._reads[source].done()]
        return Received(
            deliveries=tuple(one for each in brought for one in each.deliveries),
            lost=frozenset(origin for each in brought for origin in each.lost),
            unwanted=frozenset(origin for each in brought for origin in each.unwanted),
            unreadable=tuple(one for each in brought for one in each.unreadable),
        )

    def serve_only(self, aliases: Collection[str] | None) -> None:
        self._broker.serve_only(aliases)

    def hold_back(self, partitions: Collection[tuple[str, int]]) -> None:
        self._broker.hold_back(partitions)

    def scan_parked(self, due: Callable[[Record], float]) -> None:
        self._broker.scan_parked(due)

    def before_rebalance(self, hand_over: Callable[[], None]) -> None:
        self._broker.before_rebalance(hand_over)

    def weigh(self, load: Callable[[str, float], float]) -> None:
        self._broker.weigh(load)

    def place_anew(self, missed: Mapping[str, float]) -> None:
        self._broker.place_anew(missed)

    async def follow(self, aliases: Collection[str]) -> None:
        await self._broker.follow(aliases)

    def state(self) -> SourceState:
        return self._broker.state()

    async def stop(self) -> None:
        await self._memory.stop()
        await self._broker.stop()

    async def close(self) -> None:
        """Wait for the turns of reading that are under way; before the broker's source is closed."""
        await asyncio.gather(*self._reads.values(), return_exceptions=True)

    # --- Settlements ---

    async def started(self, origin: Origin, *, alone: bool = False) -> bool:
        return await self._ledger(origin).started(origin, alone=alone)

    def engine_died(self, culprit: Origin | None) -> None:
        self._settlements.engine_died(culprit)

    def withdraw(self, origin: Origin) -> None:
        self._ledger(origin).withdraw(origin)

    def keep(self, origin: Origin, say: Say) -> None:
        self._ledger(origin).keep(origin, say)

    def session(self, origin: Origin, name: str, part: int) -> Progress | None:
        return self._ledger(origin).session(origin, name, part)

    def keep_session(self, origin: Origin, progress: Progress) -> None:
        self._ledger(origin).keep_session(origin, progress)

    async def settle(self, origin: Origin, settlement: Settled) -> Settled | None:
        """What is settled on a connection is no record of the broker's; what it has cost is said there all the same.

        So it is of what was given up there.
        """
        settled = await self._ledger(origin).settle(origin, settlement)
        if isinstance(settled, Settlement) and settled.usage is not None and self._memory.holds(origin):
            self._announcements.usage(settled.usage)
        return settled

    async def flush(self) -> None:
        await self._settlements.flush()

    def _ledger(self, origin: Origin) -> Settlements:
        return self._memory if self._memory.holds(origin) else self._settlements

    # --- Announcements ---

    async def status(self, status: Status) -> None:
        await self._announcements.status(status)

    async def chunk(self, origin: Origin, chunk: Chunk, reply: ReplyTo | None = None) -> None:
        await (self._memory if self._memory.holds(origin) else self._announcements).chunk(origin, chunk, reply)

    async def presence(self, presence: Presence) -> None:
        await self._announcements.presence(presence)

    async def farewell(self) -> None:
        await self._announcements.farewell()

    def usage(self, usage: Mapping[str, Any]) -> None:
        self._announcements.usage(usage)

    async def control(self, event: Control) -> None:
        await self._announcements.control(event)

    async def others(self) -> Sequence[Presence]:
        return await self._announcements.others()

    async def predecessors(self) -> Sequence[Presence]:
        return await self._announcements.predecessors()
