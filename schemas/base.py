"""What every message shares: immutability, tolerance for fields of later versions, and where a record came from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, ParamSpec, TypeVar, cast, dataclass_transform

from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")
_set = object.__setattr__

read_json = partial(from_json, cache_strings="keys")
"""JSON as Python's values. Of strings that are no keys pydantic would keep 16,384, ids and short prompts among them."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def immutable(cls: type[T]) -> type[T]:
    """A dataclass with slots whose fields never change: the type checker sees to it.

    ``frozen=True`` would see to it at run time, too, and to make one would cost three times as much. These are made
    for every request.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class Message(BaseModel):
    """A message of the contract. Unknown fields are kept, never an error: an older reader meets newer writers."""

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="null", cache_strings="keys")


class Value(BaseModel):
    """A part of a message, under the same rule."""

    model_config = ConfigDict(frozen=True, extra="allow", ser_json_inf_nan="null", cache_strings="keys")


def unchecked(kind: Callable[P, M], *_: P.args, **fields: P.kwargs) -> M:
    """A message made of what is valid already, at half of what it costs to have pydantic look at that again."""
    model = cast("type[M]", kind)
    made = model.__new__(model)
    _set(made, "__dict__", {**_defaults(model), **fields})
    _set(made, "__pydantic_fields_set__", set(fields))
    _set(made, "__pydantic_extra__", {})
    _set(made, "__pydantic_private__", None)
    return made


@cache
def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Of each field, in their order; one that has none, or one of its own in each message, is to be given."""
    return {name: field.default for name, field in model.model_fields.items()}


@immutable
class Origin:
    """The topic, partition and offset that a request was read from; exactly one result exists per origin.

    These three are all it will ever have: two are the same where they are, whatever a later version says beside them.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="ignore")

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


MAX_ATTRIBUTE = 256
"""Bytes that an attribute of a message may have: its id, its model, and whatever else is told apart or echoed."""

Headers = Sequence[tuple[str, bytes | None]]
"""Names may repeat, and a value may be null: Kafka has both."""


@immutable
class Record:
    """A Kafka record as it was read. ``timestamp`` is the broker's, in seconds since the epoch."""

    topic: str
    partition: int
    offset: int
    timestamp: float
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    damage: str | None = None
    """What is wrong with the bytes that the broker keeps, where they are no whole record; the rest is what could be
    read of it."""

    @property
    def origin(self) -> Origin:
        return Origin(topic=self.topic, partition=self.partition, offset=self.offset)

    @property
    def size(self) -> int:
        """Bytes that keeping this record costs: key, value and headers."""
        size = len(self.key or b"") + len(self.value or b"")
        for name, value in self.headers:
            size += len(name) + len(value or b"")
        return size


@immutable
class Outgoing:
    """A record to be written. Without ``partition``, that is chosen by the key."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers = field(default=())
    partition: int | None = None
