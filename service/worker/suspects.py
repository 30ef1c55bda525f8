"""Who was there at a death, and beside whom it may run again: a culprit is found by its third death."""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable

from service.worker.jobs import Job

CAUTION = 16
"""The square root of how many run at once: a first death among 256 makes suspects of 16 at the second one at most."""


class Suspects:
    """Jobs that are held back, by model, until they may start.

    Of those that have been at one death, CAUTION run at once at most, beside any others; who has been at two runs with
    nothing beside it. What another model has frozen takes no step, and is no company.
    """

    def __init__(self) -> None:
        self._held: defaultdict[str, deque[Job]] = defaultdict(deque)
        self.alone: Job | None = None
        """The one that was started alone and still runs."""

    def hold(self, job: Job) -> None:
        """It is its model's turn, and not yet its own."""
        self._held[job.alias].append(job)

    def held(self, alias: str) -> Iterable[Job]:
        """What is held back and still wanted."""
        return (job for job in self._held[alias] if job.ending is None)

    def closed(self, alias: str) -> bool:
        """Whether nobody else may start on this model: one runs alone, or waits for that."""
        if self.alone is not None and self.alone.alias == alias:
            return True
        return bool(self._held.get(alias)) and any(job.suspect for job in self.held(alias))

    def may_start(self, job: Job, running: Collection[Job]) -> bool:
        """Whether ``job`` may start beside what runs on its model."""
        if job.suspect or self.alone in running:
            return not running
        return not job.deaths or sum(other.deaths > 0 for other in running) < CAUTION

    def release(self, alias: str, running: Collection[Job]) -> Job | None:
        """The next that may start now: who was at one death, then who is to be alone, then whom that held up."""
        waiting = self._held[alias] = deque(self.held(alias))
        job = min(waiting, key=lambda job: (not job.deaths, job.suspect), default=None)
        if job is None or not self.may_start(job, running):
            return None
        waiting.remove(job)
        return job

    def drain(self, alias: str) -> list[Job]:
        """Give up all that is held back for a model."""
        return [job for job in self._held.pop(alias, ()) if job.ending is None]
