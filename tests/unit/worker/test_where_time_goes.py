"""What is told and billed of a request's time: when it was given to the engine, when it stood still, when it ran."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from schemas.base import Origin
from schemas.control import Cancel, Switch
from schemas.errors import FailureClass
from schemas.results import Freeze, Outcome, Result, Timing
from schemas.status import StatusState
from service.worker.metrics import phases
from tests.support.fake_engine import FakeEngine
from tests.support.virtual_time import virtual_time


def chat(model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens}


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> None:
    with virtual_time() as loop:
        loop.run_until_complete(test())


async def both_there(**given: Any) -> FakeEngine:
    engine = FakeEngine(step_s=0.1, **given)
    await engine.preload("qwen")
    return engine


def usage_of(bus: Any, origin: Origin) -> dict[str, Any]:
    return next(json.loads(record.value) for record in bus.settled[origin] if record.topic == "usage")


@pytest.mark.parametrize(("mode", "switch_s"), [("drain", 0.01), ("keep", 40.0)])
def test_a_request_for_a_model_that_is_being_switched_to_waits_and_does_not_run(serve, mode, switch_s):
    async def test() -> None:
        async with serve(engine=await both_there(switch_s=switch_s)) as s:
            s.bus.produce(chat("llama", 550))
            await asyncio.sleep(1)
            s.bus.command(Switch(model="qwen", mode=mode, drain_timeout=60 if mode == "drain" else None))
            await asyncio.sleep(2)
            asked = s.bus.produce(chat("qwen", 10))
            result = await s.bus.result(asked)
            assert result.timing.waited_s > 30
            assert result.timing.first_token_s < 1
            assert sum(result.timing.waited_for[reason] for reason in ("turn", "switch")) > 30
            assert usage_of(s.bus, asked)["running_s"] == pytest.approx(1, abs=0.2)
            assert s.worker.scheduler.costs.pace("qwen").request_s < 3

    in_virtual_time(test)


def test_while_switches_stall_the_engine_a_request_stands_still_and_does_not_run(serve):
    async def test() -> None:
        async with serve(engine=await both_there(switch_s=30.0)) as s:
            asked = s.bus.produce(chat("llama", 300))
            await asyncio.sleep(1)
            s.bus.command(Switch(model="qwen", hold=1))
            result = await s.bus.result(asked)
            (freeze,) = result.timing.freezes
            assert (freeze.seconds, freeze.model) == (pytest.approx(61, abs=1), "qwen")
            assert usage_of(s.bus, asked)["running_s"] == pytest.approx(30, abs=1)

    in_virtual_time(test)


def test_a_switch_that_is_rolled_back_froze_what_ran_for_as_long_as_it_took(serve):
    async def test() -> None:
        async with serve(engine=FakeEngine(step_s=0.1, switch_s=5.0, broken_loads=frozenset({"qwen"}))) as s:
            asked = s.bus.produce(chat("llama", 100))
            await asyncio.sleep(1)
            s.bus.command(switch := Switch(model="qwen"))
            await s.bus.said(switch.id, StatusState.ROLLED_BACK)
            result = await s.bus.result(asked)
            running_s = usage_of(s.bus, asked)["running_s"]
            assert running_s + result.timing.frozen_s == pytest.approx(result.timing.latency_s - result.timing.waited_s)
            assert running_s == pytest.approx(10, abs=1)

    in_virtual_time(test)


@pytest.mark.parametrize("how", ["expires", "is cancelled"])
def test_what_ends_while_it_is_frozen_did_not_run_until_then(serve, how):
    async def test() -> None:
        async with serve(engine=await both_there()) as s:
            asked = s.bus.produce(chat("llama", 500), headers={"ttl": "10"} if how == "expires" else None)
            await asyncio.sleep(2)
            s.bus.command(Switch(model="qwen", hold="forever"))
            await asyncio.sleep(8)
            if how == "is cancelled":
                (job,) = s.worker.jobs
                s.bus.command(Cancel(request=job.request.id))
            result = await s.bus.result(asked)
            (freeze,) = result.timing.freezes
            assert (freeze.seconds, freeze.tokens) == (pytest.approx(8, abs=0.5), pytest.approx(20, abs=2))
            assert usage_of(s.bus, asked)["running_s"] == pytest.approx(2, abs=0.5)

    in_virtual_time(test)


def test_how_long_an_earlier_run_was_frozen_is_not_taken_off_the_next_one(serve):
    async def test() -> None:
        async with serve(engine=await both_there()) as s:
            asked = s.bus.produce(chat("llama", 100))
            await asyncio.sleep(2)
            s.bus.command(Switch(model="qwen", hold=20))
            await asyncio.sleep(21.5)
            s.engine.hand_back("llama")
            s.engine.forgets = True
            result = await s.bus.result(asked)
            assert result.attempt.n > 1
            assert result.timing.freezes == ()
            assert usage_of(s.bus, asked)["running_s"] == pytest.approx(10, abs=0.5)
            assert s.worker.scheduler.costs.pace("llama").request_s > 5

    in_virtual_time(test)


def test_the_phases_of_a_request_add_up_to_its_time_wherever_it_was_frozen() -> None:
    freezes = (Freeze(tokens=0, seconds=9.0, began=2.0), Freeze(tokens=3, seconds=4.0, began=11.5))
    timing = Timing(received=0.0, finished=17.0, waited_s=1.0, first_token_s=10.0, latency_s=17.0, freezes=freezes)
    origin = Origin(topic="t", partition=0, offset=0)
    result = Result(id="1", origin=origin, outcome=Outcome.COMPLETED, status=200, timing=timing)
    assert phases(result, 0.5) == {"first_token": 1.0, "frozen": 13.0, "decode": 2.0, "publish": 0.5}


@pytest.mark.parametrize("frozen", [False, True])
def test_whoever_is_left_with_a_model_that_can_not_be_loaded_is_told_so(serve, frozen):
    """It came during the drain before the load, or ran before its model was left."""

    async def test() -> None:
        engine = FakeEngine(step_s=0.1, broken_loads=frozenset() if frozen else frozenset({"qwen"}))
        async with serve(engine=engine) as s:
            if frozen:
                await engine.preload("qwen")
                asked = s.bus.produce(chat("llama", 100))
                await asyncio.sleep(2)
                s.bus.command(Switch(model="qwen", hold=1))
                await asyncio.sleep(0.5)
                engine.broken_loads = frozenset({"llama"})
            else:
                s.bus.produce(chat("llama", 50))
                await asyncio.sleep(1)
                s.bus.command(Switch(model="qwen", mode="drain", drain_timeout=60))
                await asyncio.sleep(0.5)
                asked = s.bus.produce(chat("qwen", 10))
            async with asyncio.timeout(600):
                result = await s.bus.result(asked)
            assert (result.outcome, result.failure) == (Outcome.FAILED, FailureClass.LOAD_FAILED)
            before = len(s.bus.statuses)
            await asyncio.sleep(600)
            assert [one for one in s.bus.statuses[before:] if one.kind == "switch"] == [], "nobody asks for it any more"

    in_virtual_time(test)
