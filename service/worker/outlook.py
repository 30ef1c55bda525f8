"""What each request in this worker's hands may expect: its turn, its start, its first token and its end."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from service.ports import Engine
from service.scheduling.batch import Moments, Row, work_off
from service.scheduling.estimate import Forecast, Work
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
        moments: dict[Job, Moments] = {}
        work = {}
        for alias in self._engine.aliases:
            if own := self._moments(alias, now):
                moments |= own
                work[alias] = self._work(alias, own)
        contexts, hold = self._states.contexts(now), self._switcher.hold(now)
        return Prospects(self._scheduler.forecast(now, contexts, hold, work), moments)

    def _moments(self, alias: str, now: float) -> Mapping[Job, Moments]:
        running = list(self._lifecycle.given(alias))
        waiting: list[Job] = []
        if alias not in self._scheduler.pauses:
            waiting += self._lifecycle.held(alias)
            waiting += (item.payload for item in self._scheduler.queues.waiting(alias))
        slots, steps = self._scheduler.slots(alias), self._pace.steps(alias)
        takes = self._scheduler.takes_at(alias)
        opens_s = takes - now if now < takes < math.inf else 0.0
        costs = self._scheduler.costs.work(alias)
        found = work_off(self._rows(running), self._rows(waiting), slots, steps, work=costs, opens_s=opens_s)
        return dict(zip((*running, *waiting), found, strict=True))

    def _work(self, alias: str, moments: Mapping[Job, Moments]) -> Work:
        slots = self._scheduler.slots(alias)
        return Work(
            dry_s=max(each.end for each in moments.values()),
            first_s=max(each.first for each in moments.values() if not each.start),
            step_s=self._pace.steps(alias).step_s(min(slots, len(moments))),
        )

    def _rows(self, jobs: Iterable[Job]) -> list[Row]:
        now = time.time()
        return [self._row(job, now) for job in jobs]

    def _row(self, job: Job, now: float) -> Row:
        steps, most = self._pace.steps(job.alias), job.tokens - job.prompt_tokens
        usual, said = most * steps.said, 0
        first_s = steps.first_s(job.prompt_tokens)
        if job.started is not None:
            said = self._engine.tokens(job.call_id)
            first_s = 0.0 if said else max(0.0, first_s - job.ran_s(now))
        left = min(most - said, max(_LAST * usual, usual - said))
        prompt_s = self._scheduler.costs.work(job.alias).prompt_token_s * job.prompt_tokens
        return Row(max(1.0, left), first_s, prompt_s, job.tpot_s)


def known(seconds: float) -> float | None:
    """None where it can't be said."""
    return seconds if math.isfinite(seconds) else None
