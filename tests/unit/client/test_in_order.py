"""Mapping calls over many items, a few at a time."""

import asyncio

import pytest

from service.client.ordered import in_order
from service.errors import GearshiftError, RecordRefused


async def collect(items):
    return [item async for item in items]


async def test_answers_come_in_the_order_of_what_was_asked_though_they_finish_in_another():
    gates = [asyncio.Event() for _ in range(3)]

    async def call(n):
        if n < 2:
            await gates[n + 1].wait()
        gates[n].set()
        return n * 10

    assert await collect(in_order(range(3), call, concurrency=3)) == [0, 10, 20]


async def test_no_more_calls_run_at_once_and_no_more_items_are_taken_than_asked_for():
    running, most, taken = 0, 0, 0

    def items():
        nonlocal taken
        for n in range(20):
            taken += 1
            assert taken <= n + 1
            yield n

    async def call(n):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return n

    answers = in_order(items(), call, concurrency=4)
    assert await anext(answers) == 0
    assert taken <= 5
    assert await collect(answers) == list(range(1, 20))
    assert most <= 4


async def test_items_may_come_from_an_async_iterator():
    async def items():
        yield 1
        yield 2

    async def call(n):
        return -n

    assert await collect(in_order(items(), call, concurrency=2)) == [-1, -2]


async def odd_fails(n):
    if n % 2:
        raise GearshiftError(f"{n}")
    return n


async def test_an_error_takes_the_place_of_its_answer_where_that_is_asked():
    answers = await collect(in_order(range(4), odd_fails, concurrency=2, errors="return"))
    assert [str(answer) for answer in answers] == ["0", "1", "2", "3"]
    assert isinstance(answers[1], GearshiftError)


async def test_an_error_ends_the_iteration_otherwise_and_nothing_is_left_running():
    started, ended = [], []

    async def call(n):
        started.append(n)
        try:
            if n == 1:
                raise GearshiftError("one")
            await asyncio.Event().wait() if n > 1 else None
        finally:
            ended.append(n)
        return n

    with pytest.raises(GearshiftError, match="one"):
        await collect(in_order(range(10), call, concurrency=4))
    assert sorted(ended) == sorted(started)


async def test_a_record_that_the_broker_refuses_is_an_error_in_its_answers_place_too():
    async def call(n):
        if n == 1:
            raise RecordRefused("too large")
        return n

    answers = await collect(in_order(range(3), call, concurrency=2, errors="return"))
    assert [str(answer) for answer in answers] == ["0", "too large", "2"]


async def test_an_answer_is_given_out_while_the_source_waits_for_it_before_it_gives_more():
    answered = [asyncio.Event() for _ in range(4)]

    async def one_after_the_other():
        for n in range(3):
            yield n
            await answered[n].wait()

    async def call(n):
        return n

    found = []
    async with asyncio.timeout(5):
        async for answer in in_order(one_after_the_other(), call, concurrency=4):
            found.append(answer)
            answered[answer].set()
    assert found == [0, 1, 2]


async def test_a_source_is_left_where_the_iteration_ends_and_its_error_ends_the_iteration():
    left, begun = [], asyncio.Event()

    async def endless():
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            left.append("endless")

    async def broken():
        yield 1
        raise ValueError("no more of these")

    async def call(n):
        begun.set()
        return n

    answers = in_order(endless(), call, concurrency=4)
    assert await anext(answers) == 1
    await answers.aclose()
    assert left == ["endless"]
    with pytest.raises(ValueError, match="no more of these"):
        await collect(in_order(broken(), call, concurrency=4))


@pytest.mark.parametrize("concurrency", [0, -1])
async def test_there_must_be_room_for_one_call(concurrency):
    with pytest.raises(ValueError, match=f"concurrency must be at least 1, not {concurrency}"):
        await collect(in_order([1], odd_fails, concurrency=concurrency))
