"""What of the pool's work this worker is given: it tells its group what its models ask for, and asks to place anew."""

import asyncio
from collections.abc import Callable

from service.ports import RequestSource, Settlement, Watcher
from service.scheduling.demand import Shortfalls, Unrest
from service.scheduling.scheduler import Scheduler
from service.worker.jobs import Job

_LOOK_S = 10.0


class Placing(Watcher):
    """A model counts by the seconds of a device that its requests take, and up to twice that where they are late.

    Bytes or requests would not do: a request of one model may cost a hundred times what one of another does. Nor would
    cost alone: what several models on one device lose to each other is in no cost, and shows in what they miss.
    """

    def __init__(self, *, source: RequestSource, scheduler: Scheduler[Job]) -> None:
        self._source = source
        self._scheduler = scheduler
        self._shortfalls = Shortfalls()
        self._now: Callable[[], float] = asyncio.get_running_loop().time
        self._unrest = Unrest(self._now())
        source.weigh(self.load)

    def settled(self, settlement: Settlement, *, alias: str, publish_s: float) -> None:  # noqa: ARG002
        """Note whether a request met its objective."""
        reached = settlement.result.objective
        if reached is not None and alias:
            self._shortfalls.seen(alias, reached.request_class, reached.met, self._now())

    def load(self, alias: str, requests_per_s: float) -> float:
        """Seconds of a device per second that so many requests of a model ask for."""
        pace = self._scheduler.costs.pace(alias)
        return requests_per_s * pace.work_s(pace.request_tokens) * (1.0 + self._short(alias))

    async def run(self) -> None:
        """Look whether to ask for another placement, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            state = self._source.state()
            short = {alias: missed for alias in self._scheduler.models if (missed := self._short(alias)) > 0}
            if state.joined and self._unrest.asks(bool(short), state.rebalances, self._now()):
                self._source.place_anew(short)

    def _short(self, alias: str) -> float:
        return self._shortfalls.of(alias, self._scheduler.objectives(alias), self._now())
