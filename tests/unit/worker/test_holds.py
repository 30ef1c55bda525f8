"""The operator's hand on the schedule: how long a switch stands, and how many of a model run at once."""

import time

import pytest

from schemas.control import Switch
from schemas.status import StatusState
from service.models_file import Scheduling
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine


def chat(model: str, **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


async def both_resident() -> FakeEngine:
    engine = FakeEngine(step_s=0.002)
    await engine.preload("qwen")
    return engine


async def test_a_hold_of_seconds_keeps_other_models_waiting_for_so_long_and_no_longer(serve):
    async with serve(engine=await both_resident()) as serving:
        bus = serving.bus
        bus.command(switch := Switch(model="llama", hold=0.5))
        await bus.said(switch.id, StatusState.NO_OP)
        timing = (await bus.result(bus.produce(chat("qwen")))).timing
        assert 0.3 < timing.waited_for["turn"] < 0.5 + 1.0


async def test_a_hold_until_drained_ends_with_the_last_request_of_its_model(serve):
    async with serve(engine=await both_resident()) as serving:
        bus = serving.bus
        held = [bus.produce(chat("llama", max_tokens=tokens)) for tokens in (10, 200)]
        await bus.until(lambda: held[1] in bus.marks)
        bus.command(switch := Switch(model="llama", hold="drained"))
        await bus.said(switch.id, StatusState.NO_OP)
        other = bus.produce(chat("qwen"))
        await bus.result(other)
        assert list(bus.settled) == [*held, other]
        assert (await bus.result(held[1])).timing.freezes == ()


@pytest.mark.parametrize(("ago_s", "stands"), [(0.0, True), (60.0, False)])
async def test_a_hold_that_was_asked_for_before_a_worker_started_stands_for_what_is_left_of_it(serve, ago_s, stands):
    asked = Switch(model="llama", hold=30.0, issued=time.time() - ago_s)
    bus = FakeBus()
    async with serve(engine=await both_resident(), bus=bus, desired=(asked,), park_after_s=0.05):
        origin = bus.produce(chat("qwen"))
        (record, *_) = await bus.until(lambda: bus.settled.get(origin))
        assert record.topic == ("requests.qwen" if stands else "results")


async def test_no_more_of_a_model_run_at_once_than_models_yaml_allows(serve):
    models = {"llama": Scheduling(max_concurrency=2)}
    async with serve(engine=FakeEngine(step_s=0.002), models=models) as serving:
        bus, dispatcher = serving.bus, serving.worker.dispatcher
        origins = [bus.produce(chat("llama", max_tokens=100_000)) for _ in range(6)]

        def running() -> tuple[int, int]:
            info = serving.worker.inspection.queues().get("llama")
            return (0, 0) if info is None else (info.running, info.waiting)

        await bus.until(lambda: running() == (2, 4))
        dispatcher.reschedule({"llama": Scheduling(max_concurrency=5)})
        await bus.until(lambda: running() == (5, 1))
        assert not any(origin in bus.settled for origin in origins)
