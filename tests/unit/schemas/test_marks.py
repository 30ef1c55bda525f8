"""What a worker writes beside a request that it moves is believed where the pool's key signs it, and nowhere else."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import headers as h
from schemas.base import Outgoing, Record
from schemas.codec import decode_request, encode_moved
from schemas.marks import Keys
from schemas.requests import Request

KEYS = (b"the pool's",)
BODY = json.dumps({"model": "llama", "messages": []}).encode()
ORIGINAL = Record(
    "requests", 2, 7, 1000.0, None, BODY, [("ce_id", b"r1"), ("ttl", b"60"), ("tenant", b"blue"), ("x", None)]
)


def accepted(record: Record, keys: Keys = KEYS) -> Request:
    request = decode_request(record, max_bytes=10_000, alias="llama", keys=keys)
    assert isinstance(request, Request), request
    return request


def moved(*, deaths: int = 2, topic: str = "requests.llama", keys: Keys = KEYS) -> Outgoing:
    return encode_moved(ORIGINAL, accepted(ORIGINAL), topic, deaths=deaths, keys=keys)


def read(record: Outgoing, topic: str | None = None) -> Record:
    return Record(topic or record.topic, 0, 1, 9999.0, record.key, record.value, record.headers)


def test_a_moved_request_keeps_what_its_new_record_would_not_tell():
    request = accepted(read(moved()))
    assert (request.id, request.deadline, request.received, request.tenant) == ("r1", 1060.0, 1000.0, "blue")
    assert (request.source, request.deaths) == (ORIGINAL.origin, 2)


def test_it_keeps_it_over_several_moves():
    first = read(moved(deaths=1))
    again = encode_moved(first, accepted(first), "requests.llama", deaths=3, keys=KEYS)
    request = accepted(read(again))
    assert (request.source, request.deaths, request.received) == (ORIGINAL.origin, 3, 1000.0)


@pytest.mark.parametrize("key", [None, b"blue"])
def test_it_keeps_its_key_and_gets_none_where_it_has_none(key: bytes | None):
    """Its id, if a client made it, leads to the partition that all of that client's ids lead to."""
    record = replace(ORIGINAL, key=key)
    assert encode_moved(record, accepted(record), "requests.llama", deaths=0).key == key


@pytest.mark.parametrize(("written", "key"), [((), KEYS), ((), ()), (KEYS, ()), ((b"another",), KEYS)])
def test_without_the_pools_key_it_is_a_record_of_its_own_under_the_same_id_and_deadline(written, key):
    record = read(moved(keys=written))
    request = accepted(record, key)
    assert (request.id, request.deadline, request.tenant) == ("r1", 1060.0, "blue")
    assert (request.source, request.deaths, request.received) == (record.origin, 0, 9999.0)


def test_without_a_key_a_record_claims_its_first_place_over_several_moves_and_with_one_it_claims_nothing():
    first = read(moved(keys=()))
    assert accepted(first, ()).says_moved_from == ORIGINAL.origin
    again = encode_moved(first, accepted(first, ()), "throttled", deaths=0, key=b"blue")
    back = encode_moved(read(again), accepted(read(again), ()), "requests.llama", deaths=0)
    request = accepted(read(back), ())
    assert (request.source, request.says_moved_from) == (read(back).origin, ORIGINAL.origin)
    signed = encode_moved(read(back), request, "requests.llama", deaths=0, keys=KEYS)
    assert accepted(read(signed)).source == read(back).origin, "a claim is never signed"
    assert accepted(read(back)).says_moved_from is None
    refused = decode_request(replace(read(back), value=b"{"), max_bytes=10_000)
    assert refused.says_moved_from == ORIGINAL.origin


NO_PLACES = ["", "//", "requests/2", "/2/7", "requests/-2/7", "requests/2/x", "requests/²/1", f"r/1/{'9' * 20}"]


@pytest.mark.parametrize("written", NO_PLACES)
def test_a_claim_that_names_no_place_is_none(written):
    record = replace(ORIGINAL, headers=[(h.MOVED_FROM, written.encode())])
    assert accepted(record, ()).says_moved_from is None


FORGED = {h.MOVED_FROM: b"requests/3/9", h.RECEIVED: b"5.5", h.DEATHS: b"7", "ce_id": b"another"}


@pytest.mark.parametrize("name", FORGED)
def test_a_mark_that_was_changed_ends_the_belief_in_all_of_them(name):
    true = moved()
    headers = [(each, FORGED[name] if each == name else value) for each, value in true.headers]
    request = accepted(read(replace(true, headers=headers)))
    assert (request.moved_from, request.deaths, request.received) == (None, 0, 9999.0)


@pytest.mark.parametrize("name", sorted({"id", "type", h.CONTENT_TYPE, *h.OURS}))
@pytest.mark.parametrize("value", [b"1", b"x" * 10_000])
def test_nothing_that_decides_can_be_added_to_a_signed_record(name, value):
    """Written once more with a deadline that is over, it would be answered in the place of the first one."""
    again = decode_request(
        read(replace(moved(), headers=[*moved().headers, (name, value)])), max_bytes=10_000, alias="llama", keys=KEYS
    )
    assert again.source.topic == "requests.llama"


def test_a_trace_context_may_be_added_to_a_signed_record():
    headers = [*moved().headers, (h.TRACEPARENT, b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
    assert accepted(read(replace(moved(), headers=headers))).moved_from == ORIGINAL.origin


@pytest.mark.parametrize("name", [h.MOVED_FROM, h.RECEIVED, h.DEATHS, h.POOL_SIGNATURE])
@pytest.mark.parametrize("spelt", [str, str.upper, lambda name: "ce_" + name.replace("-", "")])
@pytest.mark.parametrize("value", [b"requests/3/9", b"1", b"", b"\xff", None, b"x" * 10_000])
def test_a_producers_own_marks_are_never_believed(name, spelt, value):
    record = replace(ORIGINAL, topic="requests.llama", headers=[(spelt(name), value)])
    decoded = decode_request(record, max_bytes=10_000, alias="llama", keys=KEYS)
    assert not isinstance(decoded, Request) or (decoded.moved_from, decoded.deaths) == (None, 0)


def test_marks_hold_for_the_topic_the_key_and_the_value_that_they_were_written_for():
    true = moved()
    assert accepted(read(true)).moved_from == ORIGINAL.origin
    assert accepted(read(true, "requests.qwen")).moved_from is None
    assert accepted(read(replace(true, key=b"other"))).moved_from is None
    assert accepted(read(replace(true, value=BODY + b" "))).moved_from is None


def test_marks_inside_a_structured_event_are_a_producers():
    event = {"specversion": "1.0", "data": {"model": "llama", "messages": []}, "deaths": "9", "movedfrom": "a/1/2"}
    headers = [("content-type", b"application/cloudevents+json")]
    request = accepted(Record("requests.llama", 0, 0, 1.0, None, json.dumps(event).encode(), headers))
    assert (request.moved_from, request.deaths) == (None, 0)


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_bit_of_a_signature_may_change(at, bit):
    headers = []
    for name, value in moved().headers:
        if name == h.POOL_SIGNATURE:
            changed = bytearray(value)
            changed[at % len(changed)] ^= 1 << bit
            headers.append((name, bytes(changed)))
        else:
            headers.append((name, value))
    assert accepted(read(replace(moved(), headers=headers))).moved_from is None
