"""What each request in this worker's hands may expect: its turn, its start, its first token and its end."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.ports import Engine
from service.scheduling.batch import Moments, Row, work_off
from service.scheduling.estimate import Coming, Forecast, Work
from service.scheduling.goodput import Goal
from service.scheduling.policy import View
from service.scheduling.queues import Waiting
from service.scheduling.scheduler import Scheduler
from service.worker.jobs import Job
from service.worker.lifecycle import Lifecycle
from service.worker.model_states import ModelStates
from service.worker.switcher import Switcher
from service.worker.throughput import Throughput

_LAST = 0.1
"""The part of what its model's answers usually have that is taken to be left of one that is longer already."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds from now; what has been is zero. Infinite where only the operator knows."""

    turn_s: float
    start_s: float
    first_token_s: float
    end_s: float


class Prospects:
    """What may be expected as things stand, if nothing else arrives."""

    def __init__(self, forecast: Forecast, moments: Mapping[Job, Moments]) -> None:
        self._forecast = forecast
        self._moments = moments

    def of(self, job: Job) -> Expected | None:
        """None for one that neither waits in its model's queue nor runs, or whose model is paused."""
        found = self._moments.get(job)
        if found is None:
            return None
        served_s = self._forecast.served_s
        return Expected(
            self._forecast.turn_s(job.alias),
            served_s(job.alias, found.start),
            served_s(job.alias, found.first) if found.first else 0.0,
            served_s(job.alias, found.end),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row(Row):
    job: Job
    item: Waiting[Job] | None


class Outlook:
    """Works off what is here: each model's batch as fast as it was learnt to be, in the turns that the policy gives."""

    def __init__(
        self,
        *,
        engine: Engine,
        lifecycle: Lifecycle,
        scheduler: Scheduler[Job],
        states: ModelStates,
        switcher: Switcher,
        pace: Throughput,
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._states = states
        self._switcher = switcher
        self._pace = pace

    def look(self) -> Prospects:
        """As things stand."""
        now = time.monotonic()
        view = self._scheduler.view(now, self._states.contexts(now), self._switcher.hold(now))
        moments: dict[Job, Moments] = {}
        work = {}
        for alias in self._engine.aliases:
            running = [self._row(job) for job in self._lifecycle.given(alias)]
            waiting = self._waiting(alias)
            if running or waiting:
                own = self._work_off(alias, running, waiting, view)
                known = list(zip((*running, *waiting), own, strict=True))
                moments |= {row.job: each for row, each in known}
                work[alias] = self._work(alias, known, now)
        return Prospects(self._scheduler.forecast(view, work), moments)

    def _waiting(self, alias: str) -> list[_Row]:
        """What is to begin, in its order: what is held, then the queue; what stands aside behind all others is told."""
        if alias in self._scheduler.pauses:
            return []
        queues = self._scheduler.queues
        queue = list(queues.waiting(alias))
        in_turn = len(queue)
        while in_turn and queues.standing(queue[in_turn - 1].id):
            in_turn -= 1
        queued = (self._row(item.payload, item, aside=n >= in_turn) for n, item in enumerate(queue))
        return [*map(self._row, self._lifecycle.held(alias)), *queued]

    def _row(self, job: Job, item: Waiting[Job] | None = None, *, aside: bool = False) -> _Row:
        """A request as its model's batch has it; of one that is queued, ``item`` is its place."""
        steps, most, said = self._pace.steps(job.alias), job.tokens - job.prompt_tokens, 0
        first_s = steps.first_s(job.prompt_tokens)
        if job.started is not None:
            said = self._engine.tokens(job.call_id)
            first_s = 0.0 if said else max(steps.step_s(1), first_s - job.ran_s(time.time()))
        usual = most * steps.said
        return _Row(
            max(1.0, min(most - said, max(_LAST * usual, usual - said))),
            first_s,
            prompt_s=self._scheduler.costs.work(job.alias).prompt_token_s * job.prompt_tokens,
            tpot_s=job.tpot_s,
            start_by_s=math.inf if item is None else self._scheduler.starts_by(item) - time.monotonic(),
            aside=aside,
            job=job,
            item=item,
        )

    def _work_off(self, alias: str, running: Sequence[_Row], waiting: Sequence[_Row], view: View) -> list[Moments]:
        takes_s = self._scheduler.takes_at(alias) - view.now if alias == view.active else 0.0
        return work_off(
            running,
            waiting,
            self._scheduler.slots(alias),
            self._pace.steps(alias),
            work=self._scheduler.costs.work(alias),
            opens_s=takes_s if math.isfinite(takes_s) else 0.0,
            spare=self._scheduler.spare(view, alias, behind=True),
        )

    def _work(self, alias: str, known: Sequence[tuple[_Row, Moments]], now: float) -> Work:
        objectives = self._scheduler.queues.objectives or any(row.job.objective is not None for row, _ in known)
        return Work(
            dry_s=max(each.end for _, each in known),
            first_s=max(each.first for _, each in known if not each.start),
            step_s=self._pace.steps(alias).step_s(min(self._scheduler.slots(alias), len(known))),
            coming=[self._coming(row, each, now) for row, each in known] if objectives else (),
        )

    def _coming(self, row: _Row, moments: Moments, now: float) -> Coming:
        return Coming(moments, self._goal(row, now), row.job.objective, row.tokens / row.job.samples, row.aside)

    def _goal(self, row: _Row, now: float) -> Goal:
        return self._states.goal(row.job, now) if row.item is None else self._scheduler.goal(row.item)


def known(seconds: float) -> float | None:
    """None where it can't be said."""
    return seconds if math.isfinite(seconds) else None
