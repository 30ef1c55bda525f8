"""What a worker tells its group that its models ask for, and when it asks to have them placed anew."""

import asyncio

import pytest

from schemas.objectives import Attainment, Miss, Objective
from schemas.results import Outcome, Result, Timing
from service.models_file import Scheduling
from service.ports import SourceState
from service.scheduling import demand
from service.worker import placing
from tests.support.bus import until
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine

NEVER = Objective(ttft_s=1e-9, tpot_s=1e-9, share=0.5)
ALWAYS = Objective(ttft_s=60.0, tpot_s=60.0)
MODELS = {"llama": Scheduling(objective=NEVER), "qwen": Scheduling(objective=ALWAYS)}


def chat(model: str) -> dict:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


async def answer(bus: FakeBus, model: str, n: int) -> None:
    origins = [bus.produce(chat(model), topic=f"requests.{model}") for _ in range(n)]
    for origin in origins:
        await bus.result(origin)


async def test_a_model_counts_by_what_its_requests_take_and_twice_that_where_all_miss(serve) -> None:
    async with serve(models=MODELS) as serving:
        pace = serving.worker.scheduler.costs.pace

        def alone(alias: str) -> float:
            return 7.0 * pace(alias).work_s(pace(alias).request_tokens)

        assert serving.bus.load("llama", 7.0) == pytest.approx(alone("llama"))
        await answer(serving.bus, "llama", 30)
        await answer(serving.bus, "qwen", 30)
        await until(lambda: serving.bus.load("llama", 7.0) == pytest.approx(2 * alone("llama")))
        assert serving.bus.load("qwen", 7.0) == pytest.approx(alone("qwen"))
        assert serving.bus.load("llama", 0.0) == 0.0


async def test_one_whose_model_costs_more_says_more(serve) -> None:
    async with serve(engine=FakeEngine(step_s=0.002), models=MODELS) as serving:
        costs = serving.worker.scheduler.costs
        for alias, tokens_s in (("llama", 100.0), ("qwen", 1000.0)):
            for _ in range(50):
                costs.worked(alias, seconds=1.0, tokens=round(tokens_s), full=True)
                costs.finished(alias, seconds=1.0, tokens=100)
        assert serving.bus.load("llama", 1.0) == pytest.approx(10 * serving.bus.load("qwen", 1.0), rel=0.1)


async def test_who_misses_for_long_asks_and_who_is_in_no_group_does_not(serve, monkeypatch) -> None:
    monkeypatch.setattr(placing, "_LOOK_S", 0.01)
    monkeypatch.setattr(demand, "_PERSISTS_S", 0.0)
    monkeypatch.setattr(demand, "_PAUSE_S", 0.0)
    bus, joined = FakeBus(), asyncio.Event()
    state = bus.state
    bus.state = lambda: state() if joined.is_set() else SourceState(joined=False)
    async with serve(bus=bus, models=MODELS) as serving:
        await answer(bus, "qwen", 30)
        await answer(bus, "llama", 30)
        pace = serving.worker.scheduler.costs.pace("llama")
        await until(lambda: serving.bus.load("llama", 1.0) > 1.5 * pace.work_s(pace.request_tokens))
        assert bus.placements_asked == []
        joined.set()
        await until(lambda: bool(bus.placements_asked))
        assert bus.placements_asked[0] == {"llama": 1.0}


@pytest.mark.parametrize(
    ("outcome", "missed_by", "latency_s", "tells"),
    [
        (Outcome.COMPLETED, None, 1.0, True),
        (Outcome.COMPLETED, Miss.TURN, 1.0, True),
        (Outcome.FAILED, Miss.FAILED, 9.0, False),
        (Outcome.CANCELLED, Miss.TURN, 9.0, False),
        (Outcome.EXPIRED, Miss.TURN, 1.9, False),
        (Outcome.EXPIRED, Miss.TURN, 2.0, True),
    ],
)
def test_what_a_producer_did_not_wait_for_or_got_wrong_says_nothing_of_the_placement(
    outcome: Outcome, missed_by: Miss | None, latency_s: float, tells: bool
) -> None:
    reached = Attainment(ttft_s=2.0, tpot_s=1.0, met=missed_by is None, missed_by=missed_by)
    spent = Timing(received=0, finished=latency_s, waited_s=latency_s, latency_s=latency_s)
    assert placing._tells(Result.model_construct(outcome=outcome, objective=reached, timing=spent), reached) is tells
