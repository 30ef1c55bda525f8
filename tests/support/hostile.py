"""What a hostile producer writes to any topic, as batches of bytes; and an ordinary record among it."""

import json

from tests.support.batches import CODECS, Raw, batch, body_of, bomb, content_of, of, varint

OTHER_TOPICS = (
    "control",
    "commands",
    "workers",
    "ledgers",
    "progress",
    "results",
    "chunks",
    "dead_letters",
    "status",
    "calls",
    "answers",
    "usage",
    "files",
    "batches",
    "throttled",
)
"""Those beside the topics of requests that a worker, a client or a door reads, by their settings."""
CHAT = json.dumps({"model": "llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}).encode()
LONG = 9 << 20
DEEP = b"[" * 50_000 + b"]" * 50_000


def _far_offsets() -> bytes:
    bodies = [body_of(Raw(CHAT, b"k"), delta) for delta in (0, 5000, 2)]
    return batch(b"".join(varint(len(body)) + body for body in bodies), 3)


def batches(*, inflated: int, key: bytes | None = b"k") -> dict[str, bytes]:
    """By name, each as it is to be written; a bomb has ``inflated`` bytes. ``key``: compacted topics want one."""
    plain = {
        "null value": Raw(None, key),
        "null header": Raw(CHAT, key, [(b"x", None)]),
        "null attributes": Raw(CHAT, key, [(name, None) for name in (b"ce_id", b"signature", b"ttl", b"content-type")]),
        "header name that is not UTF-8": Raw(CHAT, key, [(b"\xff\xfe", b"x")]),
        "empty header name": Raw(CHAT, key, [(b"", b"x")]),
        "long header name": Raw(CHAT, key, [(b"n" * (1 << 20), b"x")]),
        "long correlation id": Raw(CHAT, key, [(b"correlation-id", b"c" * LONG)]),
        "long id": Raw(CHAT, key, [(b"ce_id", b"i" * 1000)]),
        "long model": Raw(b'{"messages": [], "model": "' + b"llama" * 200_000 + b'"}', key),
        "forged marks": Raw(CHAT, key, [(b"deaths", b"9"), (b"moved-from", b"requests/0/0"), (b"received", b"1.0")]),
        "forged signature": Raw(CHAT, key, [(b"pool-signature", b"\xff" * 200), (b"signature", b"\xff")]),
        "values that are not UTF-8": Raw(CHAT, key, [(b"ce_id", b"\xff\xfe"), (b"tenant", b"\xed\xa0\x80")]),
        "many headers": Raw(CHAT, key, [(b"h%d" % n, b"") for n in range(50_000)]),
        "deep nesting": Raw(DEEP, key),
        "deep nesting within": Raw(b'{"model": "llama", "messages": ' + DEEP + b"}", key),
        "no JSON": Raw(b"\xff\x00\xfe", key),
        "a long number": Raw(b'{"model": "llama", "id": ' + b"9" * 5000 + b', "messages": []}', key),
        "numbers that are none": Raw(b'{"model": "llama", "issued": NaN, "at": -Infinity, "offset": 1e999}', key),
        "a key that is not UTF-8": Raw(CHAT, b"\xff\xfe\x00"),
        "an empty event": Raw(b"{}", key, [(b"content-type", b"application/cloudevents+json")]),
        "a lone surrogate": Raw(b'{"model": "\\ud800", "type": "\\udfff", "worker": "\\ud800"}', key),
    }
    raw = {name: of(record) for name, record in plain.items()}
    raw |= {f"{codec} bomb": bomb(inflated, codec) for codec in sorted(CODECS.keys() - {"none"})}
    raw["bad one of three"] = of(Raw(CHAT, b"a"), Raw(CHAT, b"b", [(b"\xff", b"")]), Raw(CHAT, b"c"))
    raw["offsets beyond the batch"] = _far_offsets()
    raw["bad one of three, compressed"] = batch(
        content_of([Raw(CHAT, b"a"), Raw(CHAT, b"b", [(b"\xff", b"")]), Raw(CHAT, b"c")]), 3, codec=CODECS["zstd"]
    )
    return raw
