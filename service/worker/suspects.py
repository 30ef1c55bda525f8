"""Who was there at a death, and beside whom it may run again: a culprit is found by its third death."""

from collections import defaultdict, deque
from collections.abc import Iterable

from service.worker.jobs import Job

CAUTION = 16
"""The square root of how many run at once: a first death among 256 makes suspects of 16 at the second one at most."""


class Given(set[Job]):
    """What a model has been given. ``at_deaths``: those of it that have been at a death, mostly none."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        super().__init__(jobs)
        self.at_deaths = {job for job in self if job.deaths}

    def add(self, job: Job) -> None:
        super().add(job)
        if job.deaths:
            self.at_deaths.add(job)

    def discard(self, job: object) -> None:
        super().discard(job)
        self.at_deaths.discard(job)


class Suspects:
    """Jobs that have their model's turn and may not start yet, by model.

    Of those that have been at one death, CAUTION run at once at most, beside any others; who has been at two runs with
    nothing beside it. ``running`` is what its model has been given: what another model has frozen takes no step.
    """

    def __init__(self) -> None:
        self._held: defaultdict[str, deque[Job]] = defaultdict(deque)

    def hold(self, job: Job) -> None:
        """Keep a job until ``release`` returns it."""
        self._held[job.alias].append(job)

    def withdraw(self, job: Job) -> None:
        """Keep it no longer: it has ended."""
        self._held[job.alias].remove(job)

    def held(self, alias: str) -> Iterable[Job]:
        """What a model has here."""
        return tuple(self._held.get(alias, ()))

    def closed(self, alias: str, running: Given) -> bool:
        """Whether nobody else may start on this model: a job runs alone there, or waits for that."""
        return any(job.suspect for job in (*running.at_deaths, *self._held.get(alias, ())))

    def may_start(self, job: Job, running: Given) -> bool:
        """Whether ``job`` may start beside what runs on its model."""
        if job.suspect or any(other.suspect for other in running.at_deaths):
            return not running
        return not job.deaths or len(running.at_deaths) < CAUTION

    def release(self, alias: str, running: Given) -> Job | None:
        """The next that may start now: who was at one death, then who is to be alone, then whom that held up."""
        job = min(self._held.get(alias, ()), key=lambda job: (not job.deaths, job.suspect), default=None)
        if job is None or not self.may_start(job, running):
            return None
        self.withdraw(job)
        return job
