"""The deadlines of all jobs behind one timer. The loop keeps its own timers in order in Python, at a price for each."""

import asyncio
import itertools
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from service.worker.jobs import Job

_FEW = 64
"""So many entries of jobs that have gone are not worth a clean heap."""


class Expiries:
    """Calls ``expire`` with each job whose deadline has come, unless it was discarded before."""

    def __init__(self, expire: Callable[[Job], object]) -> None:
        self._expire = expire
        self._due: list[tuple[float, int]] = []
        """A heap: when, on the loop's clock, and whose, by number. It may know of jobs that have gone."""
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[Job, int] = {}
        self._numbered = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Without a deadline there is nothing to wait for."""
        if job.deadline is None:
            return
        at = asyncio.get_running_loop().time() + max(0.0, job.deadline - time.time())
        number = self._numbers[job] = next(self._numbered)
        self._jobs[number] = job
        heappush(self._due, (at, number))
        if self._due[0][1] == number:
            self._wait()

    def discard(self, job: Job) -> None:
        """Let go of a job."""
        number = self._numbers.pop(job, None)
        if number is None:
            return
        del self._jobs[number]
        if len(self._due) > _FEW + 2 * len(self._jobs):
            self._due = [entry for entry in self._due if entry[1] in self._jobs]
            heapify(self._due)
            self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._due[0][0], self._look) if self._due else None

    def _look(self) -> None:
        self._timer, now = None, asyncio.get_running_loop().time()
        try:
            while self._due and self._due[0][0] <= now:
                job = self._jobs.get(heappop(self._due)[1])
                if job is not None:
                    self.discard(job)
                    self._expire(job)
        finally:
            self._wait()
