"""Record batches as bytes, also such as no client library would write, and a way to get them to a broker."""

import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import cramjam
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.codec import gzip_encode, lz4_encode, snappy_encode, zstd_encode
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.util import calc_crc32c

from schemas.base import Origin

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
_ENCODE = {0: bytes, 1: gzip_encode, 2: snappy_encode, 3: lz4_encode, 4: zstd_encode}
_ZEROS = 1 << 20


@dataclass(frozen=True)
class Raw:
    """A record whose header names are bytes, as they are on the wire."""

    value: bytes | None = None
    key: bytes | None = None
    headers: Sequence[tuple[bytes | None, bytes | None]] = ()


def varint(value: int) -> bytes:
    """Kafka's zigzag coding."""
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(content: bytes | None) -> bytes:
    return varint(-1) if content is None else varint(len(content)) + content


def body_of(record: Raw, delta: int) -> bytes:
    """A record without its length."""
    headers = b"".join(_bytes(name) + _bytes(value) for name, value in record.headers)
    start = b"\x00" + varint(0) + varint(delta)
    return start + _bytes(record.key) + _bytes(record.value) + varint(len(record.headers)) + headers


def content_of(records: Iterable[Raw]) -> bytes:
    """What a batch has after its head, before it is compressed."""
    bodies = [body_of(record, delta) for delta, record in enumerate(records)]
    return b"".join(varint(len(body)) + body for body in bodies)


def batch(
    content: bytes,
    count: int,
    *,
    codec: int = 0,
    base: int = 0,
    attributes: int = 0,
    producer: int = -1,
    compressed: bytes | None = None,
    at: float | None = None,
) -> bytes:
    """A batch of version 2 with a checksum that fits; ``compressed``: what stands there instead of the content."""
    packed = _ENCODE[codec](content) if compressed is None else compressed
    ms = int((time.time() if at is None else at) * 1000)
    checked = struct.pack(">hiqqqhii", attributes | codec, count - 1, ms, ms, producer, -1, -1, count) + packed
    rest = struct.pack(">ibI", -1, 2, calc_crc32c(checked)) + checked
    return struct.pack(">qi", base, len(rest)) + rest


def of(*records: Raw, codec: str = "none", base: int = 0) -> bytes:
    """A batch of these records."""
    return batch(content_of(records), len(records), codec=CODECS[codec], base=base)


def bomb(size: int, codec: str, *, base: int = 0, key: bytes | None = b"k") -> bytes:
    """A batch of one record that would inflate to ``size`` bytes of zeros, made without ever having them all."""
    head = b"\x00" + varint(0) + varint(0) + _bytes(key) + varint(size)
    start = varint(len(head) + size + 1) + head
    return batch(b"", 1, codec=CODECS[codec], base=base, compressed=_deflated(start, size, codec))


def _deflated(start: bytes, zeros: int, codec: str) -> bytes:
    parts = [start, *[bytes(_ZEROS)] * (zeros // _ZEROS), bytes(zeros % _ZEROS) + varint(0)]
    if codec == "snappy":
        return snappy_encode(b"".join(parts))
    if codec == "gzip":
        gzip = zlib.compressobj(9, wbits=31)
        return b"".join(gzip.compress(part) for part in parts) + gzip.flush()
    if codec == "lz4":
        packer = cramjam.lz4.Compressor(level=9, content_checksum=False, block_linked=False)
    else:
        packer = cramjam.zstd.Compressor()
    for part in parts:
        packer.compress(part)
    return bytes(packer.finish())


async def produce(bootstrap: str, topic: str, partition: int, raw: bytes) -> Origin:
    """Write a batch as it is; where its first record is. Raises AssertionError with the broker's code."""
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    await client.bootstrap()
    try:
        await client._wait_on_metadata(topic)
        leader = client.cluster.leader_for_partition(TopicPartition(topic, partition))
        request = ProduceRequest(None, -1, 10_000, [(topic, [(partition, raw)])])
        answer = await client.send(leader, request)
        ((_, ((_, code, offset, *_), *_)),) = answer.topics
        assert code == 0, f"the broker answers with error {code}"
        return Origin(topic=topic, partition=partition, offset=offset)
    finally:
        await client.close()
