"""Whose answer is taken: the one to the record that this client wrote."""

import asyncio

import pytest

from schemas.base import Origin
from schemas.results import Chunk, Outcome, Result, Timing
from service.client.feed import Traffic
from service.client.inbox import AnswerBox
from service.errors import BrokerUnavailable, NoAnswer

OURS = Origin(topic="p-requests", partition=3, offset=17)
OWN = Origin(topic="p-requests.qwen", partition=3, offset=17)
OWN_LATER = Origin(topic="p-requests.qwen", partition=3, offset=18)
FOREIGN = [
    Origin(topic="p-requests", partition=3, offset=18),
    Origin(topic="p-requests", partition=2, offset=17),
    Origin(topic="requests.qwen", partition=3, offset=17),
    Origin(topic="p-results", partition=3, offset=17),
]


def result(origin: Origin, outcome: Outcome = Outcome.COMPLETED, *, moved_from: Origin | None = None) -> Result:
    timing = Timing(received=1, finished=2)
    return Result(id="a", origin=origin, says_moved_from=moved_from, outcome=outcome, status=200, timing=timing)


def chunk(origin: Origin | None, seq: int = 0) -> Chunk:
    return Chunk(id="a", seq=seq, origin=origin)


@pytest.fixture
def box() -> AnswerBox:
    return AnswerBox("a", traffic=Traffic())


@pytest.mark.parametrize("foreign", FOREIGN, ids=str)
async def test_an_answer_to_somebody_elses_record_is_passed_over_and_counted(foreign: Origin):
    traffic = Traffic()
    box = AnswerBox("a", traffic=traffic)
    box.stream = True
    box.sending()
    box.sent(OURS)
    for forged in (chunk(foreign), result(foreign, Outcome.FAILED)):
        box.put(forged)
    box.put(chunk(OURS))
    box.put(result(OURS))
    assert [await box.take(within_s=1), await box.take(within_s=1)] == [chunk(OURS), result(OURS)]
    assert traffic.not_ours == 2


async def test_what_comes_before_the_brokers_acknowledgement_is_kept_back_and_then_sorted(box: AnswerBox):
    box.sending()
    box.put(result(FOREIGN[0], Outcome.FAILED))
    box.put(result(OURS))
    with pytest.raises(NoAnswer):
        await box.result(within_s=0)
    box.sent(OURS)
    assert await box.result(within_s=1) == result(OURS)


async def test_an_error_is_not_kept_back(box: AnswerBox):
    box.sending()
    box.put(BrokerUnavailable("gone"))
    with pytest.raises(BrokerUnavailable):
        await box.result(within_s=1)


async def test_a_flood_before_the_acknowledgement_takes_bounded_memory(box: AnswerBox):
    box.sending()
    for offset in range(100_000):
        box.put(result(Origin(topic="p-requests", partition=3, offset=offset + 100), Outcome.FAILED))
    box.put(result(OURS))
    assert box.held == 4096
    box.sent(OURS)
    assert await box.result(within_s=1) == result(OURS)


PLACES = [OURS, OWN, Origin(topic="p-throttled", partition=0, offset=4), OWN_LATER]


@pytest.mark.parametrize("sent", [OURS, OWN], ids=str)
@pytest.mark.parametrize("now", PLACES, ids=str)
@pytest.mark.parametrize("offset", [None, -1])
async def test_an_answer_from_where_our_record_was_moved_is_ours_where_it_says_so(
    box: AnswerBox, sent: Origin, now: Origin, offset: int | None
):
    if now == sent:
        return
    box.stream = True
    box.sending()
    box.sent(sent if offset is None else Origin(topic=sent.topic, partition=sent.partition, offset=offset))
    box.put(Chunk(id="a", seq=0, origin=now, says_moved_from=sent))
    box.put(moved := result(now, moved_from=sent))
    assert isinstance(await box.take(within_s=1), Chunk)
    assert await box.result(within_s=1) == moved


@pytest.mark.parametrize("sent", [OURS, OWN], ids=str)
@pytest.mark.parametrize("foreign", [*FOREIGN, *PLACES], ids=str)
async def test_an_answer_from_a_topic_that_requests_are_moved_to_is_not_ours_for_that(
    box: AnswerBox, sent: Origin, foreign: Origin
):
    """With a pool's key the workers answer what they have moved under its first place, and claim nothing."""
    if foreign == sent:
        return
    box.sending()
    box.sent(sent)
    box.put(result(foreign, Outcome.FAILED))
    box.put(result(foreign, Outcome.FAILED, moved_from=FOREIGN[0]))
    box.put(result(sent))
    assert await box.result(within_s=1) == result(sent)


async def test_a_record_that_the_broker_had_already_is_known_by_its_partition(box: AnswerBox):
    box.sending()
    box.sent(Origin(topic=OURS.topic, partition=3, offset=-1))
    box.put(result(FOREIGN[1]))
    box.put(result(OURS))
    assert await box.result(within_s=1) == result(OURS)


async def test_chunks_of_workers_that_say_no_origin_are_taken_and_chunks_that_nobody_asked_for_are_not(box: AnswerBox):
    box.sending()
    box.sent(OURS)
    box.put(chunk(None))
    box.stream = True
    box.put(chunk(None, seq=1))
    assert await box.take(within_s=1) == chunk(None, seq=1)


async def test_a_result_that_somebody_else_asked_for_is_taken_as_it_is(box: AnswerBox):
    box.put(result(FOREIGN[2]))
    assert await box.result(within_s=1) == result(FOREIGN[2])


async def test_any_number_may_wait_for_one_result_and_a_stream_takes_it_too(box: AnswerBox):
    box.stream = True
    waiting = [asyncio.create_task(box.result(within_s=5), name=f"waiting-{n}") for n in range(3)]
    box.put(chunk(OURS))
    box.put(result(OURS))
    assert await asyncio.gather(*waiting) == [result(OURS)] * 3
    assert [await box.take(within_s=1), await box.take(within_s=1)] == [chunk(OURS), result(OURS)]
    box.put(result(OURS, Outcome.FAILED))
    assert await box.result(within_s=1) == result(OURS), "the first one counts"
