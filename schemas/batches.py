"""Files and batches as the log has them: what was stored, and of a batch what was asked, reached and ended."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from schemas.base import MAX_ATTRIBUTE, Message

Id = Annotated[str, Field(min_length=1, max_length=MAX_ATTRIBUTE)]
Natural = Annotated[int, Field(ge=0, lt=1 << 53)]
Moment = Annotated[float, Field(allow_inf_nan=False)]
"""Seconds since the epoch."""


class BatchEnd(StrEnum):
    """How a batch ended, by OpenAI's words."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"
    """Its file is gone, or no broker takes what it asks: what was answered of it is in no file."""


class StoredFile(Message):
    """A file whose content is whole. It lies in ``blocks`` records of one partition, whose keys are ``ID/NUMBER``."""

    type: Literal["file"] = "file"
    id: Id
    filename: str
    purpose: str
    at: Moment
    size: Natural
    """Bytes."""
    partition: Natural = 0
    first: Natural = 0
    last: Natural = 0
    """Where the first and the last block lie."""
    blocks: Natural = 0
    lines: Natural = 0
    """Requests that it has, if it is a batch's input."""
    endpoints: tuple[str, ...] = ()
    """Of those requests."""
    batch: str | None = None
    """The batch that wrote it; the file is one of its answers if the batch's end says so."""


class UnfinishedFile(Message):
    """A file that is being written or deleted: blocks of it may lie from ``first`` on in a partition.

    Its tombstone follows when that is done. Whoever finds it long after takes it that whoever did that has ended.
    """

    type: Literal["file.unfinished"] = "file.unfinished"
    id: Id
    at: Moment
    partition: Natural
    first: Natural
    deleted: bool = False
    """Whether nobody is to find it, though it was whole."""


class BatchAsked(Message):
    """What a batch is to do."""

    type: Literal["batch"] = "batch"
    id: Id
    file: Id
    endpoint: str
    lines: Natural
    at: Moment
    window_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """How long it may take."""
    metadata: dict[str, str] | None = None
    headers: tuple[tuple[str, str], ...] = ()
    """What each of its requests has beside its own: its tenant, its priority."""


class BatchCancelled(Message):
    """Nothing more of a batch is to be asked."""

    type: Literal["batch.cancelled"] = "batch.cancelled"
    id: Id
    at: Moment


class BatchProgress(Message):
    """How many lines of a batch have their answer."""

    type: Literal["batch.progress"] = "batch.progress"
    id: Id
    at: Moment
    completed: Natural
    failed: Natural


class BatchEnded(Message):
    """The end of a batch; the first one counts, with the files that it names."""

    type: Literal["batch.ended"] = "batch.ended"
    id: Id
    at: Moment
    end: BatchEnd
    completed: Natural = 0
    failed: Natural = 0
    output: str | None = None
    errors: str | None = None
    """Files; None where nothing is in them."""
    reason: str | None = None
    """Why it failed."""


Stored = StoredFile | UnfinishedFile | BatchAsked | BatchCancelled | BatchProgress | BatchEnded
_ADAPTER: TypeAdapter[Stored] = TypeAdapter(
    Annotated[Stored, Field(discriminator="type")], config=ConfigDict(cache_strings="keys")
)


def parse_stored(value: bytes) -> Stored:
    """Raises ValueError (pydantic's ValidationError is one)."""
    return _ADAPTER.validate_json(value)


def key_of(stored: Stored) -> str:
    """Under what the latest counts."""
    kind = stored.type.partition(".")[2]
    return f"{stored.id}/{kind}" if kind else stored.id
