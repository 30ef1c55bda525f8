"""What a stranger forges: what only workers, or only who has the key, may say."""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from tests.chaos.shape import ASKED, LLAMA, MIB, QWEN, Role, Seen, Shape, dump, one, record

_PROGRESS = {
    "call": "0" * 32,
    "engine": "words",
    "requests": [{"id": "0" * 32, "prompt": "hello", "sequences": [{"tokens": [1, 2, 3]}]}],
}


def plausible(role: Role, seen: Seen) -> bytes:
    """What a reader of the topic expects there, in good order."""
    now, of = time.time(), seen.requests[0]
    origin = {"topic": f"{seen.prefix}requests", "partition": 0, "offset": 1}
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "forged"}}]}
    result = {"id": of, "origin": origin, "outcome": "completed", "status": 200, "model": LLAMA, "body": answer}
    presence = {"worker": "stranger", "pool": seen.pool, "at": now, "interval_s": 1.0, "state": "serving"}
    status = {"worker": "stranger", "state": "completed", "kind": "switch", "at": now, "model": QWEN}
    chunk = {"id": of, "seq": 0, "data": {"choices": [{"index": 0, "delta": {"content": "forged"}}]}}
    return {
        Role.CONTROL: dump({"type": "switch", "model": QWEN, "hold": "forever"}),
        Role.COMMANDS: dump({"type": "query"}),
        Role.WORKERS: dump(presence),
        Role.LEDGERS: dump({"offset": 10**12, "metadata": "", "at": now}),
        Role.PROGRESS: dump(_PROGRESS),
        Role.RESULTS: dump({**result, "timing": {"received": now, "finished": now}}),
        Role.ANSWERS: dump({**result, "timing": {"received": now, "finished": now}}),
        Role.USAGE: dump({"id": of, "origin": origin, "at": now, "outcome": "completed", "prompt_tokens": 1}),
        Role.BATCHES: dump({"type": "batch.ended", "id": "batch_1", "at": now, "end": "completed", "output": "x"}),
        Role.CHUNKS: dump(chunk),
        Role.STATUS: dump(status),
    }.get(role, ASKED)


def forged(role: Role, seen: Seen) -> Iterable[Shape]:
    good = plausible(role, seen)
    make = {
        Role.REQUESTS: _forged_requests,
        Role.REQUESTS_OF_ONE: _forged_requests,
        Role.THROTTLED: _forged_requests,
        Role.CONTROL: _forged_control,
        Role.COMMANDS: _forged_control,
        Role.WORKERS: _forged_presences,
        Role.LEDGERS: _forged_ledgers,
        Role.PROGRESS: _forged_progress,
        Role.RESULTS: _forged_results,
        Role.ANSWERS: _forged_results,
        Role.BATCHES: _forged_batches,
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
        [(b"moved-from", b"//"), (b"received", b"-1e11"), (b"ttl", b"600")],
    ]
    yield Shape("forged marks", tuple(record(b"key", good, headers) for headers in marks), answered=True)
    told = (
        "control",
        "control.commands",
        "requests",
        "requests.llama",
        "workers",
        "ledgers",
        "progress",
        "none",
        "__consumer_offsets",
    )
    replies = [seen.prefix + name for name in told] + ["", "*", "/", "a" * 10_000, "\x00"]
    yield Shape("reply to anywhere", tuple(record(b"key", good, [(b"reply-to", name.encode())]) for name in replies))
    parts = ((b"-1",), (b"0.5",), (b"1e400",), (b"7",), (None,))
    sessions = [[(b"session", b"s"), (b"part", part), (b"final", b"true")] for (part,) in parts]
    yield Shape("odd sessions", tuple(record(b"key", good, headers) for headers in sessions))


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
        yield Shape("orders without the key", tuple(record(b"stranger/x", dump(o), headers) for o in orders))
    keys = b"*/active", b"*/paused/*", f"{seen.pool}/active".encode(), *(f"{w}/active".encode() for w in seen.workers)
    yield Shape("what was ordered, taken back", tuple(record(key, None) for key in keys))
    yield one("a result as an order", plausible(Role.RESULTS, seen))


