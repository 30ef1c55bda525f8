"""What a model's work costs the device is learnt right from a load that is never steady."""

import asyncio
import random

import pytest

from schemas.objectives import Objective
from service.models_file import Scheduling
from service.scheduling.work import WorkCosts
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
