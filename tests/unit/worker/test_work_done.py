"""What a model's work costs the device is learnt right from a load that is never steady."""

import asyncio
import random

import pytest

from schemas.base import Origin, Record
from schemas.objectives import Objective
from schemas.progress import Begun, Progress, Said
from schemas.requests import Attempt, Endpoint, Request
from service.models_file import Scheduling
from service.scheduling.costs import Costs
from service.scheduling.work import WorkCosts
from service.worker.jobs import Job
from service.worker.work_done import WorkDone
from tests.support.fake_engine import FakeEngine
from tests.support.virtual_time import virtual_time

STEP_S, ROW_S, PROMPT_TOKEN_S = 0.003, 1e-4, 15e-6
_ROWS = 20
"""Of the steps that are compared: some so many run at once."""


@pytest.mark.parametrize("hurried", [False, True], ids=["as they come", "in portions"])
def test_what_is_begun_and_what_ends_in_a_time_may_differ(serve, hurried: bool) -> None:
    """Prompts of two thousand tokens and answers of a hundred, begun in bursts; two models by turns."""
    dice, aliases = random.Random(0), ("llama", "qwen")
    objective = Objective(ttft_s=2.0, tpot_s=0.03)
    models = {alias: Scheduling(objective=objective) for alias in aliases} if hurried else {}
    engine = FakeEngine(aliases, step_s=STEP_S, row_s=ROW_S, prompt_token_s=PROMPT_TOKEN_S)
    learnt: dict[str, WorkCosts] = {}

    async def ask() -> None:
        async with serve(engine=engine, models=models, max_running=64) as serving:
            asked = []
            for _ in range(300):
                await asyncio.sleep(dice.expovariate(5.0))
                alias = dice.choice(aliases)
                for _ in range(dice.choice((1, 1, 2, 12))):
                    prompt = "lama" + " lam" * dice.randint(10, 2000)  # four letters each, as a token is taken to have
                    asked.append(
                        serving.bus.produce(
                            {"model": alias, "prompt": prompt, "max_tokens": dice.randint(5, 200)},
                            {"endpoint": "/v1/completions"},
                        )
                    )
            for origin in asked:
                await serving.bus.result(origin)
            learnt.update({alias: serving.worker.scheduler.costs.work(alias) for alias in aliases})

    with virtual_time() as loop:
        loop.run_until_complete(ask())
    for costs in learnt.values():
        assert costs.prompt_token_s == pytest.approx(PROMPT_TOKEN_S, rel=0.2)
        assert costs.steps_s(1, _ROWS) == pytest.approx(STEP_S + _ROWS * ROW_S, rel=0.2)


@pytest.mark.parametrize(
    ("share", "token_s"), [(0.1, 1e-4), (1.0, 1e-4), (1.0, 1e-3)], ids=["among short ones", "alone", "half a minute"]
)
def test_a_prompt_that_takes_seconds_to_read_is_not_taken_for_cheap(serve, share: float, token_s: float) -> None:
    """It counts when it is read; the seconds before that are its own, though others come all the time."""
    dice, aliases = random.Random(0), ("llama", "qwen")
    engine = FakeEngine(aliases, step_s=0.02, row_s=ROW_S, prompt_token_s=token_s, max_model_len=1 << 20)
    learnt: list[WorkCosts] = []

    async def ask() -> None:
        async with serve(engine=engine, max_running=16) as serving:
            asked = []
            for _ in range(200 if share < 1 else 30):
                await asyncio.sleep(dice.expovariate(1.0 if share < 1 else 0.5))
                long = dice.random() < share
                words = dice.randint(10_000, 50_000) if long else dice.randint(50, 500)
                asked.append(
                    serving.bus.produce(
                        {"model": "llama", "prompt": "lama" + " lam" * words, "max_tokens": dice.randint(5, 100)},
                        {"endpoint": "/v1/completions"},
                    )
                )
                asked.append(
                    serving.bus.produce(
                        {"model": "qwen", "prompt": "lama", "max_tokens": 1}, {"endpoint": "/v1/completions"}
                    )
                )
            for origin in asked:
                await serving.bus.result(origin)
            learnt.append(serving.worker.scheduler.costs.work("llama"))

    with virtual_time() as loop:
        loop.run_until_complete(ask())
    assert learnt[0].prompt_token_s == pytest.approx(token_s, rel=0.25)


def asked(prompt: int, *, n: int = 1, said_before: int = 0) -> Job:
    origin = Origin(topic="requests", partition=0, offset=0)
    body = {"n": n}
    request = Request(id="r", origin=origin, model="llama", endpoint=Endpoint.CHAT, body=body, received=0.0, size=0)
    job = Job(request, Record("requests", 0, 0, 0.0, None, b""), "llama", Attempt(), taken=0.0, prompt_tokens=prompt)
    if said_before:
        begun = Begun(id="c", prompt="", sequences=(Said(tokens=list(range(said_before))),))
        job.progress = Progress(call="c", engine="e", requests=(begun,))
    return job


@pytest.mark.parametrize("kind", ["once", "twice", "gone on with", "four answers"])
def test_each_run_counts_as_what_it_read_and_said(kind: str) -> None:
    """One at a time. A run that goes on with what was said reads it; a step gives each of four answers a token."""
    dice, costs, served_s = random.Random(1), Costs(), 0.0
    said: dict[str, int] = {}
    work = WorkDone(costs, lambda call: said.get(call, 0))
    for _ in range(80):
        prompt, tokens, before = dice.randint(0, 400_000), dice.randint(400, 2000), 0
        n = 4 if kind == "four answers" and dice.random() < 0.5 else 1
        if kind == "gone on with":
            before = dice.randint(1, 200_000)
        job = asked(prompt, n=n, said_before=before)
        runs = 2 if kind == "twice" else 1
        once_s = PROMPT_TOKEN_S * (prompt + before) + tokens * (STEP_S + n * ROW_S)
        for _ in range(runs):
            job.beside = (0.0, served_s)
            work.begun(job)
            said[job.call_id] = before  # as soon as it is given to the engine
            for seconds, running in ((min(1.01, once_s / 2), (job,)), (once_s - min(1.01, once_s / 2), ())):
                if not running:
                    work.ended(job, before + n * tokens)
                served_s += seconds
                work.served("llama", seconds, 1, running, served_s=served_s)
    learnt = costs.work("llama")
    assert learnt.prompt_token_s == pytest.approx(PROMPT_TOKEN_S, rel=0.05)
    assert learnt.steps_s(1, 1) == pytest.approx(STEP_S + ROW_S, rel=0.05)
