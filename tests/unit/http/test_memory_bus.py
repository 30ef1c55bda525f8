"""The bus in memory: bounded, and never silent towards who asked."""

from dataclasses import replace

import pytest

from schemas.base import Record
from schemas.results import Chunk, Outcome, Result, Timing
from service.errors import Overloaded, Unavailable
from service.http.combined_bus import CombinedBus
from service.http.memory_bus import Exchange, InMemoryBus
from service.ports import Settlement
from tests.support.fake_bus import FakeBus


def bus(**limits: int) -> InMemoryBus:
    return InMemoryBus(**({"max_requests": 10, "max_bytes": 1000, "backlog": 100} | limits))


def piece(exchange: Exchange, seq: int) -> Chunk:
    return Chunk(id=exchange.id, seq=seq, data={"n": seq})


def result(exchange: Exchange) -> Settlement:
    found = Result(
        id=exchange.id,
        origin=exchange.record.origin,
        outcome=Outcome.COMPLETED,
        status=200,
        timing=Timing(received=0, finished=1),
    )
    return Settlement(found)


async def delivered(local: InMemoryBus) -> list[Record]:
    return [delivery.record for delivery in (await local.receive()).deliveries]


async def test_what_is_asked_is_delivered_once_and_its_result_comes_after_its_pieces():
    local = bus()
    with local.ask(b"{}", [("endpoint", b"/v1/completions")], id_="a") as exchange:
        (record,) = await delivered(local)
        assert record.origin == exchange.record.origin
        assert dict(record.headers)["ce_id"] == b"a"
        for seq in range(3):
            await local.chunk(exchange.record.origin, piece(exchange, seq))
        assert await local.settle(record.origin, result(exchange))
        came = [await exchange.next() for _ in range(4)]
        assert [item.data["n"] for item in came[:3]] == [0, 1, 2]
        assert came[3].outcome is Outcome.COMPLETED
    assert (await local.receive()).unwanted == frozenset()


async def test_no_run_is_asked_what_it_has_said_of_what_lives_as_long_as_its_connection():
    local, asked = bus(), []
    both = CombinedBus(memory=local, source=FakeBus(), settlements=FakeBus(), announcements=FakeBus())
    with local.ask(b"{}", [], id_="a") as exchange:
        both.keep(exchange.record.origin, lambda: asked.append(exchange))
        await local.flush()
    assert asked == []


async def test_a_run_waits_for_no_reader_and_is_given_up_when_its_reader_is_too_far_behind():
    local = bus(backlog=3)
    with local.ask(b"{}", [], id_="a") as exchange:
        await local.receive()
        for seq in range(1000):
            await local.chunk(exchange.record.origin, piece(exchange, seq))
        assert (await local.receive()).unwanted == {exchange.record.origin}
        assert [(await exchange.next()).data["n"] for _ in range(3)] == [0, 1, 2]
        end = await exchange.next()
        assert (end.outcome, end.status) == (Outcome.FAILED, 408)
        assert "3 pieces of it were waiting" in end.error.message


async def test_a_reader_that_keeps_up_is_given_every_piece():
    local = bus(backlog=1)
    with local.ask(b"{}", [], id_="a") as exchange:
        for seq in range(1000):
            await local.chunk(exchange.record.origin, piece(exchange, seq))
            assert (await exchange.next()).data == {"n": seq}


async def test_what_nobody_waits_for_any_more_is_not_delivered():
    local = bus()
    with local.ask(b"{}", [], id_="a") as early:
        pass
    with local.ask(b"{}", [], id_="b") as waiting:
        received = await local.receive()
        assert received.unwanted == frozenset()
        assert [one.record.origin for one in received.deliveries] == [waiting.record.origin]
        assert not await local.settle(early.record.origin, result(early))


@pytest.mark.parametrize("overflows", [False, True], ids=["whose asker leaves", "that nobody reads"])
async def test_what_is_given_up_in_the_workers_hands_ends_once_and_its_cost_is_told(overflows: bool):
    local, broker = bus(backlog=3), FakeBus()
    both = CombinedBus(memory=local, source=broker, settlements=broker, announcements=broker)
    with local.ask(b"{}", [], id_="a") as exchange:
        (record,) = await delivered(local)
        assert await both.started(record.origin)
        for seq in range(1000 * overflows):
            await both.chunk(record.origin, piece(exchange, seq))
    received = await local.receive()
    assert (received.unwanted, received.lost) == ({record.origin}, frozenset())
    assert not (await local.receive()).unwanted
    assert await both.started(record.origin, alone=True), "a mark of one under way ends nothing"
    ended = replace(result(exchange), usage={"generated_tokens": 7})
    assert await both.settle(record.origin, ended) == ended
    assert await both.settle(record.origin, ended) is None
    assert broker.usages == [{"generated_tokens": 7}]


async def test_what_was_given_up_before_it_began_does_not_begin_and_has_no_end():
    local = bus()
    with local.ask(b"{}", [], id_="a") as exchange:
        (record,) = await delivered(local)
    assert not await local.started(record.origin)
    assert await local.settle(record.origin, result(exchange)) is None


async def test_requests_and_bytes_are_bounded():
    local = bus(max_requests=2, max_bytes=100)
    with local.ask(b"x" * 60, [], id_="a"):
        with pytest.raises(Overloaded), local.ask(b"x" * 60, [], id_="b"):
            pass
        with local.ask(b"x", [], id_="c"), pytest.raises(Overloaded), local.ask(b"x", [], id_="d"):
            pass
    with local.ask(b"x" * 60, [], id_="e"):
        assert len(local) == 1
    assert len(local) == 0


async def test_a_stopped_bus_takes_nothing_and_answers_what_has_not_begun():
    local = bus()
    with local.ask(b"{}", [], id_="a") as waiting, local.ask(b"{}", [], id_="b") as running:
        begun = {record.origin: record for record in await delivered(local)}[running.record.origin]
        await local.started(begun.origin)
        await local.stop()
        assert (await waiting.next()).status == 503
        with pytest.raises(Unavailable), local.ask(b"{}", [], id_="c"):
            pass
        assert await local.settle(begun.origin, result(running))
        assert (await running.next()).outcome is Outcome.COMPLETED
