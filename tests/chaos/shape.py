"""What hostile records are made of: the batch, the topic it is for, and what its writer knows."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any

from tests.support.batches import Codec, Raw, encode_batch

MIB = 1 << 20
LLAMA, QWEN = "llama", "qwen"


class Role(Enum):
    """What a topic is for."""

    REQUESTS = auto()
    REQUESTS_OF_ONE = auto()
    CONTROL = auto()
    COMMANDS = auto()
    WORKERS = auto()
    LEDGERS = auto()
    RESULTS = auto()
    CHUNKS = auto()
    DEAD_LETTERS = auto()
    STATUS = auto()


ASKING = frozenset({Role.REQUESTS, Role.REQUESTS_OF_ONE})


@dataclass(frozen=True)
class Shape:
    """Records that go into one batch. ``timestamp_ms``: None is now."""

    name: str
    records: tuple[Raw, ...]
    codec: Codec = Codec.NONE
    timestamp_ms: int | None = None
    answered: bool = False
    """They are good requests but for their lies: they must be completed as if nothing had been said."""

    @cached_property
    def batch(self) -> bytes:
        """What goes over the wire."""
        moment = round(time.time() * 1000) if self.timestamp_ms is None else self.timestamp_ms
        return encode_batch(self.records, timestamp_ms=moment, codec=self.codec)


@dataclass(frozen=True)
class Seen:
    """What a stranger who reads along knows of the pool."""

    prefix: str
    pool: str
    workers: tuple[str, ...]
    requests: tuple[str, ...] = field(default=("nobody",))
    """Ids of requests that were asked a moment ago."""


def one(name: str, value: bytes | None, *headers: tuple[bytes, bytes | None], key: bytes | None = b"key") -> Shape:
    return Shape(name, (Raw(key, value, headers),))


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()


BODY: Mapping[str, Any] = {"model": LLAMA, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
ASKED = dump(BODY)
