"""Record batches made by hand, as a stranger's producer may write them: any bytes, lengths and claims.

A Kafka broker checks a batch's frame, its checksum and its offsets, and nothing of what the records say.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.record.util import calc_crc32c

STRANGE = -666
"""The base sequence of our batches, which says nothing where there is no producer id: a reader can tell them by it."""
_HEAD = struct.Struct(">qiib")
_BODY = struct.Struct(">hiqqqhii")
_LAST_AT = _HEAD.size + 4 + struct.calcsize(">h")
_SEQUENCE_AT = _HEAD.size + 4 + struct.calcsize(">hiqqqh")


class Codec(IntEnum):
    """The compression of a batch, by its number on the wire."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


_ENCODE: dict[Codec, Callable[[bytes], bytes]] = {
    Codec.NONE: bytes,
    Codec.GZIP: gzip_encode,
    Codec.SNAPPY: snappy_encode,
    Codec.LZ4: lz4_encode,
    Codec.ZSTD: zstd_encode,
}


@dataclass(frozen=True, slots=True)
class Raw:
    """One record. Names of headers are bytes here, and any bytes."""

    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[bytes, bytes | None]] = ()


def encode_batch(records: Iterable[Raw], *, timestamp_ms: int, codec: Codec = Codec.NONE) -> bytes:
    """A v2 batch without a producer id, all of whose records were made at ``timestamp_ms``."""
    encoded = [_record(number, record) for number, record in enumerate(records)]
    last = len(encoded) - 1
    body = _BODY.pack(codec, last, timestamp_ms, timestamp_ms, -1, -1, STRANGE, len(encoded))
    body += _ENCODE[codec](b"".join(encoded))
    after_length = struct.calcsize(">ibI")
    return _HEAD.pack(0, after_length + len(body), -1, 2) + struct.pack(">I", calc_crc32c(body)) + body


def is_strange(batch: bytes | memoryview) -> bool:
    """Whether ``encode_batch`` made this batch."""
    (sequence,) = struct.unpack_from(">i", batch, _SEQUENCE_AT)
    return bool(sequence == STRANGE)


def last_offset(batch: bytes | memoryview) -> int:
    """The offset of a batch's last record, counted from its first."""
    (delta,) = struct.unpack_from(">i", batch, _LAST_AT)
    return int(delta)


def _record(number: int, record: Raw) -> bytes:
    parts = [b"\0", _varint(0), _varint(number), _bytes(record.key), _bytes(record.value)]
    parts.append(_varint(len(record.headers)))
    for name, value in record.headers:
        parts += [_bytes(name), _bytes(value)]
    inner = b"".join(parts)
    return _varint(len(inner)) + inner


def _bytes(value: bytes | None) -> bytes:
    return _varint(-1) if value is None else _varint(len(value)) + value


def _varint(number: int) -> bytes:
    """Kafka's signed numbers: zigzag, then seven bits a byte, the lowest first."""
    rest, out = (number << 1) ^ (number >> 63), bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)
