"""What hostile records are made of: the batch, the topic it is for, and what its writer knows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any

from tests.chaos.mark import marked
from tests.support.batches import CODECS, Raw, batch, content_of

MIB = 1 << 20
LLAMA, QWEN = "llama", "qwen"


class Role(Enum):
    """What a topic is for."""

    REQUESTS = auto()
    REQUESTS_OF_ONE = auto()
    THROTTLED = auto()
    CONTROL = auto()
    COMMANDS = auto()
    WORKERS = auto()
    LEDGERS = auto()
    PROGRESS = auto()
    RESULTS = auto()
    CHUNKS = auto()
    DEAD_LETTERS = auto()
    STATUS = auto()
    CALLS = auto()
    ANSWERS = auto()
    USAGE = auto()
    FILES = auto()
    BATCHES = auto()


ASKING = frozenset({Role.REQUESTS, Role.REQUESTS_OF_ONE, Role.THROTTLED, Role.CALLS})


@dataclass(frozen=True)
class Shape:
    """Records that go into one batch. ``at``: when they say they were made; None is now."""

    name: str
    records: tuple[Raw, ...]
    codec: str = "none"
    at: float | None = None
    answered: bool = False
    """They are good requests but for their lies: they must be completed as if nothing had been said."""

    packed: bytes | None = None
    """The whole batch, where its records could not be held."""

    @cached_property
    def batch(self) -> bytes:
        """What goes over the wire."""
        made = self.packed or batch(content_of(self.records), len(self.records), codec=CODECS[self.codec], at=self.at)
        return marked(made)


@dataclass(frozen=True)
class Seen:
    """What a stranger who reads along knows of the pool."""

    prefix: str
    pool: str
    workers: tuple[str, ...]
    requests: tuple[str, ...] = field(default=("nobody",))
    """Ids of requests that were asked a moment ago."""
    topic_ids: Mapping[str, str | None] = field(default_factory=dict)
    """Of topics with requests."""


def record(key: bytes | None, value: bytes | None, headers: Sequence[tuple[bytes, bytes | None]] = ()) -> Raw:
    """A record, in the order in which records are written."""
    return Raw(value=value, key=key, headers=headers)


def one(name: str, value: bytes | None, *headers: tuple[bytes, bytes | None], key: bytes | None = b"key") -> Shape:
    return Shape(name, (record(key, value, headers),))


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


BODY: Mapping[str, Any] = {"model": LLAMA, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
ASKED = dump(BODY)
