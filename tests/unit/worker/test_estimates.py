"""What is known of a request that waits: its place, an estimate, and whether it is worth waiting for at all."""

import asyncio
import math
import random
import statistics
import time

import pytest

from schemas.base import Origin
from schemas.contexts import Tier
from schemas.control import Pause, Query, Switch
from schemas.objectives import Objective
from schemas.results import Outcome
from schemas.status import Presence, StatusState
from service.models_file import Scheduling
from service.worker.outlook import Expected
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine
from tests.support.virtual_time import virtual_time


def chat(model: str = "llama", **more: object) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


async def ask(bus: FakeBus, request: str) -> dict:
    """Where it stands; nothing while it has not been read."""
    bus.command(query := Query(request=request))
    found = (await bus.said(query.id, StatusState.COMPLETED)).answer["found"]
    return found[0] if found else {}


async def test_a_waiting_request_can_be_asked_for_its_place_and_an_estimate(serve):
    async with serve(engine=FakeEngine(step_s=0.002), max_running=1) as serving:
        bus = serving.bus
        first = bus.produce(chat(max_tokens=50))
        await bus.result(first)
        running = bus.produce(chat(max_tokens=100_000))
        waiting = [bus.produce(chat(), {"ce_id": f"w{n}"}) for n in range(3)]
        await bus.until(lambda: running in bus.marks)
        bus.command(asked := Query(request="w2"))
        answer = (await bus.said(asked.id, StatusState.COMPLETED)).answer
        (place,) = answer["found"]
        assert (place["phase"], place["position"]) == ("waiting", 2)
        assert place["expected_s"] > 0
        assert not any(origin in bus.settled for origin in waiting)


@pytest.mark.parametrize("whose", ["request", "worker"])
def test_a_deadline_that_can_not_be_met_is_refused_at_once_whoever_gave_it(serve, whose):
    """A worker's time to live counts in its schedule, too."""
    asked, given = ({"ttl": "20"}, {}) if whose == "request" else ({}, {"ttl_s": 20})

    async def ask() -> None:
        async with serve(engine=FakeEngine(step_s=0.005), max_running=1, **given) as serving:
            bus = serving.bus
            for origin in [bus.produce(chat(max_tokens=100)) for _ in range(16)]:
                await bus.result(origin)
            bus.command(pause := Pause())
            await bus.said(pause.id, StatusState.COMPLETED)
            for _ in range(200):
                bus.produce(chat(max_tokens=100))
            result = await bus.result(bus.produce(chat(max_tokens=100), asked))
            assert result.outcome is Outcome.EXPIRED
            assert "can't be met" in result.error.message
            assert result.timing.latency_s < 10
            view = serving.worker.scheduler.queues.view("llama")
            assert (view.undated == 0, view.nearest_deadline < math.inf) == (bool(given),) * 2

    with virtual_time() as loop:
        loop.run_until_complete(ask())


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_nobody_is_refused_by_what_another_worker_says_that_it_has_seen(serve, model):
    """Whoever may write a presence could refuse every request that has a deadline: here one that says 30 years."""

    async def ask() -> None:
        slow = {"pace": [[1e9, 0, 9], [1e9, 0, 9], [1e-9, 0, 9]], **{tier: [1e9, 0, 9] for tier in Tier}}
        forged = Presence(
            worker="w0",
            pool="gearshift",
            at=time.time(),
            interval_s=3.0,
            costs={"models": {"llama": slow, "qwen": slow}},
        )
        bus = FakeBus()
        bus.presences.append(forged)
        async with serve(engine=FakeEngine(step_s=0.001), bus=bus, max_running=1) as serving:
            for origin in [bus.produce(chat(max_tokens=100)) for _ in range(50)]:
                await bus.result(origin)
            assert serving.worker.scheduler.costs.pace("llama").most_requests_s < math.inf
            result = await bus.result(bus.produce(chat(model), {"ttl": "600"}))
            assert result.outcome is Outcome.COMPLETED

    with virtual_time() as loop:
        loop.run_until_complete(ask())


async def test_who_was_alone_tells_nothing_of_a_full_batch_and_nobody_is_refused_by_it(serve):
    """One request at a time says that a hundred take a hundred times as long: they are answered together."""
    async with serve(engine=FakeEngine(step_s=0.005), max_running=50) as serving:
        bus = serving.bus
        for _ in range(3):
            await bus.result(bus.produce(chat(max_tokens=100)))
        crowd = [bus.produce(chat(max_tokens=100), {"ttl": "20"}) for _ in range(100)]
        assert {(await bus.result(origin)).outcome for origin in crowd} == {Outcome.COMPLETED}


