"""What each model has been given, and whom a death points to: a suspect's run that had the engine to itself."""

import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from schemas.base import Origin
from service.worker.active_time import ActiveTime
from service.worker.jobs import Job, Phase, Why
from service.worker.runner import Runner
from service.worker.suspects import Given
from service.worker.tasks import Tasks

_UNDER_WAY = frozenset({Phase.STARTING, Phase.RUNNING})
TRIAL_S = 2.0
"""What a suspect does, it mostly does at once: so long it is left alone before its model's turn may end."""


class Runs:
    """Jobs from their start until their result is committed.

    A suspect is alone while it is all that its model was given, its model takes the steps, and the engine is asked
    for nothing else. ``dead``: the engine died, and nobody starts any more. ``culprit`` is the origin of the run that
    was alone then, if one was.
    """

    def __init__(self, *, runner: Runner, active_time: ActiveTime, tasks: Tasks) -> None:
        self._runner = runner
        self._active_time = active_time
        self._tasks = tasks
        self._given: defaultdict[str, Given] = defaultdict(Given)
        self._suspects: dict[Job, float] = {}
        """Those that were given to a model, and since when."""
        self._others = 0
        """How many who ask the engine for something else are there."""
        self._leaving = 0
        """How many of them switch."""
        self.dead = False
        self.culprit: Origin | None = None

    def of(self, alias: str) -> Given:
        """The jobs that take a model's slots."""
        return self._given[alias]

    def add(self, job: Job) -> None:
        """A job starts."""
        self._given[job.alias].add(job)
        if job.suspect:
            self._suspects[job] = time.monotonic()
        self.look()

    def remove(self, job: Job) -> None:
        """A job has ended, or its run is to be repeated."""
        self._given[job.alias].discard(job)
        self._suspects.pop(job, None)
        job.alone = False
        self.look()

    def look(self) -> None:
        """Say of each suspect whether only it takes steps: then a death is its own doing, and else never."""
        for job in self._suspects:
            alone = self._has_engine(job)
            if alone != job.alone:
                job.alone = alone
                if job.task is not None:
                    self._tasks.spawn(f"mark {job.request.id}", self._mark, job)

    def trial_until(self) -> float:
        """Until when a suspect that has just been given to the active model is to be left alone; the past: none is."""
        return max((since + TRIAL_S for job, since in self._suspects.items() if job.alone), default=0.0)

    @property
    def switching(self) -> bool:
        """Whether a switch is under way, be it that the model that is left still drains."""
        return self._leaving > 0

    def has_turn(self, alias: str) -> bool:
        """Whether a model takes the steps and no switch is about to begin: a suspect that starts now can be alone."""
        return self._active_time.active == alias and not self._leaving

    @asynccontextmanager
    async def company(self, *, of_switch: bool = False) -> AsyncIterator[None]:
        """While this is open the engine is asked for something else, such as a switch, and nobody is alone.

        It opens when that is committed: should all be killed at once, the next worker must not find it otherwise.
        """
        self._others += 1
        self._leaving += of_switch
        try:
            alone = [job for job in self._suspects if job.alone]
            self.look()
            for job in alone:
                await self._mark(job)
            if alone:
                await self._runner.marks_committed()
            yield
        finally:
            self._others -= 1
            self._leaving -= of_switch
            self.look()

    def engine_died(self) -> None:
        """The first sign of it counts: what ends afterwards ends because of it."""
        if not self.dead:
            self.dead = True
            ran = (job.origin for job in self._suspects if job.alone and job.phase is Phase.RUNNING)
            self.culprit = next(ran, None)

    def _has_engine(self, job: Job) -> bool:
        return not self._others and len(self._given[job.alias]) == 1 and self._active_time.active == job.alias

    async def _mark(self, job: Job) -> None:
        """The origin of a job that is lost may have been read again: what is marked there is not ours any more."""
        if job.phase in _UNDER_WAY and job.ending is not Why.LOST:
            await self._runner.mark(job)
