"""How fast each model works, as seen while it serves; what the scheduler's estimates rest on."""

import time
from collections.abc import Callable

from service.ports import Answer
from service.scheduling.costs import Costs
from service.worker.jobs import Job

_ENOUGH_S = 1.0
"""Of a model that always has something unfinished, the least serving that says something of its pace."""


class Throughput:
    """Adds up the tokens of finished answers while a model has work, over its turns, and tells the costs.

    Tokens are what a request was taken to cost, not what it turned out to: so what waits is counted, too.
    """

    def __init__(self, costs: Costs, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._costs = costs
        self._clock = clock
        self._alias = ""
        self._since: float | None = None
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._thin: set[str] = set()
        """The models that have had nothing waiting at some time since their pace was told last."""
        self._worked = 0.0

    def worked(self, now: float) -> float:
        """Seconds in which the active model has had something to do, so far."""
        return self._worked + (0.0 if self._since is None else now - self._since)

    def look(self, alias: str, now: float, *, busy: bool, waiting: bool) -> None:
        """``alias`` is active, and has something to do or not, and something ``waiting`` behind that."""
        self.stop(now)
        if not waiting:
            self._thin.add(alias)
        if busy:
            self._alias, self._since = alias, now
        elif self._seconds.get(alias, 0.0) >= self._costs.pace(alias).request_s / 2:
            self._tell(alias)  # less than that is the end of a batch whose time was told with its first request

    def stop(self, now: float) -> None:
        """Nothing runs for a while: a switch begins."""
        if self._since is not None:
            passed, self._since = now - self._since, None
            self._worked += passed
            self._seconds[self._alias] = self._seconds.get(self._alias, 0.0) + passed

    def finished(self, job: Job, answer: Answer) -> None:
        """A request ran to its end: what it cost, its freezes left out."""
        if answer.status >= 400 or answer.aborted or job.started is None:
            return
        alias = job.alias
        self._costs.finished(alias, seconds=job.ran_s(time.time()), tokens=job.tokens)
        self._tokens[alias] = self._tokens.get(alias, 0) + job.tokens
        if self._since is not None:
            self.look(self._alias, self._clock(), busy=True, waiting=True)
        seconds = self._seconds.get(alias, 0.0)
        if seconds >= _ENOUGH_S and seconds >= self._costs.pace(alias).request_s:
            self._tell(alias)

    def _tell(self, alias: str) -> None:
        seconds, tokens = self._seconds.pop(alias, 0.0), self._tokens.pop(alias, 0)
        self._costs.worked(alias, seconds=seconds, tokens=tokens, full=alias not in self._thin)
        self._thin.discard(alias)
