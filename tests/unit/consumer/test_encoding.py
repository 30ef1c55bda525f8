"""A result always gets out: whole, without its dead letter, or as an error of constant size in its place."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from schemas.base import Origin, Outgoing, Record
from schemas.codec import decode_request, decode_result
from schemas.errors import ErrorObject, FailureClass
from schemas.requests import Endpoint, Refusal, ReplyTo, Request
from schemas.results import Freeze, Outcome, Result, Timing
from schemas.usage import usage_of
from service.consumer.encoding import forms, records, settle_in_turn
from service.errors import RecordRefused, Stalled
from service.kafka.reply_topics import Place
from service.ports import Moved, Settlement
from service.settings import TopicSettings
from service.worker.settlements import refused

ORIGIN = Origin(topic="requests", partition=0, offset=7)
TOPICS = TopicSettings(reply_topics=("mine",))
RECORD = Record("requests", 0, 7, 0.0, None, b"{")


def settlement(size: int = 0, **more: object) -> Settlement:
    """All that may be long in a result is ``size`` long."""
    long = "x" * size
    result = Result(
        id="r1",
        origin=ORIGIN,
        outcome=Outcome.FAILED,
        status=400,
        model=long,
        body={"text": long},
        error=ErrorObject(message=f"no {long}", param=long),
        failure=FailureClass.INVALID,
        correlation_id=f"c{long}",
        timing=Timing(received=1, finished=3, latency_s=2, freezes=(Freeze(tokens=1, seconds=1, model=long),)),
        worker="w1",
    )
    return Settlement(
        result, **{"reply": ReplyTo("mine", 3), "dead": RECORD, "trace": (("traceparent", long.encode()),)} | more
    )


def broker(taken: list[Sequence[Outgoing]], *, most: int = 1 << 20, but: str = "") -> Callable[..., Awaitable[bool]]:
    """Takes records of ``most`` bytes, and none of the topic ``but``."""

    async def commit(records: Sequence[Outgoing]) -> bool:
        for record in records:
            if record.topic == but or record_size(record) > most:
                raise RecordRefused(f"{record.topic} won't have it")
        taken.append(records)
        return True

    return commit


def record_size(record: Outgoing) -> int:
    return len(record.key or b"") + len(record.value or b"") + sum(len(k) + len(v) for k, v in record.headers)


def result_in(record: Outgoing) -> Result:
    return decode_result(Record(record.topic, 0, 0, 0.0, record.key, record.value, record.headers))


class There:
    """Reply topics as they are: all there, until they are ``gone_by_now``."""

    def __init__(self, place: Place | None = None, *, gone_by_now: bool = False) -> None:
        self._place = place
        self._gone = gone_by_now

    async def place(self, reply: ReplyTo | None) -> Place:
        return self._place or Place(reply)

    async def gone(self, reply: ReplyTo) -> bool:
        return self._gone


async def test_what_the_broker_takes_is_published_as_it_is() -> None:
    taken: list[Sequence[Outgoing]] = []
    wanted = settlement(100)
    assert await settle_in_turn(ORIGIN, wanted, TOPICS, broker(taken), There()) is wanted
    ((result, letter),) = taken
    assert (result.topic, result.partition, letter.topic) == ("mine", 3, "dead-letters")
    assert result_in(result) == wanted.result


async def test_without_a_dead_letter_where_those_are_refused() -> None:
    taken: list[Sequence[Outgoing]] = []
    settled = await settle_in_turn(ORIGIN, settlement(), TOPICS, broker(taken, but="dead-letters"), There())
    assert settled == settlement(dead=None)
    assert [record.topic for record in taken[0]] == ["mine"]


@pytest.mark.parametrize("size", [1000, 1_000_000, 20_000_000])
async def test_the_last_form_is_of_constant_size_however_long_anything_is(size: int) -> None:
    taken: list[Sequence[Outgoing]] = []
    settled = await settle_in_turn(ORIGIN, settlement(size), TOPICS, broker(taken, most=900), There())
    assert settled is not None
    ((record,),) = taken
    assert (record.topic, record.partition) == ("mine", 3), "where its producer looks"
    assert result_in(record) == settled.result
    assert (settled.result.failure, settled.result.origin) == (FailureClass.TOO_LARGE, ORIGIN)
    assert settled.result.correlation_id is None


@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from(["ce_id", "correlation-id", "tenant", "reply-to", "session", "x"]),
            st.none()
            | st.binary(max_size=300)
            | st.sampled_from([b'"' * 256, b"\\" * 256, b"\x01" * 256, b"x" * 9999]),
        ),
        max_size=6,
    ),
    value=st.none() | st.binary(max_size=50) | st.sampled_from([b'{"prompt": "x", "model": "' + b"m" * 250 + b'"}']),
    damage=st.none() | st.text(max_size=300),
)
def test_the_last_form_of_what_comes_of_any_record_fits_into_two_kilobytes_and_a_half_and_its_usage_into_six(
    headers: list[tuple[str, bytes | None]], value: bytes | None, damage: str | None
) -> None:
    record = Record("r" * 249, 2**31 - 1, 2**63 - 1, 1.79e9, b"k", value, headers, damage)
    decoded = decode_request(record, max_bytes=8 << 20)
    if isinstance(decoded, Refusal):
        whole = refused(decoded, record, worker="host-0123456789")
    else:
        timing = Timing(received=decoded.received, finished=1.79e9, latency_s=1 / 3)
        result = Result(
            id=decoded.id,
            origin=decoded.source,
            outcome=Outcome.COMPLETED,
            status=200,
            model=decoded.model,
            endpoint=decoded.endpoint,
            timing=timing,
        )
        whole = Settlement(result, usage=usage_of(result, tenant=decoded.tenant))
    *_, (last, where) = (form for form in forms(whole, Place(whole.reply)) if form[0].usage is whole.usage)
    sizes = [
        len(written.key or b"")
        + len(written.value or b"")
        + sum(len(name) + len(content or b"") for name, content in written.headers)
        for written in records(last, TOPICS, where)
    ]
    assert len(sizes) == 2
    assert sizes[0] <= 2500
    assert sizes[1] <= 6000, "a tenant and a model of control characters have six bytes for each"
    assert len(decoded.id.encode()) > 249 or sizes[0] <= 2000


async def test_a_result_that_can_not_be_encoded_is_replaced_too() -> None:
    taken: list[Sequence[Outgoing]] = []
    wanted = settlement()
    wanted = Settlement(wanted.result.model_copy(update={"body": {"text": "\ud800"}}))
    settled = await settle_in_turn(ORIGIN, wanted, TOPICS, broker(taken), There())
    assert settled is not None
    assert settled.result.failure is FailureClass.TOO_LARGE


async def test_a_result_that_has_no_place_is_whole_in_the_topic_of_all_and_says_why() -> None:
    taken: list[Sequence[Outgoing]] = []
    wanted = settlement(dead=None)
    settled = await settle_in_turn(ORIGIN, wanted, TOPICS, broker(taken), There(Place(note="mine/3: no such topic")))
    assert settled is wanted
    ((record,),) = taken
    assert (record.topic, record.partition) == ("results", None)
    assert dict(record.headers)["reply-failed"] == b"mine/3: no such topic"
    assert result_in(record) == wanted.result


async def test_a_reply_topic_that_goes_away_is_tried_once_and_one_that_refuses_gets_no_more_than_all_forms() -> None:
    for gone, tries in ((True, 1), (False, 3)):
        refused: list[str] = []
        commit = broker(taken := [], but="mine")

        async def counted(records: Sequence[Outgoing], commit=commit, refused=refused) -> bool:
            refused.append(records[0].topic)
            return await commit(records)

        settled = await settle_in_turn(ORIGIN, settlement(), TOPICS, counted, There(gone_by_now=gone))
        assert refused == ["mine"] * tries + ["results"]
        assert settled == settlement(), "whole, in the topic of all"
        assert "could not be written" in dict(taken[0][0].headers)["reply-failed"].decode()


async def test_no_result_waits_for_a_topic_of_usage_that_takes_nothing() -> None:
    taken: list[Sequence[Outgoing]] = []
    wanted = settlement(100)
    wanted = replace(wanted, usage=usage_of(wanted.result, tenant="blue"))
    with capture_logs() as logs:
        settled = await settle_in_turn(ORIGIN, wanted, TOPICS, broker(taken, but=TOPICS.named(TOPICS.usage)), There())
    assert settled == settlement(100), "whole, where its producer looks, with its dead letter"
    assert [record.topic for record in taken[0]] == ["mine", "dead-letters"]
    (lost,) = [entry for entry in logs if entry["event"] == "usage.lost"]
    assert (lost["origin"], lost["log_level"]) == (str(ORIGIN), "error")
    assert "usage" in lost["reason"]


@pytest.mark.parametrize("but", ["mine", "dead-letters", ""])
async def test_what_a_result_has_cost_is_said_with_whatever_form_of_it_is_taken(but: str) -> None:
    taken: list[Sequence[Outgoing]] = []
    wanted = settlement(10_000 if not but else 0)
    wanted = replace(wanted, usage=usage_of(wanted.result.model_copy(update={"model": "m"}), tenant="blue"))
    with capture_logs() as logs:
        await settle_in_turn(ORIGIN, wanted, TOPICS, broker(taken, but=but, most=900), There())
    assert TOPICS.named(TOPICS.usage) in {record.topic for record in taken[0]}
    assert all(entry["event"] != "usage.lost" for entry in logs)


async def test_a_results_topic_that_takes_nothing_stalls_the_worker_and_a_move_only_fails() -> None:
    with pytest.raises(Stalled, match="won't have it"):
        await settle_in_turn(ORIGIN, settlement(), TOPICS, broker([], most=0), There())
    request = Request(id="r", origin=ORIGIN, model="m", endpoint=Endpoint.CHAT, body={}, received=0, size=1)
    moved = Moved(RECORD, request, "requests.qwen", 1)
    with pytest.raises(RecordRefused):
        await settle_in_turn(ORIGIN, moved, TOPICS, broker([], most=0), There())
    taken: list[Sequence[Outgoing]] = []
    assert await settle_in_turn(ORIGIN, moved, TOPICS, broker(taken), There()) is moved
    assert taken[0][0].topic == "requests.qwen"


def test_what_a_result_has_cost_is_said_where_that_is_wanted() -> None:
    whole = settlement()
    whole = replace(whole, usage=usage_of(whole.result, tenant="blue"))
    silent = TOPICS.model_copy(update={"usage_records": False})
    said = [{one.topic for one in records(whole, topics, Place())} for topics in (TOPICS, silent)]
    assert said[0] - said[1] == {TOPICS.named(TOPICS.usage)}
