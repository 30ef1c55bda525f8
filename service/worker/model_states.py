"""Each model as the scheduler is told it: from the engine's contexts, and from the jobs that it has been given."""

import math
import time
from collections.abc import Collection, Iterable, Mapping

from schemas.contexts import KvKept, Tier
from service.ports import Engine
from service.scheduling.goodput import Goal, under_way
from service.scheduling.scheduler import Context, Scheduler
from service.worker.active_time import ActiveTime
from service.worker.jobs import Job
from service.worker.lifecycle import Lifecycle
from service.worker.throughput import Throughput
from service.worker.tiering import Tiering

_LAST = 0.1
"""The part of what was started that is taken to be left however long it has run."""


class ModelStates:
    """Makes the scheduler's view. ``latest`` is the one of the last decision, by alias: good enough for estimates."""

    def __init__(
        self,
        *,
        engine: Engine,
        lifecycle: Lifecycle,
        scheduler: Scheduler[Job],
        tiering: Tiering,
        active_time: ActiveTime,
        pace: Throughput,
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._tiering = tiering
        self._active_time = active_time
        self._pace = pace
        self.latest: Mapping[str, Context] = {}

    @property
    def aliases(self) -> tuple[str, ...]:
        """The models that there are."""
        return self._engine.aliases

    def contexts(self, now: float, *, but: Collection[str] = ()) -> tuple[Context, ...]:
        """What the policy may choose from; ``but`` are left out."""
        tiers = self._engine.tiers()
        self.latest = {
            alias: self._context(alias, tiers.get(alias, Tier.DROPPED), now)
            for alias in self._engine.aliases
            if alias not in but
        }
        return tuple(self.latest.values())

    def look(self, now: float) -> None:
        """Keep what the engine is at for the models' pace; in the middle of a switch it is at nothing."""
        self._pace.stalled(self._active_time.left_at)
        if (active := self._active_time.active) is not None:
            waiting = self._scheduler.takes_at(active) <= now and not self._lifecycle.closed(active)
            self._pace.look(active, now, rows=len(self._given(active)), waiting=waiting)

    def leave(self, now: float) -> None:
        """A switch begins."""
        self._pace.stop(now)

    def served_s(self, now: float) -> float:
        """Seconds in which the active model has had something to do, so far."""
        return self._pace.worked(now)

    def _context(self, alias: str, tier: Tier, now: float) -> Context:
        unfinished = [*self._given(alias), *self._held(alias)]
        running = self._running(unfinished, now)
        dated = [job.deadline for job in unfinished if job.deadline is not None]
        return Context(
            alias=alias,
            tier=tier,
            unfinished=len(unfinished),
            unfinished_tokens=self._left_of(alias, now),
            unfinished_deadline=now + min(dated) - time.time() if dated else math.inf,
            unfinished_priority=min((job.request.priority for job in unfinished), default=None),
            undated=len(dated) < len(unfinished),
            ready_at=self._tiering.ready_at(alias),
            running=running,
            again=self._again(alias, tier) if running else 0,
        )

    def _given(self, alias: str) -> Collection[Job]:
        """Those that the engine goes on with in their model's turn; one that sleeps has none."""
        return () if alias in self._engine.asleep() else self._lifecycle.given(alias)

    def _held(self, alias: str) -> Iterable[Job]:
        """Those that will go on in their model's turn."""
        return () if alias in self._scheduler.pauses else self._lifecycle.held(alias)

    def _running(self, unfinished: Iterable[Job], now: float) -> tuple[Goal, ...]:
        """When each's next token is due, and its last one, if its answer is as long as its model's usually are.

        Nothing where none of them has an objective. Before its first token it is taken to have that as late as it may.
        """
        if not any(job.objective is not None for job in unfinished):
            return ()
        return tuple(self.goal(job, now) for job in unfinished)

    def _again(self, alias: str, tier: Tier) -> int:
        """The tokens of what runs that are prefilled again, where their keys and values are not there any more."""
        if tier is Tier.RESIDENT:
            return 0
        kept = tier is Tier.PARKED and all(
            info.kv_kept is not KvKept.NONE for info in self._engine.contexts() if info.alias == alias
        )
        started = () if kept else self._given(alias)
        return sum(job.prompt_tokens + self._engine.tokens(job.call_id) for job in started)

    def goal(self, job: Job, now: float) -> Goal:
        """What one that was given to the engine, or is held, is to the policy where others have objectives."""
        objective, ahead, said = job.objective, now - time.time(), self._scheduler.costs.said(job.alias)
        if objective is None:
            return Goal(math.inf, math.inf)
        first_by = job.request.received + objective.ttft_s
        tokens = self._engine.tokens(job.call_id) / job.samples
        in_time = tokens > 0 and job.started is not None and job.started <= first_by
        return under_way(objective, first_by + ahead, in_time=in_time, tokens=tokens, answer=said)

    def _left_of(self, alias: str, now: float) -> int:
        """The tokens that unfinished requests have yet to cost, by how long those of their model usually run."""
        held = sum(job.tokens for job in self._held(alias))
        started = self._given(alias)
        tokens = sum(job.tokens for job in started)
        if not tokens:
            return held
        served_s = self._active_time.snapshot(alias, now)[0] - sum(job.tokens * job.began for job in started) / tokens
        usual_s = self._scheduler.costs.pace(alias).request_s
        return held + int(tokens * max(_LAST, 1 - served_s / usual_s if usual_s else 0.0))
