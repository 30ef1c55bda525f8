"""A result always gets out: whole, without its dead letter, or as an error of constant size in its place."""

from collections.abc import Awaitable, Callable, Sequence

import pytest

from schemas.base import Origin, Outgoing, Record
from schemas.codec import decode_result
from schemas.errors import ErrorObject, FailureClass
from schemas.requests import Endpoint, Request
from schemas.results import Freeze, Outcome, Result, Timing
from service.consumer.encoding import settle_in_turn
from service.errors import Stalled
from service.ports import Moved, RecordRefused, Settlement
from service.settings import TopicSettings

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
    return Settlement(result, **{"reply_to": "mine", "dead": RECORD, "trace": (("traceparent", long.encode()),)} | more)


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


async def test_what_the_broker_takes_is_published_as_it_is() -> None:
    taken: list[Sequence[Outgoing]] = []
    wanted = settlement(100)
    assert await settle_in_turn(ORIGIN, wanted, TOPICS, broker(taken)) is wanted
    ((result, letter),) = taken
    assert (result.topic, letter.topic) == ("mine", "dead-letters")
    assert result_in(result) == wanted.result


async def test_without_a_dead_letter_where_those_are_refused() -> None:
    taken: list[Sequence[Outgoing]] = []
    settled = await settle_in_turn(ORIGIN, settlement(), TOPICS, broker(taken, but="dead-letters"))
    assert settled == settlement(dead=None)
    assert [record.topic for record in taken[0]] == ["mine"]


@pytest.mark.parametrize("size", [1000, 1_000_000, 20_000_000])
async def test_the_last_form_is_of_constant_size_however_long_anything_is(size: int) -> None:
    taken: list[Sequence[Outgoing]] = []
    settled = await settle_in_turn(ORIGIN, settlement(size), TOPICS, broker(taken, most=900))
    assert settled is not None
    ((record,),) = taken
    assert record.topic == "results"
    assert result_in(record) == settled.result
    assert (settled.result.failure, settled.result.origin) == (FailureClass.TOO_LARGE, ORIGIN)
    assert settled.result.correlation_id is None


async def test_a_result_that_can_not_be_encoded_is_replaced_too() -> None:
    taken: list[Sequence[Outgoing]] = []
    wanted = settlement()
    wanted = Settlement(wanted.result.model_copy(update={"body": {"text": "\ud800"}}))
    settled = await settle_in_turn(ORIGIN, wanted, TOPICS, broker(taken))
    assert settled is not None
    assert settled.result.failure is FailureClass.TOO_LARGE


async def test_a_results_topic_that_takes_nothing_stalls_the_worker_and_a_move_only_fails() -> None:
    with pytest.raises(Stalled, match="won't have it"):
        await settle_in_turn(ORIGIN, settlement(), TOPICS, broker([], most=0))
    request = Request(id="r", origin=ORIGIN, model="m", endpoint=Endpoint.CHAT, body={}, received=0, size=1)
    moved = Moved(RECORD, request, "qwen", 1)
    with pytest.raises(RecordRefused):
        await settle_in_turn(ORIGIN, moved, TOPICS, broker([], most=0))
    taken: list[Sequence[Outgoing]] = []
    assert await settle_in_turn(ORIGIN, moved, TOPICS, broker(taken)) is moved
    assert taken[0][0].topic == "requests.qwen"
