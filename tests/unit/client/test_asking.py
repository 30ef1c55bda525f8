"""One request for an id: who asks, who joins, and who only waits for what somebody else has asked."""

import asyncio
from contextlib import suppress

import pytest

from schemas.codec import decode_control, decode_request
from schemas.control import Cancel
from schemas.requests import Request
from service.client import Options, Stream
from service.client.asking import GRACE_S, Asking
from service.client.inbox import KEPT
from service.errors import AlreadyAsked, NoAnswer, RecordRefused
from tests.support.client_log import Log, asking
from tests.support.virtual_time import virtual_time

ASKED = {"model": "llama", "prompt": "hello"}
X = Options(request_id="x")


async def idle() -> None:
    """Until nothing more happens by itself."""
    for _ in range(100):
        await asyncio.sleep(0)


def cancels(log: Log) -> list[str | None]:
    found = [decode_control(record) for record in log.records if record.topic in {"commands", "control"}]
    return [event.request for event in found if isinstance(event, Cancel)]


def begin(made: Asking) -> "asyncio.Task":
    return asyncio.create_task(made.answer(None, ASKED, X), name="asking")


def stream(made: Asking) -> Stream:
    return Stream(
        request_id="x", endpoint=None, opened=lambda: made.streaming(None, ASKED, X, within_s=60.0), within_s=60.0
    )


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
async def made(log: Log):
    async with asking(log) as (client, _):
        yield client


@pytest.mark.parametrize("way", ["submit", "call"])
async def test_an_id_that_somebody_only_waits_for_is_sent_by_who_asks(log: Log, made: Asking, way: str):
    waiting = asyncio.create_task(made.result("x", within_s=60), name="waiting")
    await idle()
    asked = asyncio.create_task(made.submit(ASKED, None, X), name="submit") if way == "submit" else begin(made)
    await idle()
    (request,) = log.requests
    answer = log.answer(request)
    assert await waiting == answer
    assert await asked == ("x" if way == "submit" else answer)


async def test_a_past_result_is_found_by_all_who_ask_for_it_at_once(log: Log, made: Asking):
    await made.submit(ASKED, None, X)
    past = log.answer(log.requests[0])
    async with asking(log) as (other, _):
        assert await asyncio.gather(*(other.result("x", within_s=1) for _ in range(3))) == [past] * 3


async def test_an_id_is_sent_once_however_many_submit_and_call_and_each_returns_when_it_is_there(
    log: Log, made: Asking
):
    log.gate.clear()
    submits = [asyncio.create_task(made.submit(ASKED, None, X), name=f"submit-{n}") for n in range(2)]
    calls = [begin(made) for _ in range(2)]
    await idle()
    assert not any(task.done() for task in submits)
    log.gate.set()
    assert await asyncio.gather(*submits) == ["x", "x"]
    (request,) = log.requests
    answer = log.answer(request)
    assert await asyncio.gather(*calls, made.result("x", within_s=1)) == [answer] * 3
    assert log.lookups == 0


async def test_a_stream_of_an_id_that_is_asked_is_refused_and_sends_nothing(log: Log, made: Asking):
    call = begin(made)
    await idle()
    with pytest.raises(AlreadyAsked, match="request x is asked already"):
        [piece async for piece in stream(made)]
    (request,) = log.requests
    assert await call if log.answer(request) else None
    await made.submit(ASKED, None, Options(request_id="y"))
    assert len(log.requests) == 2


async def test_two_streams_of_one_id_do_not_share_its_pieces_and_a_call_beside_them_has_the_result(
    log: Log, made: Asking
):
    first, pieces = stream(made), []

    async def follow() -> None:
        pieces.extend([piece async for piece in first])

    following = asyncio.create_task(follow(), name="following")
    await idle()
    beside = begin(made)
    await idle()
    with pytest.raises(AlreadyAsked):
        [piece async for piece in stream(made)]
    (request,) = log.requests
    for seq in range(3):
        log.piece(request, seq, final=seq == 2)
    answer = log.answer(request)
    await following
    assert (pieces, first.result, await beside) == ([{"n": 0}, {"n": 1}], answer, answer)


async def test_a_request_is_withdrawn_when_the_last_who_wants_it_gives_up(log: Log, made: Asking):
    first, second = begin(made), begin(made)
    await idle()
    first.cancel()
    await asyncio.wait([first])
    assert cancels(log) == []
    second.cancel()
    await asyncio.wait([second])
    assert cancels(log) == ["x"]
    assert len(log.requests) == 1


async def test_what_was_submitted_is_not_withdrawn_with_a_call_that_joined(log: Log, made: Asking):
    await made.submit(ASKED, None, X)
    joined = begin(made)
    await idle()
    joined.cancel()
    await asyncio.wait([joined])
    answer = log.answer(log.requests[0])
    assert (cancels(log), await made.result("x", within_s=1), len(log.requests)) == ([], answer, 1)


async def test_who_joins_a_request_that_is_refused_is_told_so_and_it_may_be_asked_again(log: Log, made: Asking):
    log.gate.clear()
    both = asyncio.create_task(made.submit(ASKED, None, X), name="submit"), begin(made)
    await idle()
    log.refuses = RecordRefused("too large")
    log.gate.set()
    assert [str(error) for error in await asyncio.gather(*both, return_exceptions=True)] == ["too large"] * 2
    log.refuses = None
    again = begin(made)
    await idle()
    assert log.answer(log.requests[0]) == await again


async def test_who_joins_a_request_whose_sender_gives_up_is_told_so(log: Log, made: Asking):
    log.gate.clear()
    first, second = begin(made), begin(made)
    await idle()
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    with pytest.raises(NoAnswer, match="the call that sent it was cancelled"):
        await second


async def test_what_is_waited_for_is_not_forgotten_for_what_is_kept(log: Log):
    async with asking(log) as (client, inbox):
        await client.submit(ASKED, None, X)
        waiting = asyncio.create_task(client.result("x", within_s=60), name="waiting")
        await idle()
        for n in range(KEPT):
            async with inbox.listening(f"other-{n}") as box:
                inbox.keep(box)
        answer = log.answer(log.requests[0])
        assert await waiting == answer


async def test_a_result_that_nobody_took_in_time_is_still_there(log: Log, made: Asking):
    await made.submit(ASKED, None, X)
    with pytest.raises(NoAnswer, match="no result for x within 0 s"):
        await made.result("x", within_s=0)
    answer = log.answer(log.requests[0])
    await idle()
    assert await made.result("x", within_s=0) == answer
    assert log.lookups == 0


def test_no_time_is_no_time_and_not_the_default():
    async def ask(log: Log) -> float:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with asking(log, timeout_s=600) as (client, _):
            for late in (client.result("y", within_s=0), client.answer(None, ASKED, Options(timeout_s=0))):
                with pytest.raises(NoAnswer):
                    await late
        return loop.time() - begun

    with virtual_time() as loop:
        log = Log()
        took_s = loop.run_until_complete(ask(log))
    request = decode_request(log.requests[0], max_bytes=1000)
    assert isinstance(request, Request)
    assert request.deadline is not None
    assert took_s == pytest.approx(GRACE_S)
