"""What one model does, or what becomes of it, is nothing to the others: random numbers, files, compiled code."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.contexts import SwitchMode, Tier
from service.errors import SwitchFailed
from tests.support.asked import async_args, engine_of, said
from tests.support.greedy import Greedy, alone
from tests.support.kinds import checkpoints

pytestmark = [pytest.mark.engine]


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[Any]:
    made = engine_of("dense", "other", "compiled")
    async with made:
        await made.initialize("dense")
        yield made


async def sampled(engine: Any, alias: str) -> tuple[int, ...]:
    """What a request without a seed is answered."""
    await engine.switch(alias)
    return await Greedy(engine, alias, "Once upon a time", 24, temperature=1.0).tokens()


async def anew(engine: Any, alias: str, *, beside: str) -> None:
    await engine.switch(beside)
    await engine.drop(alias)
    await engine.switch(alias)


async def test_what_is_sampled_without_a_seed_hangs_on_no_other_model(engine: Any) -> None:
    await anew(engine, "other", beside="dense")
    expected = [await sampled(engine, "other") for _ in range(4)]
    assert len(set(expected)) == 4
    await engine.switch("dense")
    await engine.drop("other")
    await anew(engine, "other", beside="dense")
    heard = [await sampled(engine, "other")]
    await sampled(engine, "dense")  # another one takes random numbers
    heard.append(await sampled(engine, "other"))
    await engine.switch("dense")
    await engine.park("other")
    heard.append(await sampled(engine, "other"))
    await engine.add_model("third", async_args("moe", seed=5))
    await engine.switch("third")  # and another one is loaded, with another seed
    heard.append(await sampled(engine, "other"))
    assert heard == expected
    await engine.remove_model("third")


async def test_a_load_that_fails_takes_no_random_numbers(engine: Any, tmp_path: Path) -> None:
    await anew(engine, "other", beside="dense")
    expected = [await sampled(engine, "other") for _ in range(2)]
    shutil.copytree(checkpoints()["qwen"], tmp_path / "torn")
    (weights,) = (tmp_path / "torn").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    await anew(engine, "other", beside="dense")
    heard = [await sampled(engine, "other")]
    await engine.add_model("torn", async_args("other", model=str(tmp_path / "torn"), seed=5))
    with pytest.raises(SwitchFailed):
        await engine.switch("torn")
    heard.append(await sampled(engine, "other"))
    assert heard == expected
    await engine.remove_model("torn")


async def test_a_checkpoint_that_was_replaced_is_refused_until_it_is_added_again(engine: Any, tmp_path: Path) -> None:
    folder, paths = tmp_path / "there", checkpoints()
    shutil.copytree(paths["llama"], folder)
    await engine.add_model("there", async_args("dense", model=str(folder)))
    first = await alone(engine, "there")
    await engine.switch("dense")
    await engine.drop("there")
    shutil.rmtree(folder)
    shutil.copytree(paths["qwen"], folder)
    request = Greedy(engine, "dense", "Tell me about your day.", 24)
    with pytest.raises(SwitchFailed, match=r"there: the files at .* have changed since they were read"):
        await engine.switch("there", mode=SwitchMode.ABORT)
    assert engine.info("there").tier is Tier.DROPPED
    assert len(await request.tokens()) == 24
    assert await alone(engine, "dense") == first
    await engine.remove_model("there")
    await engine.add_model("there", async_args("other", model=str(folder)))
    await engine.switch("there")
    request = Greedy(engine, "there", "Tell me about your day.", 24)
    tokens = await request.tokens()
    assert tokens == await alone(engine, "other") != first
    other = Greedy(engine, "other", "Tell me about your day.", 24)
    await other.tokens()
    assert request.text == other.text  # by the new tokenizer
    await engine.switch("dense")
    await engine.remove_model("there")


def follow(worker: Any) -> int:
    """Called in the workers: remember the model's weights without holding them. Answers with the number of hooks."""
    import weakref

    import torch
    from torch._dynamo import convert_frame

    torch.gearshift_followed = [weakref.ref(each) for each in worker.model_runner.get_model().parameters()]
    return len(convert_frame._bytecode_hooks)


def is_there(_worker: Any) -> tuple[bool, int, list[str]]:
    """Called in the workers: whether any weight that was followed is, with torch's hooks and compiled functions."""
    import gc
    import sys

    import torch
    from torch._dynamo import convert_frame

    gc.collect()
    functions = [
        f"{name}:{each}"
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.model_executor.models.")
        for each in vars(module)
        if each.startswith(("__compiled_fn_", "__builtins_dict_"))
    ]
    return any(each() is not None for each in torch.gearshift_followed), len(convert_frame._bytecode_hooks), functions


def traced(_worker: Any) -> tuple[int, int]:
    """Called in the workers: how much torch keeps of what it has traced."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx import graph_module

    return len(FakeTensorMode.cache), len(graph_module._loader.eval_cache)


@pytest.mark.compiled
@pytest.mark.long  # by default ``test_faults`` looks at what a compiled model leaves, in one process
@pytest.mark.parametrize("way", ["drop", "sleep"])
async def test_a_compiled_model_leaves_nothing_when_it_goes(engine: Any, way: str) -> None:
    expected = await said(engine, "compiled")
    (hooks,) = await engine.collective_rpc(follow, model="compiled")
    assert hooks > 0
    assert await engine.collective_rpc(is_there, model="dense") == [(True, 0, [])]
    await engine.switch("dense")
    if way == "drop":
        await engine.drop("compiled")
    else:
        await engine.sleep(level=2, model="compiled")
    assert await engine.collective_rpc(is_there, model="dense") == [(False, 0, [])]
    assert await engine.collective_rpc(traced, model="dense") == [(0, 0)], "it would grow with each load"
    if way == "sleep":
        await engine.wake_up(model="compiled")
    assert await said(engine, "compiled") == expected


def heap(_worker: Any) -> tuple[int, int]:
    """Called in the workers: how many objects no search for garbage goes over, and how many one does."""
    import gc

    return gc.get_freeze_count(), len(gc.get_objects())


def dead_without_a_search(_worker: Any) -> bool:
    """Called in the workers: whether what was followed has gone."""
    import torch

    return all(each() is None for each in torch.gearshift_followed)


def attributes_of_imports(_worker: Any) -> int:
    """Called in the workers: of how many modules' specifications a search goes over the attributes."""
    import gc

    return sum(type(each) is dict and "submodule_search_locations" in each for each in gc.get_objects())


async def test_a_search_does_not_go_over_what_vllm_asked_of_its_imports(engine: Any) -> None:
    """It asks all that was imported for its attributes, and Python makes a dictionary of them then: 6,000."""
    await engine.switch("dense")
    assert sum(await engine.collective_rpc(attributes_of_imports)) < 100


async def test_a_drop_searches_what_models_have_and_not_all_that_was_imported(engine: Any) -> None:
    """The steps of the active model wait for that search: for vLLM's own objects it took a second."""
    await engine.switch("other")
    await engine.switch("dense")
    await engine.collective_rpc(follow, model="other")
    await engine.drop("other")
    assert await engine.collective_rpc(dead_without_a_search, model="dense") == [True]
    ((frozen, searched),) = await engine.collective_rpc(heap)
    assert searched < frozen / 4
