"""What a consumer gets: one terminal result per request, and the chunks of a streamed one."""

import math
from enum import StrEnum
from typing import Any

from pydantic import Field

from schemas.base import Message, Origin, Value
from schemas.errors import ErrorObject, FailureClass
from schemas.objectives import Attainment
from schemas.requests import Attempt


class Outcome(StrEnum):
    """How a request ended. The first outcome settles it."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class Freeze(Value):
    """One stay of a running request in an inactive context: tokens it had by then, and how long it stayed."""

    tokens: int
    seconds: float
    model: str | None = None
    """The model that was active in the meantime."""
    began: float = 0.0
    """Since the epoch."""


class Timing(Value):
    """Where a request's time went, in seconds; ``received`` and ``finished`` are since the epoch."""

    received: float
    finished: float
    waited_s: float = 0.0
    """From the broker's timestamp until it was given to the engine."""
    waited_for: dict[str, float] = Field(default_factory=dict)
    """The same, by reason: ``read``, ``turn`` (another model was active), ``switch``, ``queue``, ``park``,
    ``quota`` (its tenant had what it may have)."""
    first_token_s: float | None = None
    latency_s: float = 0.0
    """From the broker's timestamp until the result was ready to publish."""
    freezes: tuple[Freeze, ...] = ()
    """Of the run that it ended with."""

    @property
    def frozen_s(self) -> float:
        """How long it stayed in an inactive context."""
        return sum(freeze.seconds for freeze in self.freezes) if self.freezes else 0.0

    @property
    def frozen_first_s(self) -> float:
        """The part of that which began before its first token; all of it, where none came."""
        first_s = math.inf if self.first_token_s is None else self.waited_s + self.first_token_s
        return sum(freeze.seconds for freeze in self.freezes if freeze.began < self.received + first_s)


class Result(Message):
    """The terminal outcome of a request, committed in one Kafka transaction with the request's offset.

    ``body`` is what vLLM's server would have answered (the partial answer of a cancelled or expired request),
    ``status`` the HTTP status it would have used.
    """

    id: str
    origin: Origin
    """The record that asked. For a request that was moved to its model's own topic this is the producer's record where
    the workers have a pool key, and the moved one where they have none."""
    says_moved_from: Origin | None = None
    """Of a moved record, where the workers have no pool key: the producer's record, as this one says. Nobody vouches
    for that."""
    outcome: Outcome
    status: int
    model: str | None = None
    endpoint: str | None = None
    body: dict[str, Any] | None = Field(default=None, repr=False)
    error: ErrorObject | None = None
    failure: FailureClass | None = None
    attempt: Attempt = Attempt()
    continued: tuple[int, ...] = ()
    """How many tokens the answer had each time that a run, of this worker or another, went on with what it had said by
    then; the first one first."""
    timing: Timing
    objective: Attainment | None = None
    """What it was to get and whether it did; None where it had no objective, or was cancelled."""
    worker: str = ""
    correlation_id: str | None = None


class Chunk(Message):
    """A piece of a streamed answer: one server-sent event of vLLM's server without its framing.

    ``seq`` counts from 0 within an attempt. An attempt that goes on with the answer of the one before begins with the
    number after the last chunk that it goes on from; what came after that one is void, and is told again. The last
    chunk of an attempt has ``final`` set and no data. ``origin`` and ``says_moved_from`` are the result's. A chunk is a
    preview; only the result is truth.
    """

    id: str
    seq: int
    origin: Origin | None = None
    says_moved_from: Origin | None = None
    attempt: Attempt = Attempt()
    final: bool = False
    data: dict[str, Any] | None = Field(default=None, repr=False)
