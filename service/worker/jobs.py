"""The requests that this worker holds: by origin, id and correlation id, with what has happened to each."""

import asyncio
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from opentelemetry.trace import Span

from schemas.base import Origin, Record
from schemas.requests import Attempt, Request
from schemas.results import Freeze

DEATHS_OF_SUSPECT = 2


class Phase(StrEnum):
    """Where a job is; it only moves forward, except that a run which may be tried again waits once more."""

    WAITING = "waiting"
    RUNNING = "running"
    SETTLING = "settling"


class Ending(StrEnum):
    """Why a job was ended from outside, before its answer was complete."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    HOPELESS = "hopeless"
    """Its deadline is still to come, and can't be met."""
    SWITCHED = "switched"
    LOST = "lost"
    STOPPED = "stopped"


@dataclass(slots=True)
class Trace:
    """A job's spans that are open."""

    request: Span
    engine: Span | None = None
    freezes: int = 0
    """How many of the job's freezes have spans."""


@dataclass(slots=True, eq=False)
class Job:
    """One request in this worker's hands. ``taken`` and ``frozen_at`` are on the monotonic clock."""

    request: Request
    record: Record
    alias: str
    attempt: Attempt
    taken: float
    deaths: int = 0
    """How many workers or engines have died while it ran."""
    failures: int = 0
    """How many of its runs here ended in an error that may pass."""
    tokens: int = 0
    """What it may cost, prompt and answer together, as far as can be said beforehand."""
    phase: Phase = Phase.WAITING
    ending: Ending | None = None
    call_id: str = ""
    waited_for: dict[str, float] = field(default_factory=dict)
    snapshot: tuple[float, float] = (0.0, 0.0)
    """Its model's active seconds and all switching seconds when it began to wait."""
    began: float = 0.0
    """Its model's active seconds when it was given to the engine."""
    started: float | None = None
    """When it was given to the engine, since the epoch."""
    frozen_at: float | None = None
    frozen_for: str | None = None
    freezes: list[Freeze] = field(default_factory=list)
    chunks: int = 0
    timer: asyncio.TimerHandle | None = None
    """What ends it at its deadline."""
    trace: Trace | None = None

    @property
    def origin(self) -> Origin:
        return self.request.origin

    @property
    def suspect(self) -> bool:
        """It has been there at so many deaths that it runs alone, and only once its mark is committed."""
        return self.deaths >= DEATHS_OF_SUSPECT

    def ran_s(self, now: float) -> float:
        """Seconds that it has run until ``now``, since the epoch, freezes left out."""
        if self.started is None:
            return 0.0
        if self.frozen_at is not None:
            now -= time.monotonic() - self.frozen_at
        return max(0.0, now - self.started - sum(freeze.seconds for freeze in self.freezes))

    def new_call(self) -> str:
        """A fresh id for the engine; the producer's own id never gets there."""
        self.call_id = uuid.uuid4().hex
        return self.call_id


class Jobs:
    """All jobs of this worker. Ids need not be unique: producers choose them."""

    def __init__(self) -> None:
        self._by_origin: dict[Origin, Job] = {}
        self._by_id: dict[str, list[Job]] = {}
        self._by_correlation: dict[str, list[Job]] = {}
        self.removed = 0
        """How many have gone so far."""

    def __len__(self) -> int:
        return len(self._by_origin)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._by_origin.values()))

    def add(self, job: Job) -> None:
        self._by_origin[job.origin] = job
        self._by_id.setdefault(job.request.id, []).append(job)
        if job.request.correlation_id is not None:
            self._by_correlation.setdefault(job.request.correlation_id, []).append(job)

    def remove(self, job: Job) -> None:
        if self._by_origin.pop(job.origin, None) is None:
            return
        self.removed += 1
        if job.timer is not None:
            job.timer.cancel()  # or it would keep the job until its deadline
        _take_out(self._by_id, job.request.id, job)
        if job.request.correlation_id is not None:
            _take_out(self._by_correlation, job.request.correlation_id, job)

    def at(self, origin: Origin) -> Job | None:
        return self._by_origin.get(origin)

    def find(self, *, id_: str | None = None, correlation_id: str | None = None) -> list[Job]:
        """The jobs of an id, or of a correlation id."""
        if id_ is not None:
            return list(self._by_id.get(id_, ()))
        return list(self._by_correlation.get(correlation_id or "", ()))

    def running(self, alias: str | None = None) -> list[Job]:
        """Those given to the engine and not yet answered, frozen ones included."""
        return [job for job in self if job.phase is Phase.RUNNING and alias in (None, job.alias)]


def _take_out(index: dict[str, list[Job]], key: str, job: Job) -> None:
    jobs = index[key]
    jobs.remove(job)
    if not jobs:
        del index[key]
