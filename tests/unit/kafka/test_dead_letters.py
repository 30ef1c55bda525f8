"""Dead letters keep what a producer wrote, and come back as new requests with their history."""

import json

import pytest

from schemas.base import Record
from schemas.codec import decode_request, encode_dead_letter
from schemas.errors import ErrorObject, FailureClass
from schemas.requests import Request
from service.kafka.dead_letters import collect, read_dead_letter, redriven, where_asked
from service.settings import TopicSettings

BODY = b'{"model": "qwen", "messages": []}'


def request(value=BODY, headers=()):
    return Record("requests", 3, 7, 1000.0, b"k", value, headers)


def dead(record=None, *, id_="r1", attempts=2, offset=0):
    out = encode_dead_letter(
        "dead-letters",
        record or request(headers=[("ce_id", b"r1"), ("tenant", b"t"), ("deadline", b"1001")]),
        id_=id_,
        failure=FailureClass.POISON,
        error=ErrorObject(message="it kills", code=500),
        attempts=attempts,
    )
    return Record(out.topic, 0, offset, 2000.0, out.key, out.value, out.headers)


def again(letter, new_id, offset=9):
    """The redriven request as it is read from the topic."""
    out = redriven(letter, new_id)
    return Record(out.topic, 0, offset, 3000.0, out.key, out.value, out.headers)


def test_a_dead_letter_has_the_original_bytes_and_headers_and_says_why():
    letter = read_dead_letter(dead())
    assert (letter.id, letter.failure, letter.attempts, letter.origin) == ("r1", FailureClass.POISON, 2, "requests/3/7")
    assert letter.error.message == "it kills"
    assert letter.value == BODY
    assert list(letter.headers) == [("ce_id", b"r1"), ("tenant", b"t"), ("deadline", b"1001")]


def test_a_redriven_request_is_a_new_one_that_names_the_old_one_and_has_no_deadline_from_then():
    record = again(read_dead_letter(dead()), "r2")
    found = decode_request(record, max_bytes=10**6)
    assert isinstance(found, Request)
    assert (found.id, found.tenant, found.deadline) == ("r2", "t", None)
    assert dict(record.headers)["redrive-of"] == b"r1"
    assert (record.topic, record.value) == ("requests", BODY)


def test_the_history_of_attempts_grows_with_every_redrive():
    first = read_dead_letter(dead())
    second = read_dead_letter(dead(again(first, "r2"), id_="r2", attempts=1))
    third = redriven(second, "r3")
    history = json.loads(dict(third.headers)["redrive-history"])
    assert [(tried["id"], tried["class"], tried["attempts"]) for tried in history] == [
        ("r1", "poison", 2),
        ("r2", "poison", 1),
    ]


def test_a_request_for_a_models_own_topic_goes_back_there():
    record = Record("requests.qwen", 0, 1, 0.0, None, b'{"messages": []}', ())
    assert redriven(read_dead_letter(dead(record)), "n").topic == "requests.qwen"


def test_a_structured_event_gets_its_new_id_inside():
    event = {"specversion": "1.0", "id": "r1", "data": {"model": "qwen", "messages": []}}
    record = request(json.dumps(event).encode(), [("content-type", b"application/cloudevents+json")])
    found = decode_request(again(read_dead_letter(dead(record)), "r2"), max_bytes=10**6)
    assert found.id == "r2"


@pytest.mark.parametrize("name", ["deadline", "Deadline", "ce_deadline"])
def test_a_structured_event_has_no_deadline_from_then_and_keeps_the_rest(name):
    event = {"specversion": "1.0", "id": "r1", name: "1001", "tenant": "t", "data": {"model": "qwen", "messages": []}}
    record = request(json.dumps(event).encode(), [("content-type", b"application/cloudevents+json")])
    found = decode_request(again(read_dead_letter(dead(record)), "r2"), max_bytes=10**6)
    assert isinstance(found, Request)
    assert (found.id, found.tenant, found.deadline, found.body) == ("r2", "t", None, event["data"])


def test_bytes_that_are_no_json_come_back_as_they_were():
    assert redriven(read_dead_letter(dead(request(b"\xff{"))), "n").value == b"\xff{"


def test_a_note_beside_a_letter_says_what_it_was_redriven_as():
    note = [("dl-id", b"r1"), ("dl-origin", b"requests/3/7"), ("dl-redriven-as", b"r2")]
    (letter,) = collect([dead(), Record("dead-letters", 0, 5, 0.0, b"r1", None, note)])
    assert letter.redriven_as == "r2"


def test_what_a_stranger_wrote_there_is_shown_as_well_as_can_be():
    letter = read_dead_letter(Record("dead-letters", 0, 4, 5.0, None, b"?", [("dl-error", b"{"), ("dl-at", b"x")]))
    assert (letter.failure, letter.attempts, letter.origin) == ("unknown", 0, "dead-letters/0/4")


@pytest.mark.parametrize(
    ("moved_from", "asked"),
    [
        (b"requests.qwen/3/7", "requests.qwen"),
        (b"requests/0/1", "requests"),
        (b"control/0/1", "requests"),
        (b"", "requests"),
    ],
)
def test_what_died_where_it_waited_for_its_quota_is_asked_again_where_it_was_asked(moved_from, asked):
    waited = Record("throttled", 3, 7, 1000.0, b"t", BODY, [("ce_id", b"r1"), ("moved-from", moved_from)])
    assert where_asked(read_dead_letter(dead(waited)), TopicSettings()).topic == asked
