"""A model that was put to sleep has no turn: whoever asks for it waits for a wake, and nobody else waits for that."""

from schemas.control import Sleep, Wake
from schemas.results import Outcome
from schemas.status import StatusState
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine


def chat(model: str, **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


async def test_no_turn_is_spent_on_a_model_that_sleeps_and_it_is_served_when_it_is_woken(serve) -> None:
    engine = FakeEngine(step_s=0.002)
    await engine.preload("qwen")
    async with serve(engine=engine) as serving:
        bus: FakeBus = serving.bus
        bus.command(sleep := Sleep(model="qwen"))
        await bus.said(sleep.id, StatusState.COMPLETED)
        waiting = bus.produce(chat("qwen"))
        for origin in [bus.produce(chat("llama")) for _ in range(300)]:
            assert (await bus.result(origin)).outcome is Outcome.COMPLETED
        assert not [status for status in bus.statuses if status.kind == "switch"]
        assert waiting not in bus.settled
        queue = await bus.until(lambda: bus.presences[-1].queues.get("qwen"))
        assert (serving.engine.active, queue.paused) == ("llama", False)
        bus.command(wake := Wake(model="qwen"))
        await bus.said(wake.id, StatusState.COMPLETED)
        assert (await bus.result(waiting)).outcome is Outcome.COMPLETED


async def test_a_sleeping_model_that_is_dropped_is_served_like_any_other_one(serve) -> None:
    engine = FakeEngine(step_s=0.002)
    async with serve(engine=engine) as serving:
        bus: FakeBus = serving.bus
        bus.command(sleep := Sleep(model="qwen"))
        await bus.said(sleep.id, StatusState.COMPLETED)
        await engine.drop("qwen")  # as whatever makes room does
        assert (await bus.result(bus.produce(chat("qwen")))).outcome is Outcome.COMPLETED


async def test_what_waits_for_an_active_model_that_sleeps_or_was_running_on_it_is_no_stall(serve) -> None:
    engine = FakeEngine(step_s=0.002)
    async with serve(engine=engine, stall_after_s=0.5, exit_after_stall_s=1.5) as serving:
        bus: FakeBus = serving.bus
        running = bus.produce(chat("llama", max_tokens=3000))
        job = await bus.until(lambda: serving.worker.jobs.at(running))
        await bus.until(lambda: serving.engine.tokens(job.call_id) > 5)
        bus.command(sleep := Sleep(level=1))
        await bus.said(sleep.id, StatusState.COMPLETED)
        waiting = bus.produce(chat("llama"))
        told = len(bus.presences)
        await bus.until(lambda: len(bus.presences) > told + 40)
        assert "unhealthy" not in {presence.state for presence in bus.presences}
        bus.command(wake := Wake())
        await bus.said(wake.id, StatusState.COMPLETED)
        for origin in (waiting, running):
            assert (await bus.result(origin)).outcome is Outcome.COMPLETED
