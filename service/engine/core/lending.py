"""Blocks of KV caches lent by models that idle to the one that runs, and had back when they are needed.

Nothing moves at a switch. Where the scheduler of the model that runs finds no block, it gets more, inside its step: of
what nobody uses, then of what others have and do not need; and where it has less than its own part, of what others
borrowed, whose requests are preempted then. The pages of what was taken go back to the system before any other block
is written to.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from service.engine.core.context import Context
from service.engine.core.seating import WorkerFailed
from service.engine.versions import vllm_kv
from service.engine.versions.vllm_kv import Plan, Pool
from service.scheduling.lending import Idle, Ledger, Share, Take, loan, returned

log = logging.getLogger(__name__)

_STEPS = 64
"""A model that needs more asks for this part of all it can have, and then twice as much, and so on."""


@dataclass(slots=True)
class Waited:
    """What taking memory back has cost, since somebody asked last: seconds at the longest, requests preempted."""

    longest_s: float = 0.0
    preempted: int = 0


@dataclass(slots=True)
class _Member:
    pool: Pool
    used: float = 0.0
    waited: Waited = field(default_factory=Waited)


class Lending:
    """``give_back`` has the workers give the system what a model's blocks do not need, of which it gets those that
    the model may use.
    """

    def __init__(self, plan: Plan | None, give_back: Callable[[int, list[int]], object]) -> None:
        self.ledger = Ledger(0 if plan is None else plan.total)
        self._give_back = give_back
        self._members: dict[int, _Member] = {}
        self._owed: set[int] = set()
        """Models whose pages have to go before anything else is written."""

    def join(self, context: Context) -> None:
        """A model was loaded, and no request has been added yet."""
        scheduler, key = context.core.scheduler, context.key
        config = getattr(scheduler, "kv_cache_config", None)
        floor = vllm_kv.floor_of(config)
        if floor is None:
            return
        pool = Pool(scheduler)
        self._members[key] = _Member(pool)
        self.ledger.join(key, Share(vllm_kv.block_bytes(config), floor, pool.has))
        pool.withhold_all()
        self._take_for(key, 1, 1)  # the null block is always there
        self.ledger.grant(key, 1)
        share = self.ledger[key]
        self._grant(key, min(floor - 1, self.ledger.unassigned // share.block))
        self._settle()
        vllm_kv.allocating_with(scheduler, lambda missing, again: self._borrow(key, missing, again))

    def leave(self, key: int) -> None:
        """A model was dropped: all that it had can be lent."""
        if self._members.pop(key, None) is not None:
            self.ledger.leave(key)
            self._owed.discard(key)

    def runs(self, key: int) -> None:
        """A model runs from now on; whoever ran longest ago lends first."""
        if (member := self._members.get(key)) is not None:
            member.used = time.monotonic()

    def _settle(self) -> None:
        """The pages of what was taken go back to the system. Raises WorkerFailed, and it is to be tried again."""
        while self._owed:
            key = next(iter(self._owed))
            self._give_back(key, self._members[key].pool.ids)
            self._owed.discard(key)

    def end(self) -> None:
        """Everything comes back to whom it belongs, and nobody lends any more. No step is under way."""
        if self.ledger.lends:
            for take in returned(self.ledger, [self._idle(key) for key in self._members]):
                self._take(take)
            self._settle()
            self.ledger.close()

    def preempt(self, key: int, held: int) -> int:
        """Preempt requests of a model that is being parked until they have no more than so many blocks; how many."""
        if (member := self._members.get(key)) is None:
            return 0
        return member.pool.preempt(member.pool.has - 1 - held)

    def figures(self, key: int) -> dict[str, Any]:
        """What a model has beyond its own, in bytes of one worker, and what it has waited for memory since this was
        asked last; nothing where it neither lends nor borrows.
        """
        if (member := self._members.get(key)) is None:
            return {}
        share, waited, member.waited = self.ledger[key], member.waited, Waited()
        return {
            "kv_borrowed": share.borrowed * share.block,
            "kv_wait_s": round(waited.longest_s, 6),
            "kv_preempted": waited.preempted,
        }

    def _borrow(self, key: int, missing: Callable[[], int | None], again: Callable[[], Any]) -> Any:
        """What ``again`` finds once there is more; None where there is none to be had.

        So it is where pages can't be given back to the system: that is tried again when somebody next needs more.
        """
        began, found = time.perf_counter(), None
        blocks = max(1, self.ledger[key].most // _STEPS)
        try:
            self._settle()
            while found is None and (least := missing()) is not None:
                if not (granted := self._take_for(key, max(blocks, least), least)):
                    break
                self._settle()
                self._grant(key, granted)
                found, blocks = again(), blocks * 2
        except WorkerFailed as error:
            log.warning("KV memory that was taken back from a model can't be given to another one: %s", error)
        waited = self._members[key].waited
        waited.longest_s = max(waited.longest_s, time.perf_counter() - began)
        return found

    def _grant(self, key: int, blocks: int) -> None:
        self.ledger.grant(key, blocks)
        self._members[key].pool.give(blocks)

    def _take_for(self, key: int, blocks: int, least: int) -> int:
        """Take from others so that ``key`` can be granted so many, or ``least``; how many it can be."""
        idle = [self._idle(each) for each in self._members if each != key]
        planned = loan(self.ledger, key, blocks, idle, least=least)
        for take in planned.takes:
            self._members[key].waited.preempted += self._take(take)
        return min(planned.blocks, self.ledger.unassigned // self.ledger[key].block)

    def _take(self, take: Take) -> int:
        """Answers with how many requests were preempted. One that can't be leaves its model with what it has."""
        pool = self._members[take.key].pool
        preempted = pool.preempt(take.blocks + take.held) if take.held else 0
        self.ledger.withdraw(take.key, pool.withhold(take.blocks + take.held))
        self._owed.add(take.key)
        return preempted

    def _idle(self, key: int) -> Idle:
        member = self._members[key]
        free, cached = member.pool.free()
        return Idle(key, free, cached, member.pool.has - 1 - free - cached, member.used)