def test_those_that_are_tried_one_after_the_other_tell_nothing_of_a_full_batch(serve) -> None:
    """A hundred wait behind them, and are answered together."""

    async def ask() -> None:
        async with serve(engine=FakeEngine(step_s=0.01), max_running=50) as serving:
            bus = serving.bus
            suspects = [bus.produce(chat(max_tokens=50), deaths=2) for _ in range(20)]
            await bus.until(lambda: suspects[0] in bus.marks)
            crowd = [bus.produce(chat(max_tokens=50)) for _ in range(100)]
            for origin in suspects:
                await bus.result(origin)
            dated = bus.produce(chat(max_tokens=50), {"ttl": "15"})
            assert {(await bus.result(origin)).outcome for origin in (*crowd, dated)} == {Outcome.COMPLETED}

    with virtual_time() as loop:
        loop.run_until_complete(ask())


def test_what_is_expected_of_what_runs_and_waits_is_what_happens(serve):
    """Two at a time, of two models: their first tokens and their ends, as they were expected in the middle of it."""

    async def ask() -> None:
        async with serve(engine=FakeEngine(step_s=0.016), max_running=2) as serving:
            bus, worker = serving.bus, serving.worker
            for model in ("llama", "qwen", "llama", "qwen"):
                await bus.result(bus.produce(chat(model, max_tokens=40)))
            asked = [bus.produce(chat("qwen" if n % 3 == 0 else "llama", max_tokens=30 + 10 * n)) for n in range(9)]
            await bus.until(lambda: len(worker.jobs) == len(asked) and len(bus.marks) >= 2)
            prospects, at = worker.outlook.look(), time.time()
            expected = {job.origin: prospects.of(job) for job in worker.jobs}
            off = []
            for origin in asked:
                timing = (await bus.result(origin)).timing
                first_s = timing.received + timing.waited_s + timing.first_token_s - at
                end_s = timing.finished - at
                off.append(abs(expected[origin].end_s / end_s - 1))
                if first_s > 0.05:
                    off.append(abs(expected[origin].first_token_s / first_s - 1))
                assert expected[origin].turn_s <= expected[origin].start_s <= expected[origin].first_token_s
            assert len(off) > len(asked)
            assert statistics.median(off) < 0.06
            assert max(off) < 0.2

    with virtual_time() as loop:
        loop.run_until_complete(ask())


def test_the_portions_in_which_prompts_are_begun_are_expected_to_come_one_after_the_other(serve):
    """Twenty with an objective, for whom there is room at once: they begin two at a time."""
    hurried = {"llama": Scheduling(objective=Objective(ttft_s=600.0, tpot_s=0.02))}

    async def ask() -> None:
        async with serve(engine=FakeEngine(step_s=0.01), models=hurried, max_running=64) as serving:
            bus, worker = serving.bus, serving.worker
            body = chat(messages=[{"role": "user", "content": "so " * 2000}], max_tokens=400)
            asked = [bus.produce(body) for _ in range(21)]
            await bus.until(lambda: len(worker.jobs) == len(asked) and len(bus.marks) >= 1)
            prospects, at = worker.outlook.look(), time.time()
            expected = {job.origin: prospects.of(job) for job in worker.jobs}
            starts, off = [], []
            for origin in asked:
                timing = (await bus.result(origin)).timing
                starts.append(timing.received + timing.waited_s - at)
                off.append(abs(expected[origin].start_s - max(0.0, starts[-1])))
            assert max(starts) > 1.0
            assert max(off) < 0.1 * max(starts), (off, starts)

    with virtual_time() as loop:
        loop.run_until_complete(ask())


