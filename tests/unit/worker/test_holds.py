"""The operator's hand on the schedule: how long a switch stands, and how many of a model run at once."""

import asyncio
import time

import pytest

from schemas.control import Switch
from schemas.status import HoldInfo, Presence, StatusState
from service.models_file import Scheduling
from service.scheduling.scheduler import Context
from tests.support.bus import until
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine
from tests.support.virtual_time import virtual_time


def chat(model: str, **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


async def both_resident() -> FakeEngine:
    engine = FakeEngine(step_s=0.002)
    await engine.preload("qwen")
    return engine


def test_a_hold_of_seconds_keeps_other_models_waiting_for_so_long_and_no_longer(serve):
    async def ask() -> None:
        async with serve(engine=await both_resident()) as serving:
            bus = serving.bus
            bus.command(switch := Switch(model="llama", hold=0.5))
            await bus.said(switch.id, StatusState.NO_OP)
            timing = (await bus.result(bus.produce(chat("qwen")))).timing
            assert 0.3 < timing.waited_for["turn"] < 20, "one that does not end lasts the 60 s that any may wait"

    with virtual_time() as loop:
        loop.run_until_complete(ask())


@pytest.mark.parametrize(("seconds", "lost_s"), [(70.0, 0.005), (0.3, 0.003)])
def test_a_switch_is_taken_to_cost_what_is_not_prepared_beside_a_step_then(serve, seconds: float, lost_s: float):
    """A step of what goes on, and 5 ms at the most."""

    async def ask() -> None:
        async with serve(engine=await both_resident()) as serving:
            bus, scheduler = serving.bus, serving.worker.scheduler
            for _ in range(100):
                scheduler.costs.did("qwen", seconds=seconds, prompt=0, steps=100, rows=200)
            running = [bus.produce(chat("qwen", max_tokens=100_000)) for _ in range(2)]
            await bus.until(lambda: bus.marks.keys() >= set(running))
            for model in ("llama", "qwen"):
                bus.command(switch := Switch(model=model, hold=60.0))
                stall_s = (await bus.said(switch.id, StatusState.COMPLETED)).switch.stall_ms / 1e3
            loses_s = scheduler.view(time.monotonic(), [Context("qwen")]).models["qwen"].loses_s
            assert loses_s == pytest.approx(stall_s + lost_s, rel=0.01)

    with virtual_time() as loop:
        loop.run_until_complete(ask())


def test_where_inactive_models_are_refused_a_switch_stands_however_long_ago_it_was(serve):
    """The multi-model server's way: a model stays until the next switch."""

    async def ask() -> None:
        async with serve(engine=await both_resident(), inactive="refuse", hold_s=30.0) as serving:
            bus = serving.bus
            bus.command(switch := Switch(model="qwen"))
            await bus.said(switch.id, StatusState.COMPLETED)
            for _ in range(12):
                assert (await bus.result(bus.produce(chat("llama")))).status == 404
                assert (await bus.result(bus.produce(chat("qwen")))).status == 200
                await asyncio.sleep(20)
            assert serving.engine.active == "qwen"

    with virtual_time() as loop:
        loop.run_until_complete(ask())


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


async def test_a_hold_until_drained_stands_while_its_models_requests_are_unread_in_their_own_topic(serve):
    async with serve(engine=await both_resident()) as serving:
        bus = serving.bus
        running = bus.produce(chat("llama", max_tokens=100_000))
        await bus.until(lambda: running in bus.marks)
        bus.lag = {"requests.qwen": 1}
        bus.command(switch := Switch(model="qwen", hold="drained"))
        await bus.said(switch.id, StatusState.COMPLETED)
        told = len(bus.presences)
        await bus.until(lambda: len(bus.presences) > told + 3)
        assert [
            status.control_id for status in bus.statuses if status.kind == "switch" and status.model == "llama"
        ] == []
        late = bus.produce(chat("qwen"))
        await bus.result(late)
        assert serving.engine.active == "qwen"
        bus.lag = {}
        await bus.until(lambda: serving.engine.active == "llama")


@pytest.mark.parametrize(("ago_s", "stands"), [(0.0, True), (60.0, False)])
async def test_a_hold_that_was_asked_for_before_a_worker_started_stands_for_what_is_left_of_it(serve, ago_s, stands):
    asked = Switch(model="llama", hold=30.0, issued=time.time() - ago_s)
    bus = FakeBus()
    async with serve(engine=await both_resident(), bus=bus, desired=(asked,), park_after_s=0.05):
        origin = bus.produce(chat("qwen"))
        (record, *_) = await bus.until(lambda: bus.settled.get(origin))
        assert record.topic == ("requests.qwen" if stands else "results")


async def test_a_hold_of_a_model_that_there_is_not_holds_nothing(serve):
    """Anybody may have written the presence that a worker finds at its start."""
    asked = Switch(model="llama", hold="forever")
    forged = HoldInfo(model="nope", since=0.0, control_id=asked.id)
    bus = FakeBus()
    bus.presences.append(Presence(worker="w0", pool="gearshift", at=time.time(), interval_s=1, hold=forged))
    async with serve(engine=await both_resident(), bus=bus, desired=(asked,)) as serving:
        assert (await bus.result(bus.produce(chat("llama")))).status == 200
        assert serving.worker.switcher.hold_info().model == "llama"


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


# --- a hold is a value: it begins when the switch is done, ends once, and a failed switch changes nothing of it ---


def after(bus: FakeBus) -> FakeBus:
    """The same broker for the worker that comes next; what was said last is still there."""
    following = FakeBus(broker=bus.broker)
    following.presences = list(bus.presences)
    return following


def held(serving) -> str | None:
    info = serving.worker.presence.now().hold
    return None if info is None else info.model


def test_a_hold_begins_when_the_switch_is_done_not_when_it_is_asked(serve):
    async def ask() -> None:
        engine = FakeEngine(step_s=0.002, switch_s=0.6)
        async with serve(engine=engine) as serving:
            bus = serving.bus
            bus.command(switch := Switch(model="qwen", hold=0.5))
            done = await bus.said(switch.id, StatusState.COMPLETED)
            assert done.hold.model == "qwen"
            assert done.hold.since == pytest.approx(done.at, abs=0.1)
            assert done.hold.until == pytest.approx(done.at + 0.5, abs=0.1)
            assert held(serving) == "qwen"
            timing = (await bus.result(bus.produce(chat("llama")))).timing
            assert timing.waited_for["turn"] > 0.3
            assert held(serving) is None

    with virtual_time() as loop:
        loop.run_until_complete(ask())


@pytest.mark.parametrize("hold", ["forever", 1000.0])
async def test_a_failed_switch_leaves_the_hold_as_it_was(serve, hold):
    engine = FakeEngine(("llama", "qwen", "lynx"), broken_loads=frozenset({"lynx"}))
    async with serve(engine=engine) as serving:
        bus = serving.bus
        bus.command(first := Switch(model="qwen", hold=hold))
        before = (await bus.said(first.id, StatusState.COMPLETED)).hold
        bus.command(second := Switch(model="lynx", hold=5.0))
        await bus.said(second.id, StatusState.ROLLED_BACK)
        await until(lambda: not serving.worker.switcher.asked)
        assert serving.worker.presence.now().hold == before
        assert serving.worker.presence.now().obeyed == first.id


async def test_an_older_switch_that_fails_late_does_not_touch_a_newer_ones_hold(serve):
    engine = FakeEngine(("llama", "qwen", "lynx"), step_s=0.001, broken_loads=frozenset({"lynx"}))
    async with serve(engine=engine) as serving:
        bus = serving.bus
        bus.command(older := Switch(model="lynx", hold="forever"))
        bus.command(newer := Switch(model="qwen", hold="forever"))
        await bus.said(newer.id, StatusState.COMPLETED)
        await bus.said(older.id, StatusState.ROLLED_BACK)
        await until(lambda: not serving.worker.switcher.asked)
        assert held(serving) == "qwen"


async def test_a_hold_until_drained_ends_once_and_is_not_taken_up_by_later_requests(serve):
    async with serve(engine=await both_resident(), max_wait_s=0.5) as serving:
        bus = serving.bus
        bus.command(switch := Switch(model="llama", hold="drained"))
        await bus.said(switch.id, StatusState.NO_OP)
        await bus.result(bus.produce(chat("llama", max_tokens=5)))
        await until(lambda: held(serving) is None)
        later = [bus.produce(chat("llama", max_tokens=3000)) for _ in range(4)]
        await bus.until(lambda: later[0] in bus.marks)
        await bus.result(bus.produce(chat("qwen", max_tokens=2)))
        assert held(serving) is None
        assert not any(origin in bus.settled for origin in later)


async def test_what_is_unread_in_its_own_topic_belongs_to_what_is_to_be_drained(serve):
    bus = FakeBus()
    bus.lag = {"requests.llama": 3}
    async with serve(engine=await both_resident(), bus=bus) as serving:
        bus.command(switch := Switch(model="llama", hold="drained"))
        await bus.said(switch.id, StatusState.NO_OP)
        assert held(serving) == "llama"
        bus.lag = {}
        assert held(serving) is None


@pytest.mark.parametrize("hold", ["drained", 0.2])
async def test_a_hold_that_had_ended_does_not_come_back_at_a_start(serve, hold):
    bus, asked = FakeBus(), Switch(model="llama", hold=hold)
    async with serve(engine=await both_resident(), bus=bus) as first:
        bus.command(asked)
        await bus.said(asked.id, StatusState.NO_OP)
        await until(lambda: held(first) is None)
        await bus.until(lambda: bus.presences and bus.presences[-1].obeyed == asked.id)
        await bus.until(lambda: bus.presences[-1].hold is None)
        await first.finish()
    bus = after(bus)
    bus.lag = {"requests.llama": 100}
    async with serve(engine=await both_resident(), bus=bus, desired=(asked,)) as second:
        await bus.said(asked.id, StatusState.NO_OP)
        assert held(second) is None
        assert (await bus.result(bus.produce(chat("qwen")))).outcome == "completed"


async def test_a_worker_that_starts_again_in_the_middle_of_a_hold_keeps_what_is_left_since_its_completion(serve):
    bus, asked = FakeBus(), Switch(model="llama", hold=100.0, issued=time.time() - 99)
    async with serve(engine=await both_resident(), bus=bus) as first:
        bus.command(asked)
        said = (await bus.said(asked.id, StatusState.NO_OP)).hold
        await bus.until(lambda: bus.presences and bus.presences[-1].hold is not None)
        await first.finish()
    bus = after(bus)
    async with serve(engine=await both_resident(), bus=bus, desired=(asked,)) as second:
        await bus.said(asked.id, StatusState.NO_OP)
        assert second.worker.presence.now().hold == said, "not a second since it was asked was left"


async def test_a_worker_keeps_what_it_had_said_itself_before_what_others_say(serve):
    asked = Switch(model="llama", hold="drained")
    bus = FakeBus()
    presence = Presence(worker="w1", pool="gearshift", at=0, interval_s=3, obeyed=asked.id)
    hold = HoldInfo(model="llama", since=time.time(), drained=True, control_id=asked.id)
    bus.presences = [presence, presence.model_copy(update={"worker": "w2", "hold": hold})]
    bus.lag = {"requests.llama": 1}
    async with serve(engine=await both_resident(), bus=bus, desired=(asked,)) as serving:
        await bus.said(asked.id, StatusState.NO_OP)
        assert held(serving) is None
