"""A suspect is tried alone, but not at others' cost; and what dies while others take steps is nobody's doing."""

import pytest

from schemas.control import Switch
from schemas.results import Outcome
from schemas.status import StatusState
from service.errors import EngineDied
from service.models_file import Scheduling
from service.worker.jobs import Phase
from tests.support.bus import until
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine


def chat(model: str = "llama", text: str = "hello", **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


class Witnessing(FakeBus):
    """Keeps which runs were marked as alone when the engine died."""

    culprits: frozenset = frozenset()

    def engine_died(self) -> None:
        super().engine_died()
        self.culprits = frozenset(origin for origin, alone in self.marks.items() if alone) - self.settled.keys()


async def two_models(**more: float) -> FakeEngine:
    engine = FakeEngine(step_s=0.001, **more)
    await engine.preload("qwen")
    return engine


async def test_a_suspect_with_a_long_answer_does_not_stop_another_models_bound(serve):
    async with serve(engine=await two_models(), max_wait_s=0.5) as serving:
        bus = serving.bus
        suspect = bus.produce(chat(max_tokens=1_000_000), deaths=2)
        await bus.until(lambda: bus.marks.get(suspect))
        other = await bus.result(bus.produce(chat("qwen", max_tokens=2)))
        assert other.outcome is Outcome.COMPLETED
        assert other.timing.waited_s < 1.5
        assert suspect not in bus.settled


async def test_a_suspect_that_waits_for_its_trial_does_not_stop_another_models_bound(serve):
    async with serve(engine=await two_models(), max_wait_s=0.5) as serving:
        bus = serving.bus
        bus.produce(chat(max_tokens=1_000_000))
        await bus.until(lambda: bus.marks)
        bus.produce(chat(max_tokens=5), deaths=2)
        await until(lambda: any(job.phase is Phase.HELD for job in serving.worker.jobs))
        other = await bus.result(bus.produce(chat("qwen", max_tokens=2)))
        assert other.timing.waited_s < 1.5


async def test_a_suspect_is_not_blamed_for_a_death_among_what_a_switch_has_thawed(serve):
    bus = Witnessing()
    async with serve(bus=bus, engine=await two_models()) as serving:
        thawed = bus.produce(chat("qwen", max_tokens=1_000_000))
        await bus.until(lambda: thawed in bus.marks)
        bus.command(here := Switch(model="llama", hold="forever"))
        await bus.said(here.id, StatusState.COMPLETED)
        suspect = bus.produce(chat(max_tokens=1_000_000), deaths=2)
        await bus.until(lambda: bus.marks.get(suspect))
        bus.command(away := Switch(model="qwen", hold="forever"))
        await bus.said(away.id, StatusState.COMPLETED)
        await bus.until(lambda: bus.marks[suspect] is False)
        serving.engine.kill("one of the thawed")
        with pytest.raises(BaseExceptionGroup) as caught:
            await serving.done
        assert caught.group_contains(EngineDied)
        assert bus.culprits == set()


async def test_a_suspect_is_alone_again_when_its_model_is_back_and_blamed_for_what_it_does_then(serve):
    bus = Witnessing()
    async with serve(bus=bus, engine=await two_models()) as serving:
        suspect = bus.produce(chat(max_tokens=1_000_000), deaths=2)
        await bus.until(lambda: bus.marks.get(suspect))
        for model, alone in (("qwen", False), ("llama", True)):
            bus.command(switch := Switch(model=model, hold="forever"))
            await bus.said(switch.id, StatusState.COMPLETED)
            await bus.until(lambda alone=alone: bus.marks[suspect] is alone or None)
        serving.engine.kill()
        with pytest.raises(BaseExceptionGroup):
            await serving.done
        assert bus.culprits == {suspect}


async def test_whom_a_switch_is_paid_for_is_served_before_it_expires(serve):
    models = {"qwen": Scheduling(max_concurrency=1)}
    async with serve(engine=await two_models(), models=models, max_wait_s=1000, switching_share=1.0) as serving:
        bus = serving.bus
        for alias in ("llama", "qwen"):
            for _ in range(3):
                await bus.result(bus.produce(chat(alias, max_tokens=100)))
        bus.command(stay := Switch(model="llama", hold=0.3))
        await bus.said(stay.id, StatusState.COMPLETED)
        bus.produce(chat("llama", max_tokens=1_000_000))
        backlog = [bus.produce(chat("qwen", max_tokens=100)) for _ in range(30)]
        await until(lambda: len(serving.worker.scheduler.queues) >= 30)
        serving.worker.scheduler.costs._request_s.clear()  # as before the first answer: nothing is refused early
        urgent = bus.produce(chat("qwen", max_tokens=20), {"ttl": "1.5"})
        result = await bus.result(urgent)
        assert result.outcome is Outcome.COMPLETED
        assert sum(origin in bus.settled for origin in backlog) < 10
