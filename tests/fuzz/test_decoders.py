"""Whatever a record holds, decoding it gives a request or a refusal that can be answered; nothing is raised.

By default a share of the records; ``pytest tests/fuzz -m "long or not long"`` feeds all 100,000.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from schemas.base import Record
from schemas.codec import (
    decode_chunk,
    decode_presence,
    decode_progress,
    decode_request,
    decode_result,
    decode_status,
    decode_stored,
    decode_usage,
    encode_moved,
)
from schemas.requests import Refusal, Request
from schemas.results import Outcome
from service.consumer.encoding import records as encoded
from service.consumer.ledgers_topic import LedgersTopic
from service.kafka.calls import CallIndex
from service.kafka.cancels import OldCancels
from service.kafka.control import fold, read_event
from service.kafka.dead_letters import DeadLetter, collect, read_dead_letter, redriven
from service.kafka.files import FileIndex
from service.kafka.presence import Roster
from service.kafka.reply_topics import Place
from service.ports import ControlRecord
from service.settings import TopicSettings, load
from service.worker import settlements
from tests.fuzz.records import records

MAX_BYTES = 2000
KEY = b"the pool's"
TOPICS = TopicSettings()
LONG = [pytest.mark.long, pytest.mark.timeout(3000)]


def feed(check: Callable[[Record], None], count: int) -> None:
    """``count`` records through ``check``."""

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(records())
    def run(record: Record) -> None:
        check(record)

    run()


@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=LONG)])
def test_every_record_is_a_request_or_a_refusal(count: int) -> None:
    seen: Counter[str] = Counter()

    def check(record: Record) -> None:
        alias = "qwen" if record.topic == "requests.qwen" else None
        decoded = decode_request(record, max_bytes=MAX_BYTES, alias=alias, keys=[KEY])
        if isinstance(decoded, Request):
            seen["request"] += 1
            check_request(record, decoded)
        else:
            seen[decoded.failure.value] += 1
            check_refusal(record, decoded)

    feed(check, count)
    print(dict(seen))
    assert seen.total() >= count
    assert {"undecodable", "invalid", "request", "malformed"} <= seen.keys()


def check_request(record: Record, request: Request) -> None:
    """It can wait on the bus and is the same request afterwards."""
    moved = encode_moved(record, request, "requests.qwen", deaths=2, keys=[KEY])
    again = decode_request(
        Record(moved.topic, 1, 5, 0.0, moved.key, moved.value, moved.headers),
        max_bytes=MAX_BYTES,
        alias=request.model,
        keys=[KEY],
    )
    assert isinstance(again, Request)
    assert (again.id, again.model, again.endpoint, again.body) == (
        request.id, request.model, request.endpoint, request.body
    )  # fmt: skip
    assert (again.source, again.deadline, again.received) == (request.source, request.deadline, request.received)
    assert again.deaths == 2
    json.dumps(request.body)
    told = [request.id, request.model, request.tenant, request.session, request.correlation_id, request.reply_to]
    assert all(len(text.encode()) <= 256 for text in told if text is not None)


def check_refusal(record: Record, refusal: Refusal) -> None:
    """It is answered by one result, and kept as it was."""
    result, usage, letter = encoded(settlements.refused(refusal, record, worker="w"), TOPICS, Place())
    answered = decode_result(Record(result.topic, 0, 0, 0.0, result.key, result.value, result.headers))
    assert (answered.outcome, answered.origin) == (Outcome.FAILED, record.origin)
    assert answered.error is not None
    assert answered.error.message
    spent = decode_usage(Record(usage.topic, 0, 0, 0.0, usage.key, usage.value, usage.headers))
    assert (spent.id, spent.origin, spent.outcome) == (answered.id, answered.origin, answered.outcome)
    kept = read_dead_letter(Record(letter.topic, 0, 0, 0.0, letter.key, letter.value, letter.headers))
    assert (kept.value, kept.failure, kept.origin) == (record.value, refusal.failure, str(record.origin))
    assert len(result.value or b"") < 3000
    check_redriven(kept)


def check_redriven(letter: DeadLetter) -> None:
    """It is the same record under a new id, which a structured CloudEvent has in its value."""
    again = redriven(letter, "new")
    if again.value != letter.value:
        assert json.loads(again.value or b"") == json.loads(letter.value or b"") | {"id": "new"}
    else:
        assert ("ce_id", b"new") in again.headers


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=LONG)])
def test_every_control_record_is_an_event_or_a_problem(count: int) -> None:
    def check(record: Record) -> None:
        for keys in ((), (b"key",)):
            read = read_event(record, keys)
            assert (read.event is None) == (bool(read.problem) or read.takes_back)
            assert not read.takes_back or (record.value is None and record.damage is None)
            assert len(read.problem or "") <= 500
            found.append(read)
            cancels.note(read)

    found: list[ControlRecord] = []
    cancels = OldCancels(60.0)
    feed(check, count)
    fold(found, names={"*"}, now=1.79e9)
    cancels.take(1e12)


@pytest.mark.parametrize("count", [200, pytest.param(100_000, marks=LONG)])
def test_what_is_read_of_the_other_topics_is_a_message_or_no_message(count: int) -> None:
    roster, ledgers, index, files = (
        Roster(),
        LedgersTopic(settings=load()),
        CallIndex(load().topics, keyed=True),
        FileIndex(),
    )

    def check(record: Record) -> None:
        others = (decode_usage, decode_stored, decode_progress)
        for decode in (decode_result, decode_chunk, decode_status, decode_presence, *others):
            with contextlib.suppress(ValueError):
                decode(record)
        roster.hear([record], live=False)
        ledgers._take(record)
        for topic in ("calls", "answers"):
            found = replace(record, topic=topic)
            index.fold(found)
            assert index.counts(found) in {True, False}
        files.fold(record)

    feed(check, count)
    roster.present()
    roster.gone()


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=LONG)])
def test_every_dead_letter_can_be_shown_and_tried_again(count: int) -> None:
    def check(record: Record) -> None:
        letter = read_dead_letter(record)
        check_redriven(letter)
        assert isinstance(letter.history, tuple)
        kept.append(record)

    kept: list[Record] = []
    feed(check, count)
    assert collect(kept)
