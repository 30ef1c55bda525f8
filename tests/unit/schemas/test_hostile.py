"""What a hostile producer may write: attributes are bounded, nulls tolerated, and a refusal repeats nothing long."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import to_json

from schemas import headers as h
from schemas.base import MAX_ATTRIBUTE, Record
from schemas.codec import decode_control, decode_request, encode_moved, explain
from schemas.control import MAX_CONTROL_BYTES
from schemas.errors import FailureClass, nearest
from schemas.requests import Refusal, Request

BODY = json.dumps({"model": "llama", "messages": []}).encode()
TEXTS = [h.REPLY_TO, h.CORRELATION_ID, h.TENANT, h.SESSION]
NUMBERS = [h.TTL, h.PRIORITY, h.PART, h.DEADLINE]
OTHERS = [h.ENDPOINT, h.FINAL, h.REDRIVE_OF, h.CONTENT_TYPE, h.DEATHS, h.MOVED_FROM, h.RECEIVED]


def record(headers=(), value: bytes | None = BODY, key: bytes | None = None) -> Record:
    return Record("requests", 2, 7, 1000.0, key, value, list(headers))


def decode(given: Record, *, max_bytes: int = 1 << 24, **more: object) -> Request | Refusal:
    return decode_request(given, max_bytes=max_bytes, **more)


def test_a_header_without_a_value_is_as_if_absent():
    request = decode(record([("x", None), ("ce_id", None), (h.TTL, None), (h.CONTENT_TYPE, None), (h.SIGNATURE, None)]))
    assert isinstance(request, Request)
    assert (request.id, request.deadline) == ("requests/2/7", None)
    assert request.size == len(BODY) + len("xce_id") + len(h.TTL + h.CONTENT_TYPE + h.SIGNATURE)


@pytest.mark.parametrize("name", ["ce_id", *TEXTS, *NUMBERS, *OTHERS])
@pytest.mark.parametrize("long", [b"x" * (MAX_ATTRIBUTE + 1), b"1" * (9 << 20), "é".encode() * 129, b"\xff" * 200])
def test_an_attribute_out_of_bounds_is_refused_and_not_repeated(name, long):
    refusal = decode(record([(name, long), ("correlation-id", b"c1")] if name != h.CORRELATION_ID else [(name, long)]))
    assert isinstance(refusal, Refusal)
    assert (refusal.failure, refusal.error.param) == (FailureClass.INVALID, name)
    assert "at most 256 bytes" in refusal.error.message
    assert refusal.id == "requests/2/7"
    assert refusal.correlation_id == ("c1" if name != h.CORRELATION_ID else None)
    assert len(to_json(refusal)) < 1000


SHOWN = (h.TENANT, h.CORRELATION_ID, h.REQUEST_CLASS, h.REPLY_TO)


@pytest.mark.parametrize("word", ["a\nb", "\x1b[2J", "\x9b", "a\u202eb", "\u2028"])
@pytest.mark.parametrize("name", ["model", "ce_id", *SHOWN])
def test_what_people_are_shown_must_be_printable_and_is_not_repeated(name, word):
    body = json.dumps({"model": word, "messages": []}).encode() if name == "model" else BODY
    refusal = decode(record([] if name == "model" else [(name, word.encode())], body))
    assert isinstance(refusal, Refusal)
    assert (refusal.failure, refusal.error.param) == (FailureClass.INVALID, name)
    assert "must be printable" in refusal.error.message
    assert word not in {refusal.id, refusal.reply_to, refusal.correlation_id}
    assert word not in refusal.error.message


@pytest.mark.parametrize("given", ["Größe", "東京\u3000👩\u200d🚀", "\u0645\u06cc\u200c\u062e\u0648", "a\u00a0b"])
def test_names_of_all_languages_are_taken(given):
    request = decode(record([(name, given.encode()) for name in SHOWN]))
    assert isinstance(request, Request)
    assert {request.tenant, request.correlation_id, request.request_class, request.reply_to} == {given}


@pytest.mark.parametrize("given", [b".", b".."])
def test_an_id_is_no_step_in_a_path(given):
    refusal = decode(record([("ce_id", given)]))
    assert isinstance(refusal, Refusal)
    assert refusal.id == "requests/2/7"


@pytest.mark.parametrize("name", ["id", *TEXTS, "deadline"])
def test_the_same_holds_inside_a_structured_event(name):
    event = {"specversion": "1.0", "data": json.loads(BODY), name: "1" * 300}
    refusal = decode(record([(h.CONTENT_TYPE, b"application/cloudevents+json")], json.dumps(event).encode()))
    assert isinstance(refusal, Refusal)
    assert refusal.id == "requests/2/7"
    assert len(to_json(refusal)) < 1000


def test_what_is_just_within_bounds_is_taken():
    headers = [("ce_id", b"i" * 256), *((name, b"t" * 256) for name in (h.TENANT, h.CORRELATION_ID, h.REPLY_TO))]
    body = {"model": "m" * 256, "messages": []}
    request = decode(record([*headers, (h.TRACESTATE, b"s" * 512)], json.dumps(body).encode()))
    assert isinstance(request, Request)
    assert (len(request.id), len(request.tenant), len(request.model)) == (256, 256, 256)
    assert len(request.tracestate or "") == 512


@pytest.mark.parametrize(("timestamp", "ttl"), [(1e15, b"0"), (-1e15, b"0"), (999e9, b"99e9"), (-999e9, b"-99e9")])
def test_a_clock_out_of_bounds_makes_a_deadline_that_is_taken_again_when_the_request_has_waited(timestamp, ttl):
    written = Record("requests", 2, 7, timestamp, None, BODY, [(h.TTL, ttl)])
    request = decode(written)
    assert isinstance(request, Request)
    moved = encode_moved(written, request, "requests.llama", deaths=0, keys=[b"k"])
    again = Record(moved.topic, 0, 0, 0.0, moved.key, moved.value, list(moved.headers))
    assert decode(again, alias="llama", keys=[b"k"]).deadline == request.deadline


def test_a_trace_context_out_of_bounds_is_left_out():
    request = decode(record([(h.TRACEPARENT, b"x" * 257), (h.TRACESTATE, b"x" * 513)]))
    assert isinstance(request, Request)
    assert (request.traceparent, request.tracestate) == (None, None)


@pytest.mark.parametrize("model", ["m" * 257, "é" * 200, "llama" * (1 << 20)])
def test_a_models_name_out_of_bounds_is_refused_and_not_repeated(model):
    refusal = decode(record(value=json.dumps({"model": model, "messages": []}, ensure_ascii=False).encode()))
    assert isinstance(refusal, Refusal)
    assert refusal.error.param == "model"
    assert len(to_json(refusal)) < 1000


def test_of_a_header_that_comes_twice_the_last_counts_also_where_one_is_out_of_bounds():
    good, bad = (h.CORRELATION_ID, b"c1"), (h.CORRELATION_ID, b"x" * 300)
    request = decode(record([bad, good]))
    assert isinstance(request, Request)
    assert request.correlation_id == "c1"
    assert isinstance(decode(record([good, bad])), Refusal)


def test_a_large_value_is_refused_before_it_is_parsed():
    refusal = decode(record(value=b"[" * 5000), max_bytes=4999)
    assert isinstance(refusal, Refusal)
    assert refusal.failure is FailureClass.TOO_LARGE


@pytest.mark.delicate
@pytest.mark.parametrize("count", [100_000])
def test_unknown_headers_cost_little_and_are_not_kept_in_memory(count):
    names = [("x" * 1000 + str(number), b"y" * 10) for number in range(count)]
    began = time.process_time()
    assert isinstance(decode(record(names)), Request)
    assert time.process_time() - began < 5
    assert h._plain.cache_info().currsize <= 1024


def test_a_damaged_record_is_malformed_and_answered_under_its_own_id():
    given = Record("requests", 2, 7, 1000.0, None, BODY, [("ce_id", b"r1")], damage="a header's name is not UTF-8")
    refusal = decode(given)
    assert isinstance(refusal, Refusal)
    assert (refusal.id, refusal.failure) == ("r1", FailureClass.MALFORMED)
    assert "not UTF-8" in refusal.error.message


@pytest.mark.delicate
@pytest.mark.parametrize("word", ["l" * (8 << 20), "lama" * 100, "\x00" * 65])
def test_long_words_are_not_compared(word):
    began = time.process_time()
    assert nearest(word, ["llama", "qwen", "x" * (1 << 20)]) == ""
    assert time.process_time() - began < 0.5
    assert nearest("lama", ["llama", "x" * (1 << 20)]) == " (did you mean 'llama'?)"


# --- control ---


def control(value: object, headers=()) -> Record:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Record("control", 0, 9, 100.0, b"k", raw, list(headers))


@pytest.mark.parametrize(
    "value",
    [
        {"model": "m" * 257},
        {"model": "qwen", "target": "é" * 200},
        {"type": "cancel", "request": "r" * 300},
        {"type": "cancel", "correlation_id": "r" * 300},
        {"type": "lora.add", "model": "a", "name": "b", "path": "p" * 5000},
        {"model": "qwen", "id": "i" * 300},
        {"type": "x" * 60_000},
        {"model": "qwen", "issued": 10**400},
        b'{"model": "qwen", "issued": NaN}',
        b'{"model": "qwen", "issued": Infinity}',
        b"[" * 60_000,
        {"model": "qwen", "note": "n" * MAX_CONTROL_BYTES},
    ],
)
def test_a_control_event_out_of_bounds_is_told_in_few_words(value):
    with pytest.raises(ValueError) as told:  # noqa: PT011 - what it says is below
        decode_control(control(value))
    assert 0 < len(explain(told.value)) <= 500


def test_a_control_events_id_in_a_long_header_is_its_origin():
    assert decode_control(control({"model": "qwen"}, [("ce_id", b"i" * 300), ("x", None)])).id == "control/0/9"


VALUES = st.none() | st.binary(max_size=700) | st.integers(250, 5000).map(lambda size: b"\xc3\xa9" * size)
NAMES = st.sampled_from(["ce_id", "id", "Ce_Id", *sorted(h.OURS), h.POOL_SIGNATURE]) | st.text(max_size=80)


@given(st.lists(st.tuples(st.sampled_from(["type", "ce_type", "CE-Type", "endpoint"]) | NAMES, VALUES), max_size=5))
@settings(max_examples=500)
def test_one_attribute_is_found_as_all_of_them_are(headers):
    found = h.attributes(headers)
    for name in ("type", h.ENDPOINT, h.TENANT):
        assert h.attribute(headers, h.canonical(name)) == found.get(name)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=8))
@settings(max_examples=500)
def test_whatever_the_headers_nothing_long_comes_out(headers):
    decoded = decode(record(headers), keys=[b"key"])
    told = {name: value for name, value in json.loads(to_json(decoded)).items() if name not in {"body", "size"}}
    assert all(len(text.encode()) <= 512 for text in told.values() if isinstance(text, str))
    assert len(json.dumps(told)) < 16_000
