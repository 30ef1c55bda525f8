"""What strangers write: bytes, broken JSON, valid JSON that is no request, and headers that lie."""

import json
from typing import Any

from hypothesis import strategies as st

from schemas import headers as h
from schemas.base import Record
from schemas.requests import Endpoint
from tests.support.batches import Raw

_TEXT = st.text(max_size=12)
_NUMBERS = st.integers() | st.floats() | st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0])
_ANY = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_KEYS = st.sampled_from(
    ["model", "messages", "prompt", "input", "query", "documents", "text_1", "text_2", "max_tokens", "stream",
     "priority", "tokens", "max_completion_tokens", "data", "id", "specversion", "type", "role", "content"]
)  # fmt: skip
_MODELS = st.sampled_from(["llama", "qwen", "qwem", "", "../etc", "l" * 300, "\x00", "😀"])
_GOOD = {"model": "llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}

_near_misses = st.fixed_dictionaries(
    {},
    optional={
        "model": _MODELS | _ANY,
        "messages": st.just(_GOOD["messages"]) | st.lists(st.fixed_dictionaries({"content": _ANY}), max_size=2) | _ANY,
        "prompt": _ANY,
        "input": _ANY,
        "max_tokens": _ANY,
        "max_completion_tokens": _ANY,
        "stream": _ANY,
        "priority": _ANY,
        "data": st.just(_GOOD) | _ANY,
    },
)
_objects = _near_misses | st.dictionaries(_KEYS, _ANY, max_size=4) | _ANY


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


@st.composite
def _damaged(draw: st.DrawFn) -> bytes:
    """A good request with a few bytes of it changed, cut out or doubled."""
    raw = bytearray(_dump(_GOOD))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        match draw(st.sampled_from(["change", "cut", "double", "insert"])):
            case "change":
                raw[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del raw[at:]
            case "double":
                raw[at:at] = raw[at : at + 8]
            case _:
                raw[at:at] = draw(st.binary(max_size=4))
    return bytes(raw)


_deep = st.sampled_from([1, 2, 100, 199, 200, 201, 400, 5000, 50_000]).map(
    lambda depth: b'{"model":"llama","messages":' + b"[" * depth + b"]" * depth + b"}"
)
_wrapped = _objects.map(lambda data: _dump({"specversion": "1.0", "id": "x", "data": data}))
values = st.one_of(
    st.none(),
    st.binary(max_size=40),
    _objects.map(_dump),
    _objects.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    _damaged(),
    _deep,
    _wrapped,
    st.just(b"\xef\xbb\xbf" + _dump(_GOOD)),
    st.just(b'{"model":"llama","model":"qwen","messages":[]}'),
)

_LETTER = [h.DEAD_LETTER + name for name in ("id", "class", "at", "attempts", "error", "origin")]
_names = st.sampled_from(
    [*sorted(h.OURS), *(f"ce_{name.replace('-', '')}" for name in sorted(h.OURS)), "ce_id", "ce_type", h.CONTENT_TYPE,
     h.TRACEPARENT, h.TRACESTATE, h.SIGNATURE, h.POOL_SIGNATURE, *_LETTER, "redrive-history", "", "x", "X" * 5000,
     "dl-", "dl-redriven-as", "\\xff", "é"]
)  # fmt: skip
_lies = st.one_of(
    st.none(),
    st.sampled_from([256, 257, 512, 513, 9000]).flatmap(lambda size: st.sampled_from([b"x", b"1", b"\xff", b"["]).map(
        lambda byte: byte * size
    )),
    st.binary(max_size=12),
    _TEXT.map(lambda text: text.encode("utf-8", "surrogatepass")),
    _NUMBERS.map(lambda number: str(number)[:60].encode()),
    st.sampled_from([*Endpoint]).map(lambda endpoint: endpoint.value.encode()),
    st.sampled_from(
        [b"nan", b"inf", b"-inf", b"1e999", "²".encode(), "٣".encode(), b"9" * 5000, b"0001-01-01T00:00:00+14:00",
         b"9999-12-31T23:59:59-14:00", b"2026-01-01", b"application/cloudevents+json", b"requests/0/1", b"a/\xc2\xb2/1",
         b"results", b"control", b"false", b"x" * 300, b"\x00", b"chat/completions", b"/v1/v1/score", b"[" * 3000,
         b"[1, {}]", b"{}", b"\"x\"", b"/", b"a/b"]
    ),
)  # fmt: skip
headers = st.lists(st.tuples(_names, _lies), max_size=4)


_keys = st.none() | st.binary(max_size=6) | st.sampled_from([b"llama", b"w1", b"*/active", b"k" * 5000])
_timestamps = st.just(1_790_000_000.0) | st.sampled_from([0.0, -0.001, 1e15, 9.2e15, -9.2e15])


@st.composite
def records(draw: st.DrawFn, topics: tuple[str, ...] = ("requests", "requests.qwen")) -> Record:
    """A record as a stranger may have written it, whole or damaged."""
    return Record(
        draw(st.sampled_from(topics)),
        0,
        draw(st.integers(0, 2**40)),
        draw(_timestamps),
        draw(_keys),
        draw(values),
        draw(headers),
        draw(st.none() | st.none() | st.none() | st.just("the name of a header is not UTF-8")),
    )


_raw_names = (
    _names.map(str.encode) | st.binary(max_size=4) | st.sampled_from([b"\xff", b"ce_\xc3\x28", b"\xed\xa0\x80"])
)


@st.composite
def raw_records(draw: st.DrawFn, keys: st.SearchStrategy[bytes | None] = _keys) -> Raw:
    """The same as a hostile producer can bring it to a broker: the names of its headers are any bytes."""
    return Raw(draw(values), draw(keys), draw(st.lists(st.tuples(_raw_names, _lies), max_size=4)))
