"""Models are added to the running engine, removed and changed; no other context is touched."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas.contexts import Tier
from service.errors import ConfigError
from service.models_file import ModelsFile, ModelSpec, Scheduling
from tests.support.engine_spec import chat
from tests.support.greedy import PROMPT, Greedy, alone, greedy, usual

pytestmark = pytest.mark.engine


@pytest.fixture
async def before(engine: Any, multi: Any) -> AsyncIterator[ModelsFile]:
    """What the session's models.yaml says, and says again afterwards."""
    models: ModelsFile = engine._models
    yield models
    await engine.switch("llama")
    await engine.reload(models)


def like(models: ModelsFile, pattern: str, alias: str, **arguments: Any) -> ModelSpec:
    spec = models.models[pattern]
    return replace(spec, alias=alias, engine_args={**spec.engine_args, **arguments})


def saying(models: ModelsFile, *specs: ModelSpec, without: str | None = None) -> ModelsFile:
    """The same file with some aliases more, or others, or one less."""
    said = {**models.models, **{spec.alias: spec for spec in specs}}
    said.pop(without or "", None)
    return replace(models, models=said)


def quant_config(_worker: Any) -> str | None:
    """What a process of the engine has while a model of it is asked."""
    return os.environ.get("QUANT_CONFIG")


async def test_a_model_finds_its_own_quant_config_and_no_other_one_does(
    engine: Any, multi: Any, before: ModelsFile, tmp_path: Path
) -> None:
    (quantize := tmp_path / "quantize.json").write_text("{}")
    await engine.reload(saying(before, replace(like(before, "qwen", "twin"), quant_config=quantize)))
    wanted = {"twin": [str(quantize)], "qwen": [None], "llama": [None]}
    for active in ("twin", "qwen", "twin"):
        await engine.switch(active)
        assert (await engine.answer(chat(active))).status == 200
        assert {alias: await multi.collective_rpc(quant_config, model=alias) for alias in wanted} == wanted
    assert "QUANT_CONFIG" not in os.environ


async def test_each_model_says_where_its_own_kv_cache_events_come_from(
    engine: Any, multi: Any, before: ModelsFile, tmp_path: Path
) -> None:
    """A core greets whoever connects with its first model's; they are there as long as the model is loaded."""
    if not hasattr(multi.context("llama"), "get_kv_event_sources"):
        pytest.skip("since vLLM 0.32")

    def endpoints(alias: str) -> dict[int, str]:
        return {rank: source.endpoint for rank, source in multi.get_kv_event_sources(model=alias).items()}

    published = {alias: f"ipc://{tmp_path / alias}" for alias in ("first", "second")}
    twins = [
        like(before, "qwen", alias, kv_events_config={"enable_kv_cache_events": True, "endpoint": endpoint})
        for alias, endpoint in published.items()
    ]
    await engine.reload(saying(before, *twins))
    for alias, endpoint in published.items():
        assert endpoints(alias) == {}
        await multi.preload(alias)
        assert endpoints(alias) == {0: endpoint}
    await multi.park("first")
    assert endpoints("first") == {0: published["first"]}
    await multi.drop("first")
    assert [endpoints(alias) for alias in ("first", "second", "llama")] == [{}, {0: published["second"]}, {}]
    await engine.switch("first")
    assert [endpoints(alias) for alias in published] == [{0: endpoint} for endpoint in published.values()]


async def test_an_added_model_answers_and_a_removed_one_is_unknown(engine: Any, multi: Any, before: ModelsFile) -> None:
    expected = {alias: await usual(multi, alias, tokens=100) for alias in ("qwen", "llama")}
    frozen = Greedy(multi, "llama", PROMPT, 100)
    await frozen.has(5)
    contexts = {info.alias: info for info in multi.contexts() if info.alias != "llama"}
    changes = await engine.reload(saying(before, like(before, "qwen", "twin")))
    assert changes.pop("twin") == "added"
    assert set(changes.values()) == {"kept"}
    assert "twin" in engine.aliases
    assert multi.info("twin").tier is Tier.DROPPED
    await engine.switch("twin")
    assert await greedy(multi, "twin", tokens=100) == expected["qwen"]
    assert (await engine.answer(chat("twin"))).status == 200
    assert {info.alias: info for info in multi.contexts() if info.alias in contexts} == contexts
    await engine.switch("llama")
    assert await frozen.tokens() == expected["llama"]
    assert (await engine.reload(before))["twin"] == "removed"
    assert "twin" not in engine.aliases
    assert (await engine.answer(chat("twin"))).status == 404
    with pytest.raises(ValueError, match="Model 'twin' not found"):
        multi.context("twin")
    assert await alone(multi, "qwen", tokens=100) == expected["qwen"]


