"""The bus in memory: bounded, and never silent towards who asked."""

import asyncio

import pytest

from schemas.base import Record
from schemas.results import Chunk, Outcome, Result, Timing
from service.errors import DoorClosed, DoorCrowded
from service.http.local import Exchange, LocalBus
from service.ports import Settlement


def bus(**limits: int) -> LocalBus:
    return LocalBus(**({"max_requests": 10, "max_bytes": 1000} | limits))


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


async def delivered(local: LocalBus) -> list[Record]:
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
    assert (await local.receive()).lost == frozenset()


async def test_a_slow_reader_holds_its_own_run_up_and_frees_it_by_leaving():
    local = bus()
    with local.ask(b"{}", [], id_="a") as exchange:

        async def run() -> int:
            for seq in range(1000):
                await local.chunk(exchange.record.origin, piece(exchange, seq))
            return 1000

        running = asyncio.create_task(run())
        done, _ = await asyncio.wait({running}, timeout=0.2)
        assert not done
        assert (await exchange.next()).data == {"n": 0}
    assert await running == 1000


async def test_who_leaves_early_is_told_to_the_worker_as_lost_and_undelivered_requests_are_not_delivered():
    local = bus()
    with local.ask(b"{}", [], id_="a") as early:
        pass
    with local.ask(b"{}", [], id_="b") as waiting:
        received = await local.receive()
        assert received.lost == {early.record.origin}
        assert [one.record.origin for one in received.deliveries] == [waiting.record.origin]
        assert not await local.settle(early.record.origin, result(early))


async def test_requests_and_bytes_are_bounded():
    local = bus(max_requests=2, max_bytes=100)
    with local.ask(b"x" * 60, [], id_="a"):
        with pytest.raises(DoorCrowded), local.ask(b"x" * 60, [], id_="b"):
            pass
        with local.ask(b"x", [], id_="c"), pytest.raises(DoorCrowded), local.ask(b"x", [], id_="d"):
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
        with pytest.raises(DoorClosed), local.ask(b"{}", [], id_="c"):
            pass
        assert await local.settle(begun.origin, result(running))
        assert (await running.next()).outcome is Outcome.COMPLETED
