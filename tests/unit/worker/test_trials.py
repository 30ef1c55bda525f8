"""A suspect is tried alone, but not at others' cost; and what dies while others take steps is nobody's doing."""

import asyncio
import time
from typing import Any

import pytest
from aiokafka import TopicPartition

from schemas.base import Origin
from schemas.contexts import ContextInfo, SwitchReport, Tier
from schemas.control import Pause, Preload, Switch
from schemas.results import Outcome
from schemas.status import StatusState
from service.errors import EngineDied
from service.models_file import Scheduling
from service.worker.jobs import Phase, Why
from tests.support.bus import until
from tests.support.fake_bus import FakeBus, SlowMarks
from tests.support.fake_engine import POISON, FakeEngine
from tests.support.virtual_time import virtual_time
from tests.unit.worker.test_suspects import job

PARTITION = TopicPartition("requests", 0)


def chat(model: str = "llama", text: str = "hello", **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


class SlowPreload(FakeEngine):
    """Bringing a model in takes for ever."""

    def __init__(self, **more: float) -> None:
        super().__init__(**more)
        self.loading = asyncio.Event()

    async def preload(self, alias: str, *, stall: bool = True) -> ContextInfo:
        self.loading.set()
        await self.died()
        return await super().preload(alias, stall=stall)


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
        assert suspect not in bus.settled, "the other one's turn came although this one has not ended"


async def test_a_suspect_waits_quietly_for_the_end_of_a_switch_to_its_model(serve):
    async with serve(engine=await two_models(switch_s=0.3)) as serving:
        bus = serving.bus
        bus.command(switch := Switch(model="qwen"))
        await bus.said(switch.id, StatusState.SWITCHING)
        suspect = bus.produce(chat("qwen", max_tokens=2), deaths=2)
        assert (await bus.result(suspect)).outcome is Outcome.COMPLETED
        assert len(bus.withdrawn) < 3, "it was not started over and over meanwhile"


async def test_a_suspect_that_waits_for_its_trial_does_not_stop_another_models_bound(serve):
    async with serve(engine=await two_models(), max_wait_s=0.5) as serving:
        bus = serving.bus
        running = bus.produce(chat(max_tokens=1_000_000))
        await bus.until(lambda: bus.marks)
        bus.produce(chat(max_tokens=5), deaths=2)
        await until(lambda: any(job.phase is Phase.HELD for job in serving.worker.jobs))
        other = await bus.result(bus.produce(chat("qwen", max_tokens=2)))
        assert other.outcome is Outcome.COMPLETED
        assert running not in bus.settled, "the other one's turn came although this one has not ended"


async def test_a_suspect_is_not_blamed_for_a_death_among_what_a_switch_has_thawed(serve):
    bus = FakeBus()
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
        assert bus.culprit is None


async def test_a_suspect_is_alone_again_when_its_model_is_back_and_blamed_for_what_it_does_then(serve):
    bus = FakeBus()
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
        assert bus.culprit == suspect


async def test_who_would_have_started_after_a_death_is_not_blamed_for_it(serve):
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus = serving.bus
        poison = bus.produce(chat(text=POISON), deaths=2)
        innocents = [bus.produce(chat(), deaths=2), bus.produce(chat(), deaths=1), bus.produce(chat())]
        await died(serving)
        assert bus.culprit == poison
        assert not bus.marks.keys() & set(innocents)
        committed = bus.broker.ledger(PARTITION)
        assert [committed.marks.get(innocent.offset, 0) for innocent in innocents] == [2, 1, 0]


class LateMarks(FakeBus):
    """Marks that must be committed take longer than a short turn."""

    async def started(self, origin: Origin, *, alone: bool = False) -> bool:
        ours = await super().started(origin, alone=alone)
        if alone:
            await asyncio.sleep(0.2)
        return ours


class Eager(FakeEngine):
    """What a switch thaws goes on before the switch has returned, as in a process of its own."""

    async def switch(self, alias: str, **how: Any) -> SwitchReport:
        report = await super().switch(alias, **how)
        await asyncio.sleep(0.02)
        return report


async def test_a_poisonous_prompt_is_found_though_turns_are_shorter_than_a_commit(serve):
    bus, engine = LateMarks(), Eager(step_s=0.001)
    await engine.preload("qwen")
    async with serve(bus=bus, engine=engine, switching_share=1.0) as serving:
        busy = [bus.produce(chat("qwen", max_tokens=1_000_000)) for _ in range(3)]
        await bus.until(lambda: bus.marks.keys() >= set(busy))
        poison = bus.produce(chat(text=POISON), deaths=2)
        await died(serving)
        assert bus.culprit == poison


async def test_a_suspect_whose_turn_was_over_before_it_could_begin_waits_for_the_next_one(serve):
    bus = SlowMarks()
    async with serve(bus=bus, engine=await two_models()) as serving:
        suspect = bus.produce(chat(max_tokens=2), deaths=2)
        await bus.until(lambda: suspect in bus.marks)
        for model in ("qwen", "llama"):
            bus.command(switch := Switch(model=model, hold="forever"))
            await bus.said(switch.id, StatusState.COMPLETED)
            bus.committed.set()
            if model == "qwen":
                await until(lambda: suspect in bus.withdrawn)
                assert next(iter(serving.worker.jobs)).phase is Phase.WAITING
        result = await bus.result(suspect)
        assert (result.outcome, result.attempt.n) == (Outcome.COMPLETED, 3)  # after the two that it died in


class SlowCommits(SlowMarks):
    """So does it for all that is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.flushing, self.flushes = asyncio.Event(), asyncio.Event()

    async def flush(self) -> None:
        self.flushing.set()
        await self.flushes.wait()
        await super().flush()


@pytest.mark.parametrize("by", ["operator", "scheduler"])
async def test_a_suspect_does_not_begin_beside_a_switch_that_waits_for_a_commit(serve, by):
    bus = SlowCommits()
    async with serve(bus=bus, engine=await two_models(), max_wait_s=0.2) as serving:
        suspect = bus.produce(chat(text=POISON), deaths=2)
        await bus.until(lambda: suspect in bus.marks)
        if by == "operator":
            bus.command(Switch(model="qwen", hold=0))
        else:
            bus.produce(chat("qwen", max_tokens=2))
        await bus.flushing.wait()
        bus.committed.set()
        try:
            await until(lambda: suspect in bus.withdrawn)
            assert len(bus.withdrawn) < 3, "it was not started over and over meanwhile"
        finally:
            bus.flushes.set()
        await died(serving)
        assert bus.culprit == suspect


async def test_the_death_of_a_switch_is_not_the_doing_of_the_suspect_that_it_froze(serve):
    async with serve(engine=await two_models(switch_s=10)) as serving:
        bus = serving.bus
        suspect = bus.produce(chat(max_tokens=1_000_000), deaths=2)
        await bus.until(lambda: bus.marks.get(suspect))
        bus.command(away := Switch(model="qwen"))
        await bus.said(away.id, StatusState.SWITCHING)
        serving.engine.kill("the load")
        await died(serving)
        assert bus.culprit is None
        assert bus.marks[suspect] is False
        assert bus.broker.ledger(PARTITION).evidence(suspect.offset) == 0


@pytest.mark.parametrize("by", ["operator", "scheduler"])
async def test_that_a_suspect_gets_company_is_committed_before_a_switch_begins(serve, by):
    async with serve(engine=await two_models(switch_s=10), max_wait_s=0.2) as serving:
        bus = serving.bus
        suspect = bus.produce(chat(max_tokens=1_000_000), deaths=2)
        await bus.until(lambda: bus.marks.get(suspect))
        await bus.flush()
        assert bus.broker.ledger(PARTITION).evidence(suspect.offset) == 1
        if by == "operator":
            bus.command(Switch(model="qwen"))
        else:
            bus.produce(chat("qwen"))
        await bus.until(lambda: any(status.state is StatusState.SWITCHING for status in bus.statuses))
        assert bus.broker.ledger(PARTITION).evidence(suspect.offset) == 0


async def test_a_suspect_has_the_engine_while_nothing_else_runs_of_its_model(serve):
    async with serve() as serving:
        runs, suspect, other = serving.worker.lifecycle.runs, job(1, deaths=2), job(2)
        seen = []
        for change in (runs.add, runs.remove):
            for one in (suspect, other) if change == runs.add else (other, suspect):
                change(one)
                seen.append(suspect.alone)
        assert seen == [True, False, True, False]


@pytest.mark.parametrize("lost", [True, False])
async def test_a_run_that_is_lost_marks_nothing_any_more(serve, lost):
    async with serve() as serving:
        runs, suspect = serving.worker.lifecycle.runs, job(1, deaths=2)
        runs.add(suspect)
        suspect.phase, suspect.task = Phase.RUNNING, asyncio.current_task()
        suspect.ending = Why.LOST if lost else None
        async with runs.company():
            assert serving.bus.marks == ({} if lost else {suspect.origin: False})


async def test_a_death_while_a_model_is_brought_in_is_not_a_suspects_doing(serve):
    async with serve(engine=SlowPreload(step_s=0.001)) as serving:
        bus = serving.bus
        suspect = bus.produce(chat(max_tokens=1_000_000), deaths=2)
        await bus.until(lambda: bus.marks.get(suspect))
        bus.command(Preload(model="qwen"))
        await serving.engine.loading.wait()
        assert bus.marks[suspect] is False
        serving.engine.kill("out of memory")
        await died(serving)
        assert bus.culprit is None


@pytest.mark.parametrize(("deaths", "found"), [(0, Tier.RESIDENT), (2, Tier.PARKED)])
async def test_nothing_is_brought_in_beside_a_suspect_whose_death_would_say_nothing_then(serve, deaths, found):
    engine = await two_models()
    await engine.park("qwen")
    async with serve(engine=engine) as serving:
        bus = serving.bus
        for _ in range(5):
            serving.worker.scheduler.costs.switched(None, "qwen", Tier.PARKED, 1.0)
        running = bus.produce(chat(max_tokens=1_000_000), deaths=deaths)
        await bus.until(lambda: running in bus.marks)
        await bus.result(bus.produce(chat("qwen", max_tokens=5)))
        switches = [status.switch for status in bus.statuses if status.switch and status.state == "completed"]
        assert (switches[0].to_model, switches[0].tier_found) == ("qwen", found)


async def test_whom_the_engine_never_got_is_not_blamed_for_its_death(serve):
    bus = SlowMarks()
    async with serve(bus=bus, engine=FakeEngine(step_s=0.001)) as serving:
        suspect = bus.produce(chat(), deaths=2)
        await bus.until(lambda: bus.marks.get(suspect))
        serving.engine.kill()
        await died(serving)
        assert bus.culprit is None
        assert bus.broker.ledger(PARTITION).marks[suspect.offset] == 2


@pytest.mark.parametrize("lost", [True, False])
async def test_a_job_that_ends_before_its_run_begins_leaves_no_mark(serve, lost):
    """One that is lost may be here again, as another job: a mark would say that this one has begun."""
    async with serve(engine=FakeEngine(step_s=0.001)) as serving:
        bus, lifecycle = serving.bus, serving.worker.lifecycle
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        origin = bus.produce(chat(), deaths=2)
        await until(lambda: len(serving.worker.jobs) == 1)
        (job,) = serving.worker.jobs
        lifecycle.start("llama", time.monotonic())
        if lost:
            lifecycle.lose(origin)
        else:
            lifecycle.end(job, Why.CANCELLED)
        await asyncio.wait({job.task})
        assert (bus.marks, job.phase) == ({}, Phase.SETTLING)


class TakenAway(FakeBus):
    """The group gives a suspect's partition to somebody else while the mark of its run is being written.

    Reading hears of that a little later.
    """

    async def started(self, origin: Origin, *, alone: bool = False) -> bool:
        if alone:
            self._assigned = frozenset()
            self.member.assign(())
        return await super().started(origin, alone=alone)


async def test_what_is_another_workers_by_the_time_it_is_marked_does_not_begin(serve):
    """What it did here, a death above all, could be written down nowhere: a poison would be found one death later."""
    async with serve(bus=TakenAway(), engine=FakeEngine(step_s=0.001)) as serving:
        bus, lifecycle = serving.bus, serving.worker.lifecycle
        bus.command(pause := Pause())
        await bus.said(pause.id, StatusState.COMPLETED)
        bus.produce(chat(text=POISON), deaths=2)
        await until(lambda: len(serving.worker.jobs) == 1)
        (job,) = serving.worker.jobs
        lifecycle.start("llama", time.monotonic())
        await asyncio.wait({job.task})
        assert (lifecycle.runs.dead, job.ending, job.phase) == (False, Why.LOST, Phase.SETTLING)
        assert not serving.worker.jobs


async def died(serving) -> None:
    """The worker has ended because its engine died."""
    with pytest.raises(BaseExceptionGroup) as caught:
        await serving.done
    assert caught.group_contains(EngineDied)


def test_whom_a_switch_is_paid_for_is_served_before_it_expires(serve):
    async def ask() -> None:
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

    with virtual_time() as loop:
        loop.run_until_complete(ask())