@pytest.mark.long
async def test_slots_of_removed_models_are_used_again(multi: Any, before: ModelsFile) -> None:
    expected = await usual(multi, "lynx")
    await multi.switch("llama")
    arguments = multi.model_configs["lynx"]
    for number in range(12):  # more than there are spare slots
        await multi.add_model(f"passing-{number}", arguments)
        if number % 5 == 0:
            assert await alone(multi, f"passing-{number}") == expected
            await multi.switch("llama")
        await multi.remove_model(f"passing-{number}")
    assert await alone(multi, "lynx") == expected


async def test_a_changed_model_is_loaded_anew_with_its_new_arguments(
    engine: Any, multi: Any, before: ModelsFile
) -> None:
    expected = await usual(multi, "qwen")
    await engine.switch("llama")
    shorter = like(before, "qwen", "qwen", max_model_len=256)
    assert (await engine.reload(saying(before, shorter)))["qwen"] == "changed"
    assert multi.info("qwen").tier is Tier.DROPPED
    assert await alone(multi, "qwen") == expected
    assert multi.context("qwen").model_config.max_model_len == 256


@pytest.mark.parametrize("change", ["removed", "changed"])
async def test_the_active_model_and_one_with_requests_stay(
    engine: Any, multi: Any, before: ModelsFile, change: str
) -> None:
    def without(alias: str) -> ModelsFile:
        if change == "removed":
            return saying(before, without=alias)
        return saying(before, like(before, alias, alias, max_model_len=256))

    with pytest.raises(ConfigError, match=r"models\.llama: llama can't be removed: it is the active model"):
        await engine.reload(without("llama"))
    waiting = Greedy(multi, "qwen", PROMPT, 24)
    await greedy(multi, "llama")
    with pytest.raises(ConfigError, match=r"models\.qwen: qwen can't be removed: it has 1 unfinished requests"):
        await engine.reload(without("qwen"))
    with pytest.raises(RuntimeError, match="1 unfinished requests"):
        await multi.remove_model("qwen")
    assert set(engine.aliases) == set(before.models)
    assert len(await alone(multi, "qwen")) == len(await waiting.tokens())


async def test_a_file_that_can_not_be_taken_changes_nothing(engine: Any, multi: Any, before: ModelsFile) -> None:
    added = like(before, "qwen", "twin")
    silent = {name: value for name, value in added.engine_args.items() if name != "kv_cache_memory_bytes"}
    starved = replace(added, alias="wrong", engine_args=silent, scheduling=Scheduling(memory=1 << 10))
    for wrong, reason in (
        (starved, r"models\.wrong: .*memory is 0\.0 MiB, of which its weights take"),
        (replace(starved, alias="qwen"), r"models\.qwen: .*memory is 0\.0 MiB, of which its weights take"),
        (like(before, "qwen", "wrong", max_model_len=1 << 20), r"(?s)models\.wrong: .*max_model_len"),
        (like(before, "qwen", "wrong", tensor_parallel_size=2), r"models\.wrong: .*tensor_parallel_size is 2"),
        (like(before, "qwen", "wrong", model="/nowhere/at/all"), r"models\.wrong"),
    ):
        with pytest.raises(ConfigError, match=reason):
            await engine.reload(saying(before, added, wrong, without="lynx"))
        assert set(engine.aliases) == set(multi.available_models) == set(before.models)
    many = [like(before, "qwen", f"twin-{number}") for number in range(9)]
    with pytest.raises(ConfigError, match=r"room for \d+ models, has \d+, and can't take 9 more"):
        await engine.reload(saying(before, *many))
    with pytest.raises(ValueError, match="is there already"):
        await multi.add_model("qwen", multi.model_configs["qwen"])
    with pytest.raises(ValueError, match="Model 'nobody' not found"):
        await multi.remove_model("nobody")
    assert len(await alone(multi, "lynx")) == 24


async def test_gpu_memory_utilization_is_the_whole_engines_and_another_one_is_refused_by_name(
    engine: Any, multi: Any, before: ModelsFile
) -> None:
    assert multi.device_bytes == int(psutil.virtual_memory().total * 0.3)
    with pytest.raises(ConfigError, match=r"twin: gpu_memory_utilization is 0\.2, but .* said as 0\.3; .* memory"):
        await engine.reload(saying(before, like(before, "qwen", "twin", gpu_memory_utilization=0.2)))
    assert set(engine.aliases) == set(multi.available_models) == set(before.models)
    await engine.reload(saying(before, like(before, "qwen", "twin", gpu_memory_utilization=0.3)))
    await engine.switch("twin")
    assert await greedy(multi, "twin") == await alone(multi, "qwen")
