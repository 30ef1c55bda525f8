"""What a stranger writes to break the pool: every shape of record, for every topic that a worker or a client reads.

Each shape is one batch. Those on topics of requests are requests, if bad ones: each of their records is to end in one
result, or in a report that it was stepped over.
"""

import gzip
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from schemas import headers as h
from tests.chaos.forged import forged, plausible
from tests.chaos.shape import ASKED, BODY, MIB, Role, Seen, Shape, dump, one, record
from tests.support.batches import CODECS, batch, bomb

INFLATED = 65 * MIB
"""More than a worker inflates of one batch by default."""
IN_A_ROW = 100


def shapes(role: Role, seen: Seen) -> Iterator[Shape]:
    """Every shape for a topic of this role."""
    good = plausible(role, seen)
    yield from _headers(good)
    yield from _sizes(good)
    yield from _values(good)
    yield from _events(good)
    yield from _numbers(good)
    yield from _bombs()
    yield from forged(role, seen)


def _headers(good: bytes) -> Iterator[Shape]:
    known = [*h.OURS, *(f"ce_{name.replace('-', '')}" for name in h.OURS), "ce_id", "ce_type", "ce_time"]
    known += [h.SIGNATURE, h.CONTENT_TYPE, h.TRACEPARENT, h.TRACESTATE, "redrive-history"]
    known += [h.DEAD_LETTER + name for name in ("id", "class", "origin", "attempts", "at", "error", "redriven-as")]
    yield Shape("null header, in a row", (record(b"key", good, [(b"x", None)]),) * IN_A_ROW)
    yield Shape("null known header", tuple(record(b"key", good, [(name.encode(), None)]) for name in known))
    yield one("null headers, all of them", good, *((name.encode(), None) for name in known))
    yield one("header name not UTF-8", good, (b"\xff\xfe\x00", b"x"))
    yield one("header name a surrogate", good, (b"\xed\xa0\x80", b"x"))
    yield one("header name empty", good, (b"", b""), (b"", None))
    yield one("header name of 1 MiB", good, (b"n" * MIB, b"x"))
    yield Shape("header value not UTF-8", tuple(record(b"key", good, [(n.encode(), b"\xff\xc0\x80")]) for n in known))
    yield Shape("header value of NULs", tuple(record(b"key", good, [(n.encode(), b"\0" * 200)]) for n in known))
    yield one("headers twice", good, *((b"ce_id", b"%d" % n) for n in range(2)), *((b"ttl", b"x"),) * 3)
    yield one("100,000 headers", good, *((b"h%d" % n, b"") for n in range(100_000)))
    yield one("100,000 nulls of one header", good, *((b"traceparent", None),) * 100_000)


