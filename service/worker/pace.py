"""How fast each model works, as seen while it serves; what the scheduler's estimates rest on. Pure: time is given."""

import time
from typing import Any

from service.ports import Answer
from service.scheduling.costs import Costs
from service.worker.jobs import Job


class Pace:
    """Adds up the tokens of finished answers while the active model has work, and tells the costs turn by turn."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._since: float | None = None
        self._tokens = 0
        self._worked = 0.0

    def worked(self, now: float) -> float:
        """Seconds in which the active model has had something to do, so far."""
        return self._worked + (0.0 if self._since is None else now - self._since)

    def working(self, now: float) -> None:
        """The active model has something to do."""
        if self._since is None:
            self._since = now

    def resting(self, alias: str, now: float) -> None:
        """It has nothing to do any more, or is being left."""
        if self._since is not None:
            self._worked += now - self._since
            self._costs.worked(alias, seconds=now - self._since, tokens=self._tokens)
        self._since, self._tokens = None, 0

    def finished(self, job: Job, answer: Answer) -> None:
        """A request ran to its end: what it cost, its freezes left out."""
        tokens = _tokens(answer.body)
        if answer.status >= 400 or answer.aborted or job.started is None or tokens == 0:
            return
        frozen = sum(freeze.seconds for freeze in job.freezes)
        self._costs.finished(job.alias, seconds=max(0.0, time.time() - job.started - frozen), tokens=tokens)
        self._tokens += tokens


def _tokens(body: dict[str, Any]) -> int:
    usage = body.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if isinstance(total, int) else 0