@pytest.mark.parametrize("rate", [15.0, 35.0], ids=["most in time", "too many"])
def test_what_is_expected_where_requests_have_objectives_is_what_happens(serve, rate: float):
    """Three models, whose turns change with what each has left to meet; who is late is served behind all others."""
    aliases = ("llama", "qwen", "lynx")
    models = {alias: Scheduling(objective=Objective(ttft_s=1.0, tpot_s=0.05)) for alias in aliases}
    errors: dict[str, list[float]] = {"first": [], "end": []}

    async def ask(dice: random.Random) -> None:
        engine = FakeEngine(aliases, step_s=0.01, prompt_steps=1, switch_s=0.003)
        async with serve(engine=engine, models=models, max_running=16) as serving:
            bus, worker = serving.bus, serving.worker
            for origin in [bus.produce(chat(alias, max_tokens=50)) for alias in aliases for _ in range(32)]:
                await bus.result(origin)
            guesses: list[tuple[Origin, float, Expected]] = []

            async def guess() -> None:
                while True:
                    await asyncio.sleep(0.1)
                    prospects, now = worker.outlook.look(), time.time()
                    expected = ((job.origin, now, prospects.of(job)) for job in worker.jobs)
                    guesses.extend((origin, at, each) for origin, at, each in expected if each is not None)

            guessing = asyncio.create_task(guess())
            asked = []
            for _ in range(200):
                await asyncio.sleep(dice.expovariate(rate))
                alias = dice.choices(aliases, [3, 2, 1])[0]
                asked.append(bus.produce(chat(alias, max_tokens=dice.randint(10, 120))))
            timings = {origin: (await bus.result(origin)).timing for origin in asked}
            guessing.cancel()
            for origin, at, expected in guesses:
                timing = timings[origin]
                first_at = timing.received + timing.waited_s + timing.first_token_s
                for what, seconds, then in (
                    ("first", expected.first_token_s, first_at),
                    ("end", expected.end_s, timing.finished),
                ):
                    if then > at + 0.05:
                        errors[what].append(abs(seconds / (then - at) - 1))

    for seed in range(2):
        with virtual_time() as loop:
            loop.run_until_complete(ask(random.Random(seed)))
    medians = {what: statistics.median(found) for what, found in errors.items()}
    assert max(medians.values()) < 0.25, medians


def test_a_first_token_that_takes_longer_than_usual_is_still_expected(serve):
    async def run() -> None:
        async with serve(engine=FakeEngine(step_s=0.01, prompt_steps=100)) as serving:
            bus, worker = serving.bus, serving.worker
            asked = bus.produce(chat(max_tokens=5))
            await bus.until(lambda: asked in bus.marks)
            await asyncio.sleep(0.5)
            (job,) = worker.jobs
            assert (worker.inspection.tokens(), job.started is None) == (0, False)
            expected = worker.outlook.look().of(job)
            assert 0 < expected.first_token_s <= expected.end_s

    with virtual_time() as loop:
        loop.run_until_complete(run())


def test_of_one_that_runs_the_rest_is_expected_and_no_place_is_told(serve):
    async def run() -> None:
        async with serve(engine=FakeEngine(step_s=0.004)) as serving:
            bus, worker = serving.bus, serving.worker
            await bus.result(bus.produce(chat(max_tokens=40)))
            bus.produce(chat(max_tokens=500), {"ce_id": "long"})

            await bus.until(lambda: worker.inspection.tokens() >= 5)
            early = await ask(bus, "long")
            await bus.until(lambda: worker.inspection.tokens() >= 400)
            late = await ask(bus, "long")
            assert 1.0 < early["end_s"] < 5
            assert late["end_s"] < 0.4 * early["end_s"]
            assert "position" not in early

    with virtual_time() as loop:
        loop.run_until_complete(run())


def test_a_turn_that_lasts_until_all_is_done_lasts_as_long_as_a_thin_batch_takes(serve):
    """Eight at a time have shown how fast a full batch is: the one that runs now is not eight times as fast."""

    async def run() -> None:
        async with serve(engine=FakeEngine(step_s=0.004), max_running=8) as serving:
            bus, worker = serving.bus, serving.worker
            for model in ("llama", "qwen"):
                for origin in [bus.produce(chat(model, max_tokens=100)) for _ in range(16)]:
                    await bus.result(origin)
            running = bus.produce(chat(max_tokens=800))
            await bus.until(lambda: running in bus.marks)
            bus.command(hold := Switch(model="llama", hold="drained"))
            await bus.said(hold.id, StatusState.NO_OP)
            bus.produce(chat("qwen"), {"ce_id": "next"})
            while "turn_s" not in (place := await ask(bus, "next")):
                pass
            left = worker.outlook.look().of(worker.jobs.at(running))
            assert place["turn_s"] == pytest.approx(left.end_s, rel=0.1)

    with virtual_time() as loop:
        loop.run_until_complete(run())