def _sizes(good: bytes) -> Iterator[Shape]:
    yield one("id of 10 KB", good, (b"ce_id", b"i" * 10_000))
    yield one("id of 257 bytes", good, (b"ce_id", b"i" * 257))
    yield one("id with controls", good, (b"ce_id", b"a\nb\x00\x1b[2J"))
    yield one("key of 1 MiB", good, key=b"k" * MIB)
    yield one("key not UTF-8", good, key=b"\xff\xfe\xfd")
    yield one("null key", good, key=None)
    yield one("correlation id of 9 MiB", good, (b"correlation-id", b"c" * (9 * MIB)))
    yield one("tenant of 1 MiB", good, (b"tenant", b"t" * MIB))
    yield one("session of 1 MiB", good, (b"session", b"s" * MIB), (b"part", b"0"), (b"final", b"false"))
    yield one("trace state of 1 MiB", good, (b"traceparent", b"0" * 55), (b"tracestate", b"a=b," * (MIB // 4)))
    yield one("endpoint of 1 MiB", good, (b"endpoint", b"/v1/" + b"chat/" * (MIB // 5)))
    yield one("number of 1 MiB", good, (b"ttl", b"9" * MIB))
    yield one("model of 8 MiB", dump({**BODY, "model": "m" * (8 * MIB - 300)}))
    yield one("model of 300 bytes", dump({**BODY, "model": "l" * 300}))
    yield one("9 MiB of spaces", b" " * (9 * MIB))


def _values(good: bytes) -> Iterator[Shape]:
    """Bytes that are no JSON, or JSON that nobody expects."""
    deep = b"[" * 200_000, b'{"a":' * 200_000, b'{"model":"llama","messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
    yield Shape("tombstone", (record(b"key", None), record(b"", None)))
    yield one("tombstone without a key", None, key=None)
    yield one("empty", b"")
    yield Shape("deep", tuple(record(b"key", value) for value in deep))
    yield one("deep, 4 MiB", b"[" * (4 * MIB))
    yield one("deep history", good, (b"redrive-history", b"[" * 100_000), (b"dl-error", b'{"a":' * 100_000))
    odd = [None, True, 5, -0.0, 1e300, "text", [], {}, [BODY], {"model": None}, {"type": None}, {"data": None}]
    odd += [{**BODY, "model": model} for model in (None, True, 5, 1.5, [], {}, "", "../etc", "\x00", "\ud800", "😀")]
    odd += [{**BODY, "messages": messages} for messages in (None, 5, "x", {}, [None], [[[]]], [{"content": {}}])]
    odd += [{**BODY, "type": kind} for kind in (None, 5, [], {}, "switch", "\ud800")]
    yield Shape("odd JSON", tuple(record(b"key", dump(value)) for value in odd))
    raw = [
        b"\xff",
        b"\xef\xbb\xbf" + good,
        good.decode().encode("utf-16"),
        b"\x00" * 100,
        good[:-1],
        good + b"}",
        b"NaN",
    ]
    yield Shape("no JSON", tuple(record(b"key", value) for value in raw))
    yield Shape("one name twice", (record(b"key", b'{"model":"llama","model":"qwen","messages":[],"messages":[{}]}'),))


def _events(good: bytes) -> Iterator[Shape]:
    """Structured CloudEvents with attributes of odd types."""
    structured = (b"content-type", b"application/cloudevents+json")
    base = {"specversion": "1.0", "id": "x", "source": "/x", "type": "x", "data": json.loads(good)}
    odd: tuple[Any, ...] = (None, True, 5, -0.0, 1e300, [], {}, ["x"] * 1000, "", "x" * 10_000, "\ud800", "\n")
    changed = [{**base, name: value} for name in base for value in odd]
    changed += [{**base, name.replace("-", ""): value} for name in sorted(h.OURS) for value in odd]
    changed += [{"data": {"data": {"data": base}}}, {**base, "data_base64": "e30="}, {"data_base64": "e30="}]
    yield Shape("odd CloudEvents", tuple(record(b"key", dump(value), [structured]) for value in changed))
    yield Shape(
        "CloudEvents that are none", tuple(record(b"key", v, [structured]) for v in (b"[]", b"5", b"", b"{}", good))
    )
    batched = (b"content-type", b"application/cloudevents-batch+json")
    yield one("batched CloudEvents", dump([base, base]), batched)


NUMBERS = (b"1e400", b"-1e400", b"-0", b"NaN", b"nan", b"inf", b"1e308", b"-1", b"9" * 30, b"9" * 5000, b"0x10", b"1_0")


def _numbers(good: bytes) -> Iterator[Shape]:
    named = (b"ttl", b"deadline", b"priority", b"part", b"received", b"deaths", b"dl-attempts", b"dl-at")
    dates = b"0001-01-01T00:00:00+14:00", b"9999-12-31T23:59:59-14:00", b"2026-13-45", b"\xd9\xa3", b"\xc2\xb2"
    yield Shape("odd numbers", tuple(record(b"key", good, [(n, v)]) for n in named for v in (*NUMBERS, *dates)))
    numbers = (b"1e400", b"-1e400", b"-0", b"-0.0", b"NaN", b"Infinity", b"1e308", b"9" * 400, b"18446744073709551616")
    names = b"max_tokens", b"priority", b"temperature", b"offset", b"at", b"interval_s", b"hold", b"seq", b"status"
    bodies = [good[:-1] + b',"%s":%s}' % (name, number) for name in names for number in numbers]
    yield Shape("odd numbers in JSON", tuple(record(b"key", body) for body in bodies))
    for moment in (0, 1, 10**9):
        yield Shape(f"made at {moment}", (record(b"key", good, [(b"ttl", b"-1")]),), at=moment)


@cache
def _bombs() -> tuple[Shape, ...]:
    """Batches that inflate to more than anybody should hold, and one that just does not."""
    nothing, half = record(None, b""), record(b"key", bytes(INFLATED // 2 + MIB))
    bombs = [(f"bomb {codec}", INFLATED, codec) for codec in ("zstd", "gzip", "lz4", "snappy")]
    bombs += [("bomb of 1 GiB", 1024 * MIB, "zstd")]
    members = gzip.compress(b"") * 100_000
    return (
        *(Shape(name, (nothing,), packed=bomb(size, codec, key=b"key")) for name, size, codec in bombs),
        Shape("gzip in very many members", (nothing,), packed=batch(b"", 1, codec=CODECS["gzip"], compressed=members)),
        Shape("bomb of two records", (half, half), "zstd"),
        Shape("bomb of headers", (record(b"key", ASKED, [(b"x", bytes(INFLATED))]),), "zstd"),
        Shape("30 MiB that may be inflated", (record(b"key", bytes(30 * MIB)), record(b"key", ASKED)), "zstd"),
        Shape("compressed lies", (record(b"key", ASKED, [(b"\xff", None)]), record(b"key", ASKED)), "gzip"),
    )
