"""How fast each model works, as seen while it serves; what the scheduler's estimates rest on."""

import time
from collections.abc import Callable

from schemas.usage import tokens_of
from service.ports import Answer
from service.scheduling.batch import Steps
from service.scheduling.costs import Costs
from service.worker.jobs import Job
from service.worker.work_done import WorkDone

_ENOUGH_S, _LONG_S = 1.0, 60.0
"""Of a model that always has something unfinished, the least serving that says something of its pace. What is finished
in a time says how much was done in it where as much was begun before it as is unfinished after it: so it is at least
twice as long as the oldest of those that run has been, but for what runs for longer than half a minute."""


class Throughput:
    """Adds up the tokens of finished answers while a model has work, over its turns, and tells the costs.

    Tokens are what a request was taken to cost, not what it turned out to: so what waits is counted, too.
    """

    def __init__(
        self, costs: Costs, *, said: Callable[[str], int] = lambda _: 0, clock: Callable[[], float] | None = None
    ) -> None:
        """``said`` gives how many tokens a call has so far."""
        self._costs = costs
        self._work = WorkDone(costs, said)
        self._clock = clock or time.monotonic
        self._alias = ""
        self._since: float | None = None
        self._seconds: dict[str, float] = {}
        self._ended: dict[str, tuple[int, int]] = {}
        """Requests that ended in that time, and the tokens that they were taken to cost."""
        self._thin: set[str] = set()
        """The models that have had nothing waiting for room at some time since their pace was told last."""
        self._worked = 0.0
        self._rows = 0
        self._batch: dict[str, tuple[float, float]] = {}
        self._running: dict[str, dict[Job, None]] = {}
        """Of each model, in the order in which they began."""
        self._steps: dict[str, Steps] = {}

    def worked(self, now: float) -> float:
        """Seconds in which the active model has had something to do, so far."""
        return self._worked + (0.0 if self._since is None else now - self._since)

    def steps(self, alias: str) -> Steps:
        """How fast the model's batch works."""
        return self._steps.setdefault(alias, Steps())

    def begun(self, job: Job) -> None:
        """A run begins."""
        job.beside = self._beside(job.alias)
        self._work.begun(job)
        self._running.setdefault(job.alias, {})[job] = None

    def ended(self, job: Job) -> None:
        """It ends, in whatever way."""
        self._running.get(job.alias, {}).pop(job, None)

    def look(self, alias: str, now: float, *, rows: int, waiting: bool) -> None:
        """``alias`` is active with so many requests in its batch, and something ``waiting`` for room in it or not."""
        self.stop(now)
        if not waiting:
            self._thin.add(alias)
        if rows:
            self._alias, self._since, self._rows = alias, now, rows
        elif self._seconds.get(alias, 0.0) >= self._costs.pace(alias).request_s / 2:
            self._tell(alias)  # less than that is the end of a batch whose time was told with its first request

    def stop(self, now: float) -> None:
        """Nothing runs for a while: a switch begins."""
        if self._since is not None:
            passed, self._since = now - self._since, None
            self._worked += passed
            rows, seconds = self._batch.get(self._alias, (0.0, 0.0))
            self._batch[self._alias] = rows + self._rows * passed, seconds + passed
            self._seconds[self._alias] = self._seconds.get(self._alias, 0.0) + passed
            running = self._running.get(self._alias, ())
            self._work.served(self._alias, passed, self._rows, running, served_s=seconds + passed)

    def stalled(self, at: float) -> None:
        """A switch began to stall the model, whoever had asked for it."""
        if self._since is not None and self._since <= at:
            self.stop(at)

    def finished(self, job: Job, answer: Answer) -> None:
        """A request ran to its end: what it cost, its freezes left out."""
        if answer.status >= 400 or job.started is None:
            return
        alias = job.alias
        said = tokens_of(answer.body)["generated_tokens"]
        if said or not answer.aborted:  # or it was perhaps never read
            self._work.ended(job, said, continued=max(answer.continued, default=0))
        if answer.aborted:
            return
        told = said if said or job.tokens == job.prompt_tokens else None  # an answer that does not say what it cost
        self._costs.finished(alias, seconds=job.ran_s(time.time()), tokens=job.tokens, said=told)
        requests, tokens = self._ended.get(alias, (0, 0))
        self._ended[alias] = requests + 1, tokens + job.tokens
        if self._since is not None:
            self.look(self._alias, self._clock(), rows=self._rows, waiting=True)
        self._learn(job, answer, said)
        oldest_s = min(_LONG_S, 2 * self._oldest_s(alias))
        if self._seconds.get(alias, 0.0) >= max(_ENOUGH_S, self._costs.pace(alias).request_s, oldest_s):
            self._tell(alias)

    def _oldest_s(self, alias: str) -> float:
        """For how long the model has served since the oldest of its requests that run began."""
        oldest = next(iter(self._running.get(alias, ())), None)
        return 0.0 if oldest is None else self._beside(alias)[1] - oldest.beside[1]

    def _beside(self, alias: str) -> tuple[float, float]:
        """Seconds of requests in the model's batch so far, and seconds in which there was one."""
        rows, seconds = self._batch.get(alias, (0.0, 0.0))
        if self._since is not None and alias == self._alias:
            passed = self._clock() - self._since
            return rows + self._rows * passed, seconds + passed
        return rows, seconds

    def _learn(self, job: Job, answer: Answer, said: int) -> None:
        """What a whole run says of its model's steps; one that went on with what an earlier one had said does not."""
        if job.started is None or answer.first_token_s is None or answer.continued or not said:
            return
        first_at = job.started + answer.first_token_s
        first_s = answer.first_token_s - sum(freeze.seconds for freeze in job.freezes if freeze.began < first_at)
        ran_s = job.ran_s(time.time())
        rows, seconds = (after - before for after, before in zip(self._beside(job.alias), job.beside, strict=True))
        self.steps(job.alias).finished(
            prompt=job.prompt_tokens,
            asked=job.tokens - job.prompt_tokens,
            said=said,
            first_s=max(0.0, first_s),
            rest_s=max(0.0, ran_s - first_s),
            beside=max(1.0, rows / seconds if seconds > 0 else 1.0),
        )

    def _tell(self, alias: str) -> None:
        seconds, (requests, tokens) = self._seconds.pop(alias, 0.0), self._ended.pop(alias, (0, 0))
        full = alias not in self._thin
        self._costs.worked(alias, seconds=seconds, tokens=tokens, requests=requests, full=full)
        self._thin.discard(alias)
