"""Keeps the contexts where the schedule wants them: the next model on its way in, idle ones put away."""

import asyncio
import time
from collections.abc import Iterable

import structlog

from schemas.contexts import Tier
from service.errors import EngineDied, GearshiftError
from service.ports import Engine
from service.scheduling import memory
from service.scheduling.memory import Idle, Move
from service.scheduling.policy import Decision
from service.scheduling.scheduler import Context, Scheduler
from service.worker.jobs import Job
from service.worker.lifecycle import Lifecycle
from service.worker.tasks import Tasks

log = structlog.get_logger(__name__)
_LOOK_S = 1.0


class Tiering:
    """Follows each decision of the scheduler, and looks after contexts that nobody asks for."""

    def __init__(self, *, engine: Engine, lifecycle: Lifecycle, scheduler: Scheduler[Job], tasks: Tasks) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._tasks = tasks
        self._coming: dict[str, float] = {}
        self._tried: tuple[str, set[str]] = ("", set())
        """The active model, and those that were preloaded beside it, or found no room there."""
        self._wanted: dict[str, float] = {}
        """When each was last seen with something to do; a turn between two looks is the scheduler's to tell."""

    def ready_at(self, alias: str) -> float | None:
        """When a model that is being brought in will be resident, on the monotonic clock; None: it is not."""
        return self._coming.get(alias)

    def follow(self, decision: Decision, contexts: Iterable[Context], now: float) -> None:
        """Tell the engine who comes next, and begin to bring the first of them in beside the active one.

        Not while a suspect is here: a death beside that would say nothing of it, and so on with each worker after.
        """
        self._engine.expect((decision.run, *decision.order))
        if decision.prefetch is None or self._coming or self._lifecycle.jobs.has_suspects:
            return
        tier = next(context.tier for context in contexts if context.alias == decision.prefetch)
        if self._tried[0] != decision.run:
            self._tried = decision.run, set()
        if decision.prefetch in self._tried[1]:
            return
        self._tried[1].add(decision.prefetch)
        cost = self._scheduler.costs.switch(decision.run, decision.prefetch, tier)
        self._coming[decision.prefetch] = now + cost.mean
        self._tasks.spawn(f"preload {decision.prefetch}", self._bring, decision.prefetch)

    async def _bring(self, alias: str) -> None:
        try:
            async with self._lifecycle.runs.company():
                info = await self._engine.preload(alias, stall=False)
            log.debug("context.preloaded", model=alias, tier=info.tier.value)
        except EngineDied:
            pass  # said by whoever watches the engine
        except GearshiftError as error:
            log.info("context.not_preloaded", model=alias, reason=str(error))
        finally:
            del self._coming[alias]

    async def run(self) -> None:
        """Until the worker ends: what has been idle for too long is parked, later dropped."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for move in self.overdue(time.monotonic()):
                await self._lower(move)

    def overdue(self, now: float) -> tuple[Move, ...]:
        """Which contexts have had no request for as long as models.yaml lets them."""
        idle = []
        for info in self._engine.contexts():
            busy = info.active or info.unfinished > 0 or info.alias in self._scheduler.queues.aliases
            if busy or info.pinned or info.alias in self._coming:
                self._wanted[info.alias] = now
            limits = self._scheduler.models.get(info.alias)
            if limits is not None:
                last = max(self._wanted.setdefault(info.alias, now), self._scheduler.left(info.alias))
                seconds = now - last
                idle.append(Idle(info.alias, info.tier, seconds, limits.idle_ttl, limits.drop_ttl))
        return memory.overdue(idle)

    async def _lower(self, move: Move) -> None:
        try:
            async with self._lifecycle.runs.company():
                await (self._engine.park if move.tier is Tier.PARKED else self._engine.drop)(move.alias)
            log.info("context.put_away", model=move.alias, tier=move.tier.value)
        except EngineDied:
            pass
        except GearshiftError as error:  # it was asked for in the meantime
            log.info("context.not_put_away", model=move.alias, reason=str(error))
