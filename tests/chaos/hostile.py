"""What a stranger writes to break the pool: every shape of record, for every topic that a worker or a client reads.

Each shape is one batch. Those on topics of requests are requests, if bad ones: each of their records is to end in one
result, or in a report that it was stepped over.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import Any

from schemas import headers as h
from tests.support.batches import Codec, Raw, encode_batch

MIB = 1 << 20
INFLATED = 65 * MIB
"""More than a worker inflates of one batch by default."""
IN_A_ROW = 100
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

    def batch(self) -> bytes:
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


def shapes(role: Role, seen: Seen) -> Iterator[Shape]:
    """Every shape for a topic of this role."""
    good = _plausible(role, seen)
    yield from _headers(good)
    yield from _sizes(good)
    yield from _values(good)
    yield from _events(good)
    yield from _numbers(good)
    yield from _bombs()
    yield from _forged(role, seen)


def _one(name: str, value: bytes | None, *headers: tuple[bytes, bytes | None], key: bytes | None = b"key") -> Shape:
    return Shape(name, (Raw(key, value, headers),))


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


BODY: Mapping[str, Any] = {"model": LLAMA, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
ASKED = _dump(BODY)


# --- for every topic ----------------------------------------------------------------------------------------------


def _headers(good: bytes) -> Iterator[Shape]:
    known = [*h.OURS, *(f"ce_{name.replace('-', '')}" for name in h.OURS), "ce_id", "ce_type", "ce_time"]
    known += [h.SIGNATURE, h.CONTENT_TYPE, h.TRACEPARENT, h.TRACESTATE, "redrive-history"]
    known += [h.DEAD_LETTER + name for name in ("id", "class", "origin", "attempts", "at", "error", "redriven-as")]
    yield Shape("null header, in a row", (Raw(b"key", good, [(b"x", None)]),) * IN_A_ROW)
    yield Shape("null known header", tuple(Raw(b"key", good, [(name.encode(), None)]) for name in known))
    yield _one("null headers, all of them", good, *((name.encode(), None) for name in known))
    yield _one("header name not UTF-8", good, (b"\xff\xfe\x00", b"x"))
    yield _one("header name a surrogate", good, (b"\xed\xa0\x80", b"x"))
    yield _one("header name empty", good, (b"", b""), (b"", None))
    yield _one("header name of 1 MiB", good, (b"n" * MIB, b"x"))
    yield Shape("header value not UTF-8", tuple(Raw(b"key", good, [(n.encode(), b"\xff\xc0\x80")]) for n in known))
    yield Shape("header value of NULs", tuple(Raw(b"key", good, [(n.encode(), b"\0" * 200)]) for n in known))
    yield _one("headers twice", good, *((b"ce_id", b"%d" % n) for n in range(2)), *((b"ttl", b"x"),) * 3)
    yield _one("100,000 headers", good, *((b"h%d" % n, b"") for n in range(100_000)))
    yield _one("100,000 nulls of one header", good, *((b"traceparent", None),) * 100_000)


def _sizes(good: bytes) -> Iterator[Shape]:
    yield _one("id of 10 KB", good, (b"ce_id", b"i" * 10_000))
    yield _one("id of 257 bytes", good, (b"ce_id", b"i" * 257))
    yield _one("id with controls", good, (b"ce_id", b"a\nb\x00\x1b[2J"))
    yield _one("key of 1 MiB", good, key=b"k" * MIB)
    yield _one("key not UTF-8", good, key=b"\xff\xfe\xfd")
    yield _one("null key", good, key=None)
    yield _one("correlation id of 9 MiB", good, (b"correlation-id", b"c" * (9 * MIB)))
    yield _one("tenant of 1 MiB", good, (b"tenant", b"t" * MIB))
    yield _one("session of 1 MiB", good, (b"session", b"s" * MIB), (b"part", b"0"), (b"final", b"false"))
    yield _one("trace state of 1 MiB", good, (b"traceparent", b"0" * 55), (b"tracestate", b"a=b," * (MIB // 4)))
    yield _one("endpoint of 1 MiB", good, (b"endpoint", b"/v1/" + b"chat/" * (MIB // 5)))
    yield _one("number of 1 MiB", good, (b"ttl", b"9" * MIB))
    yield _one("model of 8 MiB", _dump({**BODY, "model": "m" * (8 * MIB - 300)}))
    yield _one("model of 300 bytes", _dump({**BODY, "model": "l" * 300}))
    yield _one("9 MiB of spaces", b" " * (9 * MIB))


def _values(good: bytes) -> Iterator[Shape]:
    """Bytes that are no JSON, or JSON that nobody expects."""
    deep = b"[" * 200_000, b'{"a":' * 200_000, b'{"model":"llama","messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
    yield Shape("tombstone", (Raw(b"key", None), Raw(b"", None)))
    yield _one("tombstone without a key", None, key=None)
    yield _one("empty", b"")
    yield Shape("deep", tuple(Raw(b"key", value) for value in deep))
    yield _one("deep, 4 MiB", b"[" * (4 * MIB))
    yield _one("deep history", good, (b"redrive-history", b"[" * 100_000), (b"dl-error", b'{"a":' * 100_000))
    odd = [None, True, 5, -0.0, 1e300, "text", [], {}, [BODY], {"model": None}, {"type": None}, {"data": None}]
    odd += [{**BODY, "model": model} for model in (None, True, 5, 1.5, [], {}, "", "../etc", "\x00", "\ud800", "😀")]
    odd += [{**BODY, "messages": messages} for messages in (None, 5, "x", {}, [None], [[[]]], [{"content": {}}])]
    odd += [{**BODY, "type": kind} for kind in (None, 5, [], {}, "switch", "\ud800")]
    yield Shape("odd JSON", tuple(Raw(b"key", _dump(value)) for value in odd))
    raw = [
        b"\xff",
        b"\xef\xbb\xbf" + good,
        good.decode().encode("utf-16"),
        b"\x00" * 100,
        good[:-1],
        good + b"}",
        b"NaN",
    ]
    yield Shape("no JSON", tuple(Raw(b"key", value) for value in raw))
    yield Shape("one name twice", (Raw(b"key", b'{"model":"llama","model":"qwen","messages":[],"messages":[{}]}'),))


def _events(good: bytes) -> Iterator[Shape]:
    """Structured CloudEvents with attributes of odd types."""
    structured = (b"content-type", b"application/cloudevents+json")
    base = {"specversion": "1.0", "id": "x", "source": "/x", "type": "x", "data": json.loads(good)}
    odd: tuple[Any, ...] = (None, True, 5, -0.0, 1e300, [], {}, ["x"] * 1000, "", "x" * 10_000, "\ud800", "\n")
    changed = [{**base, name: value} for name in base for value in odd]
    changed += [{**base, name.replace("-", ""): value} for name in sorted(h.OURS) for value in odd]
    changed += [{"data": {"data": {"data": base}}}, {**base, "data_base64": "e30="}, {"data_base64": "e30="}]
    yield Shape("odd CloudEvents", tuple(Raw(b"key", _dump(value), [structured]) for value in changed))
    yield Shape(
        "CloudEvents that are none", tuple(Raw(b"key", v, [structured]) for v in (b"[]", b"5", b"", b"{}", good))
    )
    batched = (b"content-type", b"application/cloudevents-batch+json")
    yield _one("batched CloudEvents", _dump([base, base]), batched)


NUMBERS = (b"1e400", b"-1e400", b"-0", b"NaN", b"nan", b"inf", b"1e308", b"-1", b"9" * 30, b"9" * 5000, b"0x10", b"1_0")


def _numbers(good: bytes) -> Iterator[Shape]:
    named = (b"ttl", b"deadline", b"priority", b"part", b"received", b"deaths", b"dl-attempts", b"dl-at")
    dates = b"0001-01-01T00:00:00+14:00", b"9999-12-31T23:59:59-14:00", b"2026-13-45", b"\xd9\xa3", b"\xc2\xb2"
    yield Shape("odd numbers", tuple(Raw(b"key", good, [(n, v)]) for n in named for v in (*NUMBERS, *dates)))
    numbers = (b"1e400", b"-1e400", b"-0", b"-0.0", b"NaN", b"Infinity", b"1e308", b"9" * 400, b"18446744073709551616")
    names = b"max_tokens", b"priority", b"temperature", b"offset", b"at", b"interval_s", b"hold", b"seq", b"status"
    bodies = [good[:-1] + b',"%s":%s}' % (name, number) for name in names for number in numbers]
    yield Shape("odd numbers in JSON", tuple(Raw(b"key", body) for body in bodies))
    for moment in (0, 1, 10**15 // 1000):
        yield Shape(f"made at {moment}", (Raw(b"key", good, [(b"ttl", b"-1")]),), timestamp_ms=moment)


def _bombs() -> Iterator[Shape]:
    """Batches that inflate to more than anybody should hold, and one that just does not."""
    for codec in (Codec.ZSTD, Codec.GZIP, Codec.LZ4, Codec.SNAPPY):
        yield Shape(f"bomb {codec.name}", (Raw(b"key", bytes(INFLATED)),), codec)
    half = Raw(b"key", bytes(INFLATED // 2 + MIB))
    yield Shape("bomb of two records", (half, half), Codec.ZSTD)
    yield Shape("bomb of headers", (Raw(b"key", ASKED, [(b"x", bytes(INFLATED))]),), Codec.ZSTD)
    yield Shape("30 MiB that may be inflated", (Raw(b"key", bytes(30 * MIB)), Raw(b"key", ASKED)), Codec.ZSTD)
    yield Shape("compressed lies", (Raw(b"key", ASKED, [(b"\xff", None)]), Raw(b"key", ASKED)), Codec.GZIP)


# --- for one topic ------------------------------------------------------------------------------------------------


def _plausible(role: Role, seen: Seen) -> bytes:
    """What a reader of the topic expects there, in good order."""
    now, of = time.time(), seen.requests[0]
    origin = {"topic": f"{seen.prefix}requests", "partition": 0, "offset": 1}
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "forged"}}]}
    result = {"id": of, "origin": origin, "outcome": "completed", "status": 200, "model": LLAMA, "body": answer}
    presence = {"worker": "stranger", "pool": seen.pool, "at": now, "interval_s": 1.0, "state": "serving"}
    status = {"worker": "stranger", "state": "completed", "kind": "switch", "at": now, "model": QWEN}
    chunk = {"id": of, "seq": 0, "data": {"choices": [{"index": 0, "delta": {"content": "forged"}}]}}
    return {
        Role.CONTROL: _dump({"type": "switch", "model": QWEN, "hold": "forever"}),
        Role.COMMANDS: _dump({"type": "query"}),
        Role.WORKERS: _dump(presence),
        Role.LEDGERS: _dump({"offset": 10**12, "metadata": "", "at": now}),
        Role.RESULTS: _dump({**result, "timing": {"received": now, "finished": now}}),
        Role.CHUNKS: _dump(chunk),
        Role.STATUS: _dump(status),
    }.get(role, ASKED)


def _forged(role: Role, seen: Seen) -> Iterable[Shape]:
    good = _plausible(role, seen)
    make = {
        Role.REQUESTS: _forged_requests,
        Role.REQUESTS_OF_ONE: _forged_requests,
        Role.CONTROL: _forged_control,
        Role.COMMANDS: _forged_control,
        Role.WORKERS: _forged_presences,
        Role.LEDGERS: _forged_ledgers,
        Role.RESULTS: _forged_results,
        Role.CHUNKS: _forged_results,
    }.get(role)
    return () if make is None else make(good, seen)


def _forged_requests(good: bytes, seen: Seen) -> Iterator[Shape]:
    """Marks that only workers may make, ids of others, and answers sent where they would be read as orders."""
    topic = f"{seen.prefix}requests".encode()
    marks: list[list[tuple[bytes, bytes | None]]] = [
        [(b"deaths", b"2")],
        [(b"deaths", b"999999"), (b"received", b"0")],
        [(b"received", b"1e11")],
        [(b"moved-from", topic + b"/0/0")],
        [(b"moved-from", topic + b"/99/18446744073709551615"), (b"deaths", b"3")],
        [(b"moved-from", b"//"), (b"received", b"-1e11"), (b"ttl", b"60")],
    ]
    yield Shape("forged marks", tuple(Raw(b"key", good, headers) for headers in marks), answered=True)
    told = (
        "control",
        "control.commands",
        "requests",
        "requests.llama",
        "workers",
        "ledgers",
        "none",
        "__consumer_offsets",
    )
    replies = [seen.prefix + name for name in told] + ["", "*", "/", "a" * 10_000, "\x00"]
    yield Shape("reply to anywhere", tuple(Raw(b"key", good, [(b"reply-to", name.encode())]) for name in replies))
    parts = ((b"-1",), (b"0.5",), (b"1e400",), (b"7",), (None,))
    sessions = [[(b"session", b"s"), (b"part", part), (b"final", b"true")] for (part,) in parts]
    yield Shape("odd sessions", tuple(Raw(b"key", good, headers) for headers in sessions))


def _forged_control(good: bytes, seen: Seen) -> Iterator[Shape]:
    """Orders that nobody with the key gave."""
    orders: list[dict[str, Any]] = [
        {"type": "switch", "model": QWEN, "hold": "forever"},
        {"type": "pause"},
        {"type": "sleep", "level": 2},
        {"type": "profile", "action": "start"},
        {"type": "reload"},
        {"type": "lora.add", "model": LLAMA, "name": "x", "path": "../../etc"},
        *({"type": "cancel", "request": of} for of in seen.requests),
    ]
    signatures: tuple[tuple[tuple[bytes, bytes | None], ...], ...] = (
        (),
        ((b"signature", None),),
        ((b"signature", b""),),
        ((b"signature", b"0" * 64),),
        ((b"signature", b"\xff" * 64),),
        ((b"signature", b"f" * MIB),),
        ((b"signature", None), (b"Signature", b"0" * 64)),
    )
    for headers in signatures:
        yield Shape("orders without the key", tuple(Raw(b"stranger/x", _dump(o), headers) for o in orders))
    keys = b"*/active", b"*/paused", f"{seen.pool}/active".encode(), *(f"{w}/active".encode() for w in seen.workers)
    yield Shape("what was ordered, taken back", tuple(Raw(key, None) for key in keys))
    yield _one("a result as an order", _plausible(Role.RESULTS, seen))


def _forged_presences(good: bytes, seen: Seen) -> Iterator[Shape]:
    presence = json.loads(good)
    costs: tuple[Any, ...] = ({"x": 1e308}, {"pairs": [["llama", "qwen", "resident", "x"]]}, {"a": {"b": {"c": []}}})
    odd = [{**presence, "worker": worker, "state": "left", "costs": cost} for worker in seen.workers for cost in costs]
    odd += [{**presence, "queues": {QWEN: {"waiting": 1 << 62, "oldest_s": 1e300}}}, {**presence, "pid": 1 << 70}]
    odd += [{**presence, "interval_s": value} for value in (0, -1, 1e308)]
    odd += [{**presence, "worker": "w" * 10_000}, {**presence, "partitions": {"x": [1 << 62] * 1000}}]
    yield Shape("forged presences", tuple(Raw(one["worker"].encode(), _dump(one)) for one in odd))
    yield Shape("many workers", tuple(Raw(b"ghost-%d" % n, good) for n in range(1000)))
    yield Shape("workers taken back", tuple(Raw(worker.encode(), None) for worker in seen.workers))


def _forged_ledgers(good: bytes, seen: Seen) -> Iterator[Shape]:
    values: tuple[bytes | None, ...] = (
        good,
        None,
        b'{"offset":1e400,"metadata":""}',
        b'{"offset":-5,"metadata":"\xff"}',
        b'{"offset":9223372036854775808,"metadata":"1"}',
        b'{"offset":1,"metadata":{}}',
        b'{"offset":1,"metadata":"' + b"A" * MIB + b'"}',
    )
    topics = "requests", "requests.llama", "requests.qwen"
    keys = [f"{seen.pool}/{seen.prefix}{topic}/{n}".encode() for topic in topics for n in range(6)]
    yield Shape("forged ledgers", tuple(Raw(key, value) for key in keys for value in values))


def _forged_results(good: bytes, seen: Seen) -> Iterator[Shape]:
    """Answers that nobody gave, to requests that somebody waits for."""
    told = json.loads(good)
    values = [_dump({**told, "id": of}) for of in seen.requests]
    values += [_dump({**told, "id": of, "outcome": "failed", "seq": 1 << 62, "final": True}) for of in seen.requests]
    yield Shape("forged answers", tuple(Raw(of.encode(), v) for of, v in zip(seen.requests * 2, values, strict=True)))


@cache
def names(role: Role) -> tuple[str, ...]:
    """The names of all shapes for a role."""
    return tuple(shape.name for shape in shapes(role, Seen("", "pool", ("worker",))))
