"""Steps of a load, a wake, a park or a drop fail in a worker: nothing of them is left, and nobody else notices."""

import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.contexts import Tier
from service.errors import SwitchFailed
from service.platforms.cpu import resident_bytes
from tests.support.faults import broken, mended
from tests.support.greedy import PROMPT, Greedy, alone, greedy

pytestmark = [pytest.mark.engine, pytest.mark.parity, pytest.mark.timeout(600)]
MIB = 1 << 20
KV = 64 * MIB


@pytest.fixture(scope="module")
async def started(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from service.engine import MultiModelEngine

    common = {"max_model_len": 1024, "dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": KV}
    eager = {
        alias: AsyncEngineArgs(model=str(models[alias]), enforce_eager=True, **common) for alias in ("llama", "qwen")
    }
    empty = tmp_path_factory.mktemp("faults") / "weightless"
    shutil.copytree(models["qwen"], empty, ignore=shutil.ignore_patterns("*.safetensors"))
    engine = MultiModelEngine(
        {
            **eager,
            "compiled": AsyncEngineArgs(model=str(models["lynx"]), **common),
            "weightless": AsyncEngineArgs(model=str(empty), enforce_eager=True, **common),
        },
        disable_log_stats=True,
        device_memory_bytes=1 << 60,
    )
    async with engine:
        await engine.initialize("llama")
        yield engine


@pytest.fixture
async def faulty(started: Any) -> Any:
    """With ``llama`` and ``qwen`` loaded, and ``llama`` active."""
    await started.preload("qwen")
    await started.switch("llama")
    return started


def held(multi: Any) -> int:
    return sum(map(resident_bytes, (multi.core_pid, *multi.worker_pids)))


def failing_step(owner: str, name: str) -> Callable[[Any], None]:
    """From now on a method of every vLLM worker, or of what the worker's runner is made of, raises after its work."""

    def put_in(wrapper: Any) -> None:
        kind = type(wrapper.worker if owner == "worker" else wrapper.worker.model_runner)
        whole = getattr(kind, name)

        def fail(self: Any, *given: Any, **more: Any) -> Any:
            whole(self, *given, **more)
            raise MemoryError(f"no memory after {name}")

        fail.whole = whole
        setattr(kind, name, fail)

    return put_in


def whole_again(owner: str, name: str) -> Callable[[Any], None]:
    def take_out(wrapper: Any) -> None:
        kind = type(wrapper.worker if owner == "worker" else wrapper.worker.model_runner)
        setattr(kind, name, getattr(kind, name).whole)

    return take_out


LOADING = [
    ("worker", "init_device"),
    ("worker", "load_model"),
    ("runner", "load_model"),
    ("worker", "initialize_from_config"),
    ("worker", "compile_or_warm_up_model"),
]


@pytest.mark.parametrize(("owner", "step"), LOADING)
async def test_a_load_that_fails_at_any_step_leaves_nothing_and_disturbs_nobody(
    faulty: Any, owner: str, step: str
) -> None:
    expected = {alias: await alone(faulty, alias, tokens=100) for alias in ("qwen", "llama")}
    await faulty.drop("qwen")
    request = Greedy(faulty, "llama", PROMPT, 100)
    await request.has(10)
    sizes = []
    await faulty.collective_rpc(failing_step(owner, step))
    try:
        for _ in range(3):
            with pytest.raises(SwitchFailed, match=f"no memory after {step}"):
                await faulty.switch("qwen")
            sizes.append(held(faulty))
    finally:
        await faulty.collective_rpc(whole_again(owner, step))
    assert faulty.active == "llama"
    assert faulty.info("qwen").tier is Tier.DROPPED
    assert await request.tokens() == expected["llama"]
    assert sizes[-1] - sizes[1] < 8 * MIB
    assert await alone(faulty, "qwen", tokens=100) == expected["qwen"]


@pytest.mark.parametrize("step", ["park", "wake"])
async def test_parking_or_waking_that_fails_leaves_the_model_where_it_was_with_its_requests(
    faulty: Any, step: str
) -> None:
    expected = {alias: await alone(faulty, alias, tokens=200) for alias in ("llama", "qwen")}
    frozen = Greedy(faulty, "qwen", PROMPT, 200)
    await frozen.has(10)
    await faulty.switch("llama")
    running = Greedy(faulty, "llama", PROMPT, 200)
    await running.has(10)
    if step == "wake":
        await faulty.park("qwen")
    before = held(faulty)
    await faulty.collective_rpc(broken(step, times=1))
    with pytest.raises(SwitchFailed, match=f"no memory to {step}"):
        await (faulty.park("qwen") if step == "park" else faulty.preload("qwen"))
    assert faulty.info("qwen").tier is (Tier.RESIDENT if step == "park" else Tier.PARKED)
    assert abs(held(faulty) - before) < KV // 2
    assert await running.tokens() == expected["llama"]
    await faulty.switch("qwen")
    assert await frozen.tokens() == expected["qwen"]


async def test_what_fails_while_a_model_is_dropped_does_not_keep_its_memory(faulty: Any) -> None:
    expected = {alias: await alone(faulty, alias) for alias in ("qwen", "llama")}
    sizes = []
    await faulty.collective_rpc(broken("release", times=1 << 30))
    try:
        for _ in range(4):
            await faulty.drop("qwen")
            assert faulty.info("qwen").tier is Tier.DROPPED
            sizes.append(held(faulty))
            await faulty.preload("qwen")
    finally:
        await faulty.collective_rpc(mended("release"))
    assert sizes[-1] - sizes[1] < 8 * MIB
    assert await greedy(faulty) == expected["llama"]
    assert await alone(faulty, "qwen") == expected["qwen"]


def compiled_models(_worker: Any) -> int:
    """How many compiled models there are in the worker, alive or pinned."""
    import gc

    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    gc.unfreeze()
    gc.collect()
    return sum(isinstance(each, TorchCompileWithNoGuardsWrapper) for each in gc.get_objects())


async def test_a_compiled_model_that_was_dropped_or_could_not_be_loaded_is_gone(faulty: Any) -> None:
    (before,) = await faulty.collective_rpc(compiled_models)
    expected = await alone(faulty, "compiled")
    (with_one,) = await faulty.collective_rpc(compiled_models)
    assert with_one > before
    await faulty.switch("llama")
    await faulty.sleep(2, model="compiled")
    assert await faulty.collective_rpc(compiled_models) == [before]
    await faulty.wake_up(model="compiled")
    assert await alone(faulty, "compiled") == expected
    await faulty.switch("llama")
    await faulty.drop("compiled")
    assert await faulty.collective_rpc(compiled_models) == [before]
    await faulty.collective_rpc(failing_step("worker", "load_model"))
    try:
        with pytest.raises(SwitchFailed):
            await faulty.switch("compiled")
    finally:
        await faulty.collective_rpc(whole_again("worker", "load_model"))
    assert await faulty.collective_rpc(compiled_models) == [before]


def unparkable(_worker: Any) -> None:
    from service.platforms import current

    vars(current())["parks"] = lambda worker: False


async def test_a_model_that_can_not_be_parked_makes_room_by_going(faulty: Any) -> None:
    """The last test of this engine."""
    from vllm.v1.engine.exceptions import EngineGenerateError

    from service.errors import HandedBack
    from service.scheduling.memory import Budgets

    expected = {alias: await alone(faulty, alias) for alias in ("qwen", "llama")}
    await faulty.drop("qwen")
    await faulty.collective_rpc(unparkable)
    await faulty.preload("qwen")  # measured again
    await faulty.switch("qwen")
    faulty._residency.budgets = Budgets(device=KV * 3 // 2, shared=True)
    await faulty.drop("llama")
    request = Greedy(faulty, "qwen", PROMPT, 900)
    await request.has(5)
    report = await faulty.switch("llama")
    assert report.switched
    assert faulty.info("qwen").tier is Tier.DROPPED
    with pytest.raises(EngineGenerateError) as failure:
        await request.tokens()
    assert isinstance(failure.value.__cause__, HandedBack)
    assert await greedy(faulty) == expected["llama"]
    with pytest.raises(SwitchFailed, match="any model weights"):
        await faulty.switch("weightless")
    assert faulty.active == "llama"
    assert await greedy(faulty) == expected["llama"]  # loaded again
    assert await alone(faulty, "qwen") == expected["qwen"]
