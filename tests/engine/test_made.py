"""An engine made of finished configurations, with stat loggers and torch's compiler: settled at its start."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.greedy import PROMPT, Greedy, alone, greedy

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
TOKENS = 120


def offer_plugin(folder: Path) -> None:
    """What installing a package with a stat logger leaves on the import path."""
    installed = folder / "tally-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: tally\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[vllm.stat_logger_plugins]\ntally = tests.support.loggers:PluginTally\n"
    )


@pytest.fixture(scope="module")
async def made(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from service.engine import MultiModelEngine
    from tests.support.loggers import Tally

    common = {"max_model_len": 1024, "dtype": "float32", "kv_cache_memory_bytes": 32 << 20}
    configs = {
        "llama": AsyncEngineArgs(model=str(models["llama"]), enforce_eager=True, **common),
        "compiled": AsyncEngineArgs(model=str(models["llama"]), **common),
        "compiled lynx": AsyncEngineArgs(model=str(models["lynx"]), **common),
    }
    engine = MultiModelEngine.from_vllm_config(
        {alias: each.create_engine_config() for alias, each in configs.items()},
        stat_loggers=[Tally],
        enable_log_requests=True,
        device_memory_bytes=1 << 40,
    )
    plugin = tmp_path_factory.mktemp("plugin")
    offer_plugin(plugin)
    async with engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(plugin)
            await engine.initialize("llama")
        yield engine
    engine.shutdown()


async def test_stat_loggers_given_and_found_as_plugins_hear_of_each_models_tokens(made: Any) -> None:
    from tests.support.loggers import BY_PLUGIN, GENERATED

    paths = {alias: made.context(alias).model_config.model for alias in ("llama", "compiled lynx")}
    for counted in (GENERATED, BY_PLUGIN):
        before = counted.copy()
        for tokens, alias in enumerate(paths, start=7):
            await made.switch(alias)
            await greedy(made, alias, tokens=tokens)
        assert [counted[path] - before[path] for path in paths.values()] == [7, 8]
    for alias in made.available_models:
        assert made.context(alias).log_requests
        assert made.context(alias).log_stats


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