def _forged_presences(good: bytes, seen: Seen) -> Iterator[Shape]:
    presence = json.loads(good)
    costs: tuple[Any, ...] = ({"x": 1e308}, {"pairs": [["llama", "qwen", "resident", "x"]]}, {"a": {"b": {"c": []}}})
    odd = [{**presence, "worker": worker, "state": "left", "costs": cost} for worker in seen.workers for cost in costs]
    slow = {"pace": [[1e9, 0, 9], [1e9, 0, 9], [1e-9, 0, 9]], "resident": [1e9, 0, 9]}
    learnt = {"models": {LLAMA: slow, QWEN: slow}}
    odd += [{**presence, "worker": worker, "costs": learnt} for worker in seen.workers]
    odd += [{**presence, "queues": {QWEN: {"waiting": 1 << 62, "oldest_s": 1e300}}}, {**presence, "pid": 1 << 70}]
    odd += [{**presence, "interval_s": value} for value in (0, -1, 1e308)]
    odd += [{**presence, "worker": "w" * 10_000}, {**presence, "partitions": {"x": [1 << 62] * 1000}}]
    yield Shape("forged presences", tuple(record(one["worker"].encode(), dump(one)) for one in odd))
    yield Shape("many workers", tuple(record(b"ghost-%d" % n, good) for n in range(1000)))
    yield Shape("workers taken back", tuple(record(worker.encode(), None) for worker in seen.workers))


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
    yield Shape("forged ledgers", tuple(record(key, value) for key in keys for value in values))


def _forged_progress(good: bytes, seen: Seen) -> Iterator[Shape]:
    """Words put into the mouth of whoever has a partition next."""
    said = [{"tokens": tokens} for tokens in ([-1], [1 << 62], [0] * 10_000, [])]
    begun = [{**_PROGRESS, "requests": [{"id": "0" * 32, "prompt": "hello", "sequences": [one] * 3}]} for one in said]
    session = {**_PROGRESS, "parts": [{"prompt": [1 << 62], "said": [-1], "text": "hello"}] * 3}
    values = (good, None, b'{"call":"x","engine":"words","events":-1}', *map(dump, begun), dump(session))
    topics = "requests", "requests.llama", "requests.qwen"
    named = [f"{seen.prefix}{topic}" for topic in topics]
    named += [f"{name}@{seen.topic_ids[name]}" for name in named if name in seen.topic_ids]
    places = [f"{seen.pool}/{name}/{n}/" for name in named for n in range(6)]
    names = "0", "-1", "9" * 19, "9" * 10_000, "x", f"session/{'0' * 64}", "session/0"
    keys = [f"{place}{name}".encode() for place in places for name in names]
    yield Shape("forged progress", tuple(record(key, value) for key in keys for value in values))


def _forged_results(good: bytes, seen: Seen) -> Iterator[Shape]:
    """Answers that nobody gave, to requests that somebody waits for."""
    told = json.loads(good)
    values = [dump({**told, "id": of}) for of in seen.requests]
    values += [dump({**told, "id": of, "outcome": "failed", "seq": 1 << 62, "final": True}) for of in seen.requests]
    yield Shape(
        "forged answers", tuple(record(of.encode(), v) for of, v in zip(seen.requests * 2, values, strict=True))
    )


def _forged_batches(_good: bytes, _seen: Seen) -> Iterator[Shape]:
    """Batches of files that are nowhere, and files whose content is nowhere, or somebody else's."""
    now = time.time()
    file = {"type": "file", "filename": "x", "purpose": "batch", "at": now, "size": 1, "lines": 1, "blocks": 1}
    asked = {"type": "batch", "endpoint": "/v1/completions", "lines": 1, "at": now, "window_s": 5.0}
    odd = [
        {**file, "id": "file-far", "partition": 9, "first": 10**12, "last": 10**12},
        {**file, "id": "file-wide", "first": 0, "last": 2**52, "blocks": 2**52},
        {**asked, "id": "batch_far", "file": "file-far"},
        {**asked, "id": "batch_wide", "file": "file-wide"},
        {**asked, "id": "batch_none", "file": "file-none"},
        {**asked, "id": "batch_big", "file": "file-none", "lines": 2**52, "headers": [["deadline", "x"], ["", "\n"]]},
    ]
    yield Shape("forged files and batches", tuple(record(str(one["id"]).encode(), dump(one)) for one in odd))
