"""Where contexts are kept: the next one is brought in early, idle ones are put away, and costs outlive a worker."""

import time

from schemas.contexts import ContextInfo, Tier
from schemas.status import Presence
from service.models_file import Scheduling
from service.scheduling.costs import Costs
from service.scheduling.memory import Move
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine
from tests.support.virtual_time import virtual_time


def chat(model: str = "llama", **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


def presence(costs: Costs) -> Presence:
    return Presence(worker="before", pool="gearshift", at=time.time(), interval_s=3.0, costs=costs.export())


def seen(bus: FakeBus, alias: str) -> ContextInfo | None:
    """A context as the worker's latest presence shows it."""
    contexts = bus.presences[-1].contexts if bus.presences else ()
    return next((info for info in contexts if info.alias == alias), None)


def test_the_next_model_is_resident_before_it_is_switched_to(serve):
    async def ask() -> None:
        known = Costs()
        for _ in range(5):
            known.switched(None, "qwen", Tier.PARKED, 0.05)
        engine = FakeEngine(step_s=0.001)
        bus = FakeBus()
        bus.presences.append(presence(known))
        await engine.preload("qwen")
        await engine.park("qwen")
        async with serve(engine=engine, bus=bus):
            long = bus.produce(chat(max_tokens=100_000))
            await bus.until(lambda: long in bus.marks)
            await bus.result(bus.produce(chat("qwen", max_tokens=5)))
            switches = [status.switch for status in bus.statuses if status.switch and status.state == "completed"]
            assert switches[0].to_model == "qwen"
            assert switches[0].tier_found is Tier.RESIDENT
            assert engine.expected[0] in {"llama", "qwen"}

    with virtual_time() as loop:
        loop.run_until_complete(ask())


async def test_a_worker_begins_with_the_costs_that_another_one_measured(serve):
    known = Costs()
    known.switched("llama", "qwen", Tier.DROPPED, 7.5)
    bus = FakeBus()
    bus.presences.append(presence(known))
    async with serve(bus=bus) as serving:
        await bus.until(lambda: (bus.presences[-1].worker, bus.presences[-1].state) == ("w1", "serving"))
        assert serving.worker.scheduler.costs.switch("llama", "qwen", Tier.DROPPED).mean == 7.5


def test_a_context_that_nobody_asks_for_is_parked_and_later_dropped(serve):
    async def ask() -> None:
        engine = FakeEngine()
        await engine.preload("qwen")
        models = {"llama": Scheduling(idle_ttl=0.1), "qwen": Scheduling(idle_ttl=0.1, drop_ttl=1.5)}
        async with serve(engine=engine, models=models) as serving:
            bus = serving.bus
            await bus.until(lambda: (info := seen(bus, "qwen")) is not None and info.tier is Tier.PARKED)
            await bus.until(lambda: (info := seen(bus, "qwen")) is not None and info.tier is Tier.DROPPED)
            assert seen(bus, "llama").tier is Tier.RESIDENT

    with virtual_time() as loop:
        loop.run_until_complete(ask())


async def test_a_pinned_context_stays_however_long_nobody_asks_for_it(serve):
    engine = FakeEngine(aliases=("llama", "qwen", "lynx"))
    for alias in ("qwen", "lynx"):
        await engine.preload(alias)
    await engine.pin("qwen", True)
    models = {alias: Scheduling(idle_ttl=0.1) for alias in engine.aliases}
    async with serve(engine=engine, models=models) as serving:
        bus = serving.bus
        await bus.until(lambda: (info := seen(bus, "lynx")) is not None and info.tier is Tier.PARKED)
        assert seen(bus, "qwen").tier is Tier.RESIDENT


async def test_tenants_share_a_queue_by_their_weights(serve):
    async with serve(engine=FakeEngine(step_s=0.001), max_running=1, tenant_weights="gold=3,tin=1") as serving:
        bus = serving.bus
        first = bus.produce(chat(max_tokens=200))
        await bus.until(lambda: first in bus.marks)
        origins = {}
        for n in range(12):
            for tenant in ("tin", "gold"):
                headers = {"ce_id": f"{tenant}{n}", "tenant": tenant}
                origins[bus.produce(chat(max_tokens=5), headers)] = tenant
        for origin in origins:
            await bus.result(origin)
        early = [origins[origin] for origin in bus.settled if origin in origins][:8]
        assert early.count("gold") == 6


async def test_a_model_with_short_turns_only_is_not_idle(serve):
    models = {"qwen": Scheduling(idle_ttl=60.0)}
    async with serve(models=models) as serving:
        tiering, bus = serving.worker.tiering, serving.bus
        now = time.monotonic()
        assert tiering.overdue(now) == ()
        await bus.result(bus.produce(chat("qwen")))
        await bus.result(bus.produce(chat("llama")))
        last = time.monotonic()
        assert tiering.overdue(now + 60.0) == ()
        assert tiering.overdue(last + 60.0) == (Move("qwen", Tier.PARKED),)
