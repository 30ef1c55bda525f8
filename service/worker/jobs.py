"""The requests that a worker has in hand: where each is, and why it ends."""

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from opentelemetry.trace import Span

from schemas.base import Origin, Record, immutable
from schemas.errors import FailureClass
from schemas.objectives import Objective
from schemas.progress import Progress
from schemas.requests import Attempt, Request
from schemas.results import Freeze
from service.ports import Answer
from service.worker.claims import samples

DEATHS_OF_SUSPECT = 2
_CALLS, _calls = uuid.uuid4().hex[:12], itertools.count(1)


class Phase(StrEnum):
    """Where a job is. It goes down this list, but for a run that is repeated, or a move that is refused."""

    THROTTLED = "throttled"
    """Before its model's queue, until its tenant's quota lets it go on."""
    WAITING = "waiting"
    """In its model's queue."""
    HELD = "held"
    """It is its model's turn; a suspect waits until it may run beside what runs."""
    STARTING = "starting"
    """Its start mark is being written."""
    RUNNING = "running"
    """Given to the engine: it runs, or is frozen."""
    BACKING_OFF = "backing_off"
    """Its run failed, and is repeated a little later."""
    MOVING = "moving"
    """It is being written to its model's own topic."""
    SETTLING = "settling"
    """Its result is being committed."""


IDLE = frozenset({Phase.THROTTLED, Phase.WAITING, Phase.HELD, Phase.BACKING_OFF})
"""Phases in which a job waits for its run, and no task is at work on it."""


class Why(StrEnum):
    """What ends a job from outside, before its answer is complete."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    HOPELESS = "hopeless"
    """Its deadline is still to come, and can't be met."""
    SWITCHED = "switched"
    """A switch of the model aborted it."""
    LOST = "lost"
    """Its partition is another worker's: whatever is to be said of it, that one says."""
    STOPPED = "stopped"
    """This worker ends; another one begins anew."""


@immutable
class Failed:
    """A job that can't be run, or not again, with what is answered."""

    failure: FailureClass
    message: str
    status: int
    kind: str
    """The type of the OpenAI error object."""
    param: str | None = None


@immutable
class Answered:
    """The engine's answer, whatever it is."""

    answer: Answer


Ending = Why | Failed | Answered


@dataclass(slots=True)
class Trace:
    """A job's spans that are open."""

    request: Span
    engine: Span | None = None


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
    prompt_tokens: int = 0
    """The prompt's part of that."""
    objective: Objective | None = None
    """What it is to get: its class's or its model's, as far as its tenant and its headers ask for no less."""
    deadline: float | None = None
    """When its answer stops being wanted, since the epoch: its own, or by the worker's time to live."""
    phase: Phase = Phase.WAITING
    ending: Ending | None = None
    call_id: str = ""
    alone: bool = False
    """It runs with nothing beside it: a death would be its own doing. Only of suspects."""
    waited_for: dict[str, float] = field(default_factory=dict)
    snapshot: tuple[float, float] = (0.0, 0.0)
    """Its model's active seconds and all switching seconds when it began to wait."""
    began: float = 0.0
    """Its model's active seconds when it was given to the engine."""
    beside: tuple[float, float] = (0.0, 0.0)
    """What its model's batch had had by then: see ``Throughput``."""
    read: bool = False
    """Whether its run's prompt has been counted as read, and ..."""
    counted: int = 0
    """... so many tokens of its answer as said: see ``WorkDone``."""
    started: float | None = None
    """When it was given to the engine, since the epoch."""
    frozen_at: float | None = None
    frozen_for: str | None = None
    freezes: list[Freeze] = field(default_factory=list)
    """Of its run."""
    chunks: int = 0
    progress: Progress | None = None
    """What it has said in a run that was broken off, for the next one to go on with."""
    kept_s: float = 0.0
    """How long its run had run when what it said was kept last."""
    task: asyncio.Task[None] | None = None
    """What runs, moves or settles it."""
    retry: asyncio.TimerHandle | None = None
    """What ends its backing off."""
    trace: Trace | None = None

    @property
    def origin(self) -> Origin:
        return self.request.origin

    @property
    def tpot_s(self) -> float:
        """What its objective allows for each token behind the first: no end to it where it has none, or no tokens."""
        return math.inf if self.objective is None or self.tokens <= self.prompt_tokens else self.objective.tpot_s

    @property
    def samples(self) -> int:
        """How many answers it asks for at once."""
        return samples(self.request)

    @property
    def unsettled(self) -> bool:
        """It has ended, and what is to be said of it is another worker's to say."""
        return self.ending is Why.LOST or self.ending is Why.STOPPED

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
        """An id for the engine: a fresh one, or the one under which it goes on. The producer's own never gets there."""
        self.call_id = f"{_CALLS}-{next(_calls)}" if self.progress is None else self.progress.call
        return self.call_id


class Jobs:
    """All jobs of this worker. Ids need not be unique: producers choose them."""

    def __init__(self) -> None:
        self._by_origin: dict[Origin, Job] = {}
        self._by_id: dict[str, dict[Job, None]] = {}
        self._by_correlation: dict[str, dict[Job, None]] = {}
        self.removed = 0
        """How many have gone so far."""

    def __len__(self) -> int:
        return len(self._by_origin)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._by_origin.values()))

    def add(self, job: Job) -> None:
        self._by_origin[job.origin] = job
        self._by_id.setdefault(job.request.id, {})[job] = None
        if job.request.correlation_id is not None:
            self._by_correlation.setdefault(job.request.correlation_id, {})[job] = None

    def remove(self, job: Job) -> None:
        """Forget a job and its timer. Does nothing for one that has gone, though its origin may be here again."""
        if self._by_origin.get(job.origin) is not job:
            return
        del self._by_origin[job.origin]
        self.removed += 1
        if job.retry is not None:
            job.retry.cancel()  # or it would keep the job until its time
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

    @property
    def has_suspects(self) -> bool:
        return any(job.suspect for job in self._by_origin.values())

    def running(self, alias: str | None = None) -> list[Job]:
        """Those given to the engine and not yet answered, frozen ones included."""
        return [job for job in self if job.phase is Phase.RUNNING and alias in (None, job.alias)]


def _take_out(index: dict[str, dict[Job, None]], key: str, job: Job) -> None:
    jobs = index[key]
    del jobs[job]
    if not jobs:
        del index[key]
