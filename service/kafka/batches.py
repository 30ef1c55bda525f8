"""Kafka's record batches, read leniently: what can be read of the records in a batch that is not as it should be.

Only for batches that aiokafka's own decoder gives up; that one is compiled, and gives up the whole batch.
"""

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

_HEAD = struct.Struct(">qiibIhiqqqhii")
HEAD_SIZE = _HEAD.size
"""Bytes before the records of a batch of version 2."""
_ATTRIBUTES_AT = 21
_CODEC, _LOG_APPEND_TIME = 0x07, 0x08
MOST_HEADERS = 10_000
"""Of a record, to be read: each header becomes three objects, and what is left between many small objects stays this
process's."""
_LOOKED_THROUGH = 64 << 10
"""Bytes of a batch from which on it is looked through for records that have more: what is in less takes little."""
_MOST_OFFSETS = 1 << 20
"""A batch that says that it has more offsets says so by damage."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a batch of version 2, as far as reading its records needs it."""

    base: int
    attributes: int
    last_delta: int
    first_timestamp: int
    max_timestamp: int
    count: int

    @classmethod
    def of(cls, batch: bytes) -> Self:
        """Raises struct.error where there are too few bytes."""
        base, _, _, _, _, attributes, last_delta, first, largest, _, _, _, count = _HEAD.unpack_from(batch)
        return cls(base, attributes, last_delta, first, largest, count)

    @property
    def codec(self) -> int:
        """The number of its codec in Kafka's protocol; 0 for none."""
        return self.attributes & _CODEC

    @property
    def next_offset(self) -> int:
        """The offset after its last one; only that of its first one is sure where the number can't be true."""
        return self.base + (self.last_delta if 0 <= self.last_delta < _MOST_OFFSETS else 0) + 1

    @property
    def timestamp_type(self) -> int:
        """1 for the broker's time, 0 for the producer's."""
        return int(bool(self.attributes & _LOG_APPEND_TIME))

    def timestamp(self, delta: int) -> int:
        """A record's own timestamp, or the broker's, in milliseconds."""
        return self.max_timestamp if self.timestamp_type else self.first_timestamp + delta


def plain(batch: bytes, content: bytes) -> bytes:
    """A batch as if it had not been compressed; its checksum no longer fits."""
    (attributes,) = struct.unpack_from(">h", batch, _ATTRIBUTES_AT)
    cleared = struct.pack(">h", attributes & ~_CODEC)
    return b"".join((batch[:_ATTRIBUTES_AT], cleared, batch[_ATTRIBUTES_AT + 2 : HEAD_SIZE], content))


@dataclass(slots=True)
class Parsed:
    """What could be read of one record; ``damage`` says what could not."""

    offset: int
    timestamp: int
    key: bytes | None = None
    value: bytes | None = None
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)
    damage: str | None = None
    timestamp_type: int = 0
    """1 where the timestamp is the broker's, 0 where it is the producer's."""


class Surplus(Exception):
    """A batch goes on behind the last record that could be told apart, or that has an offset."""


def parse(batch: bytes, end: int) -> Iterator[Parsed]:
    """The records of a plain batch of version 2 that can be told apart and have an offset before ``end``.

    Those of which its count does not know come last, as far as offsets are left. Raises Surplus behind them.
    """
    head, at, before = Head.of(batch), HEAD_SIZE, -1
    offsets = end - head.base
    expected = min(head.count, offsets)
    for index in itertools.count():
        free = range(before + 1, offsets - max(1, expected - index) + 1)
        if at == len(batch):
            return
        if not free:
            raise Surplus
        try:
            size, at = _varint(batch, at)
            last = _end(batch, at, size)
        except _Damaged:
            raise Surplus from None
        parsed = _parse_one(head, batch[at:last], free)
        before, at = parsed.offset - head.base, last
        yield parsed


def is_crowded(batch: bytes) -> bool:
    """Whether a record of a plain batch of version 2 has more headers than are read. Takes a microsecond a record."""
    at = HEAD_SIZE
    if len(batch) < _LOOKED_THROUGH:
        return False
    try:
        while at < len(batch):
            size, at = _varint(batch, at)
            end = _end(batch, at, size)
            if size > MOST_HEADERS and _headers_in(batch[at:end]) > MOST_HEADERS:
                return True
            at = end
    except _Damaged:
        pass  # whoever decodes it will tell
    return False


def _headers_in(raw: bytes) -> int:
    """How many a record says that it has. Raises _Damaged."""
    at = 1
    for _ in ("timestamp", "offset"):
        _, at = _varint(raw, at)
    for _ in ("key", "value"):
        size, at = _varint(raw, at)
        at = _end(raw, at, max(0, size))
    return _varint(raw, at)[0]


class _Damaged(Exception):
    """A record is not as it should be; the message says how."""


def _parse_one(head: Head, raw: bytes, offsets: range) -> Parsed:
    """``offsets`` are those, from the batch's first one, that leave one for each record behind it."""
    offset = head.base + offsets.start
    parsed = Parsed(offset=offset, timestamp=head.timestamp(0), timestamp_type=head.timestamp_type)
    try:
        _fill(parsed, head, raw, offsets)
    except _Damaged as error:
        parsed.damage = str(error)
    return parsed


def _fill(parsed: Parsed, head: Head, raw: bytes, offsets: range) -> None:
    """Everything of a record, part by part; what was read before the damage stays. Raises _Damaged."""
    delta, at = _varint(raw, 1)
    parsed.timestamp = head.timestamp(delta)
    delta, at = _varint(raw, at)
    if delta in offsets:
        parsed.offset = head.base + delta
    else:
        parsed.damage = "its offset is not within its batch"
    parsed.key, at = _bytes(raw, at)
    parsed.value, at = _bytes(raw, at)
    count, at = _varint(raw, at)
    if count < 0:
        raise _Damaged(f"it has {count} headers")
    if count > MOST_HEADERS:
        raise _Damaged(f"it has {count} headers, and {MOST_HEADERS} are read at most")
    for _ in range(count):
        name, at = _bytes(raw, at)
        value, at = _bytes(raw, at)
        parsed.headers.append(((name or b"").decode("utf-8", "backslashreplace"), value))
        if not _is_utf8(name):
            parsed.damage = "the name of a header is not UTF-8"
    if at != len(raw):
        raise _Damaged("its length is not that of its parts")


def _is_utf8(name: bytes | None) -> bool:
    try:
        return name is not None and name.decode() is not None
    except UnicodeDecodeError:
        return False


def _bytes(raw: bytes, at: int) -> tuple[bytes | None, int]:
    size, at = _varint(raw, at)
    if size < 0:
        return None, at
    end = _end(raw, at, size)
    return raw[at:end], end


def _end(raw: bytes, at: int, size: int) -> int:
    if not 0 <= size <= len(raw) - at:
        raise _Damaged("a part of it does not end within it")
    return at + size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """A number in Kafka's zigzag coding, and where the next part begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            raise _Damaged("it ends too early")
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), at
    raise _Damaged("a number in it is too long")
