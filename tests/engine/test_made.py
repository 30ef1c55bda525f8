"""An engine made of finished configurations, with torch's compiler: settled at its start."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.greedy import PROMPT, Greedy, alone, greedy

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
TOKENS = 120


@pytest.fixture(scope="module")
async def made(models: dict[str, Path]) -> AsyncIterator[Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from service.engine import MultiModelEngine

    common = {"max_model_len": 1024, "dtype": "float32", "kv_cache_memory_bytes": 32 << 20}
    configs = {
        "llama": AsyncEngineArgs(model=str(models["llama"]), enforce_eager=True, **common),
        "compiled": AsyncEngineArgs(model=str(models["llama"]), **common),
        "compiled lynx": AsyncEngineArgs(model=str(models["lynx"]), **common),
    }
    engine = MultiModelEngine.from_vllm_config(
        {alias: each.create_engine_config() for alias, each in configs.items()},
        device_memory_bytes=1 << 40,
    )
    async with engine:
        await engine.initialize("llama")
        yield engine


@pytest.mark.compiled
async def test_compiled_models_beside_each_other_and_eager_ones(made: Any) -> None:
    """Two of one architecture: what torch compiled for one must never run for the other."""
    eager = await alone(made, "llama", tokens=TOKENS)
    compiled = ("compiled", "compiled lynx")
    first = {alias: await alone(made, alias, tokens=TOKENS) for alias in compiled}
    assert first["compiled"] == eager
    running = [(alias, Greedy(made, alias, PROMPT, TOKENS)) for alias in compiled for _ in range(3)]
    for alias in (*compiled, "llama", *compiled):
        await made.switch(alias)
        await greedy(made, alias, tokens=5)
    await made.park("compiled")
    for alias in compiled:
        await made.switch(alias)
        assert {await request.tokens() for name, request in running if name == alias} == {first[alias]}
    assert await alone(made, "llama", tokens=TOKENS) == eager
