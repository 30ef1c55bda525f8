"""Waiting is not being stuck."""

import asyncio
from typing import Any

import pytest

from schemas.errors import FailureClass
from schemas.results import Outcome
from service.errors import Stalled
from service.models_file import Scheduling
from service.worker.watchdog import Progress
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import BROKEN, FakeEngine
from tests.support.virtual_time import virtual_time


def test_time_counts_only_while_there_is_work_and_nothing_moves():
    progress = Progress(now=0.0)
    assert progress.look("a", busy=True, now=0.0) == 0
    assert progress.look("a", busy=True, now=5.0) == 5
    assert progress.look("b", busy=True, now=6.0) == 0
    assert progress.look("b", busy=True, now=9.0) == 3
    assert progress.look("b", busy=False, now=10.0) == 0
    assert progress.look("b", busy=True, now=12.0) == 2


async def test_a_worker_whose_engine_is_stuck_says_so_and_then_ends(serve):
    engine = FakeEngine(step_s=1000.0)
    async with serve(engine=engine, stall_after_s=0.5, exit_after_stall_s=2.5) as serving:
        serving.bus.produce({"model": "llama", "prompt": "x", "max_tokens": 5})
        await serving.bus.until(lambda: any(presence.state == "unhealthy" for presence in serving.bus.presences))
        with pytest.raises(BaseExceptionGroup) as caught:
            await serving.done
        assert caught.group_contains(Stalled)
        assert serving.bus.flushed


def test_a_long_prompt_that_is_being_read_is_no_stall(serve):
    """Fifty steps of three seconds each before its first token, with nothing beside it."""

    async def ask() -> None:
        engine = FakeEngine(step_s=3.0, prompt_steps=50)
        async with serve(engine=engine, stall_after_s=6, exit_after_stall_s=15, presence_interval_s=1.5) as serving:
            bus = serving.bus
            origin = bus.produce({"model": "llama", "prompt": "x", "max_tokens": 2})
            await asyncio.sleep(180.0)
            assert (await bus.result(origin)).outcome is Outcome.COMPLETED
            assert "unhealthy" not in {presence.state for presence in bus.presences}

    with virtual_time() as loop:
        loop.run_until_complete(ask())


def test_a_request_that_backs_off_for_long_is_no_stall(serve):
    async def ask() -> None:
        backing_off = {"retry_backoff_s": 60, "retry_backoff_max_s": 60, "max_attempts": 2}
        async with serve(**backing_off, stall_after_s=6, exit_after_stall_s=15, presence_interval_s=1.5) as serving:
            bus = serving.bus
            origin = bus.produce({"model": "llama", "prompt": BROKEN, "max_tokens": 2})
            await asyncio.sleep(120.0)
            assert (await bus.result(origin)).failure is FailureClass.RETRIES_EXHAUSTED
            assert "unhealthy" not in {presence.state for presence in bus.presences}

    with virtual_time() as loop:
        loop.run_until_complete(ask())


async def test_what_its_source_complains_of_is_told_with_its_presence_and_ends_it_at_last(serve):
    async with serve(stall_after_s=120, exit_after_stall_s=300) as serving:
        bus = serving.bus
        bus.stuck, bus.stuck_s = "no broker answers a fetch", 119.0
        await bus.until(lambda: any(presence.state == "serving" for presence in bus.presences))
        bus.stuck_s = 200.0
        presence = await bus.until(lambda: next((p for p in bus.presences if p.state == "unhealthy"), None))
        assert presence.trouble == "no broker answers a fetch, for 200 s"
        bus.stuck_s = 0.0
        await bus.until(lambda: bus.presences[-1].state == "serving")
        assert bus.presences[-1].trouble is None
        bus.stuck_s = 300.0
        with pytest.raises(BaseExceptionGroup) as caught:
            await serving.done
        assert caught.group_contains(Stalled, match="no broker answers")


async def test_a_worker_without_a_broker_is_disconnected_and_serves_again_when_one_is_back(serve):
    async with serve(stall_after_s=120, exit_after_stall_s=300) as serving:
        bus = serving.bus
        bus.away_s = 5000.0
        presence = await bus.until(lambda: next((p for p in bus.presences if p.state == "disconnected"), None))
        assert presence.trouble == "no broker has answered for 5000 s"
        bus.away_s = 0.0
        await bus.until(lambda: bus.presences[-1].state == "serving")
        assert (await bus.result(bus.produce({"model": "llama", "prompt": "x", "max_tokens": 5}))).outcome


class Away(FakeBus):
    """Its broker takes nothing until it is back."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.back = asyncio.Event()

    async def settle(self, *settled: Any, **more: Any) -> Any:
        await self.back.wait()
        return await super().settle(*settled, **more)


async def test_a_worker_keeps_its_backlog_through_an_outage_though_what_is_done_keeps_its_slots(serve):
    """One can't be settled, the next waits for its slot: nothing moves here, and no broker could take it elsewhere."""
    bus, one = Away(), {"llama": Scheduling(max_concurrency=1)}
    async with serve(bus=bus, models=one, stall_after_s=0.5, exit_after_stall_s=1.5) as serving:
        bus.away_s = 5000.0
        await bus.until(lambda: any(presence.state == "disconnected" for presence in bus.presences))
        origins = [bus.produce({"model": "llama", "prompt": "x", "max_tokens": 5}) for _ in range(3)]
        await bus.until(lambda: len(serving.worker.jobs) == 3)
        told = len(bus.presences)
        await bus.until(lambda: len(bus.presences) > told + 40)
        assert bus.presences[-1].state == "disconnected"
        assert not serving.done.done()
        bus.away_s = 0.0
        bus.back.set()
        for origin in origins:
            assert (await bus.result(origin)).outcome is Outcome.COMPLETED


async def test_a_source_that_waits_for_settlements_is_no_trouble_while_something_moves_here(serve):
    async with serve(stall_after_s=120, exit_after_stall_s=300) as serving:
        bus = serving.bus
        bus.full_s = 400.0
        assert (await bus.result(bus.produce({"model": "llama", "prompt": "x", "max_tokens": 5}))).outcome
        await bus.until(lambda: len(bus.presences) > 2)
        assert all(presence.state != "unhealthy" for presence in bus.presences)


async def test_a_source_that_waits_for_settlements_is_stuck_when_nothing_moves_here_either(serve):
    async with serve(stall_after_s=0.5, exit_after_stall_s=300) as serving:
        bus = serving.bus
        bus.full_s = 200.0
        presence = await bus.until(lambda: next((p for p in bus.presences if p.state == "unhealthy"), None))
        assert "nothing more is read" in presence.trouble


class CancelledInside(FakeBus):
    """Its reading ends as that of a client which lets the cancellation of one of its own tasks out."""

    async def receive(self):
        raise asyncio.CancelledError


async def test_reading_that_is_cancelled_from_inside_ends_the_worker_and_not_itself_alone(serve):
    async with serve(bus=CancelledInside()) as serving:
        with pytest.raises(BaseExceptionGroup) as caught:
            await serving.done
        assert caught.group_contains(Stalled, match="reading was cancelled")
