"""What of the pool's work this worker is given: it tells its group what its models ask for, and asks to place anew."""

import asyncio
from collections.abc import Callable

from schemas.objectives import Attainment
from schemas.results import Outcome, Result
from service.ports import RequestSource, Settlement, Watcher
from service.scheduling.demand import Demand
from service.scheduling.scheduler import Scheduler
from service.settings import TopicSettings
from service.worker.jobs import Job

_LOOK_S = 10.0


class Placing(Watcher):
    """A model counts by the seconds of a device that its requests take, and up to twice that where they are late.

    Bytes or requests would not do: a request of one model may cost a hundred times what one of another does. Nor would
    cost alone: what several models on one device lose to each other is in no cost, and shows in what they miss.
    """

    def __init__(self, *, source: RequestSource, scheduler: Scheduler[Job], topics: TopicSettings) -> None:
        self._source = source
        self._scheduler = scheduler
        self._topics = topics
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self._demand = Demand(self._now())
        source.weigh(self.load)

    def settled(self, settlement: Settlement, *, alias: str, publish_s: float) -> None:  # noqa: ARG002
        """Note whether a request met its objective, where that was the pool's to decide."""
        result, reached = settlement.result, settlement.result.objective
        if reached is not None and alias and _tells(result, reached):
            self._demand.seen(alias, reached.request_class, reached.met, self._now())

    def load(self, alias: str, requests_per_s: float) -> float:
        """Seconds of a device per second that so many requests of a model ask for."""
        pace = self._scheduler.costs.pace(alias)
        short = self._demand.short(alias, self._scheduler.objectives(alias), self._now())
        return requests_per_s * pace.work_s(pace.request_tokens) * (1.0 + short)

    async def run(self) -> None:
        """Look whether to ask for another placement, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            state = self._source.state()
            here = {alias for topic in state.partitions if (alias := self._topics.alias_of(topic)) is not None}
            owned = {alias: self._scheduler.objectives(alias) for alias in here}
            if missed := self._demand.to_be_placed(owned, state.rebalances, self._now()):
                self._source.place_anew(missed)


def _tells(result: Result, reached: Attainment) -> bool:
    """Whether an end says something of how models are placed.

    None that failed does, nor one whose producer would not wait for as long as the objective allows.
    """
    if result.outcome is Outcome.COMPLETED:
        return True
    return result.outcome is Outcome.EXPIRED and result.timing.latency_s >= reached.ttft_s
