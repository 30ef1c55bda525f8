"""Contexts on vllm-gaudi's own platform, workers and runners: on Gaudi cards, or on the stand-in for them.

They run wherever vllm_gaudi is importable. Without a card, with any checkout of its release v0.26.0:

    deploy/local/gaudi FOLDER pytest -m hpu tests/engine

What the stand-in can't show: memory of a device apart from the host's, tensors that move, captured graphs, warm-up
and compilation, fused attention, collectives between cards, and times. Weights are bfloat16, as HPU has no float32.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from schemas.contexts import Tier
from tests.support.context_spec import *  # noqa: F403 - what contexts do on every platform
from tests.support.context_spec import ALIASES, LONG, refuses
from tests.support.gaudi_pairs import CARDS, PAIRS, Shape
from tests.support.greedy import PROMPT, Greedy, alone, greedy
from tests.support.hybrid import make_hybrid
from tests.support.judge import judge
from tests.support.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.hpu,
    pytest.mark.engine,
    pytest.mark.skipif(
        find_spec("vllm_gaudi") is None,
        reason="vllm_gaudi is not importable here: deploy/local/gaudi FOLDER pytest -m hpu tests/engine",
    ),
    # What vllm-gaudi imports is deprecated elsewhere.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]
KV = 32 << 20


def engine_args(path: Path, **given: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    chosen = {
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV,
        "async_scheduling": True,
        **given,
    }
    return AsyncEngineArgs(model=str(path), **chosen)


def quant_file(path: Path, **content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.fixture(scope="module")
def folder(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints beside the three: a mixed one, one without weights; and what quantizing wants."""
    folder = tmp_path_factory.mktemp("hpu")
    make_hybrid(folder / "hybrid", tokenizer=models["llama"])
    shutil.copytree(models["qwen"], folder / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.fixture(scope="module")
async def hpu(models: dict[str, Path], folder: Path) -> AsyncIterator[Any]:
    from service.engine import MultiModelEngine

    engine = MultiModelEngine(
        {
            **{alias: engine_args(path) for alias, path in models.items()},
            "rounded": engine_args(models["llama"]),
            "measured": engine_args(models["qwen"]),
            "hybrid": engine_args(folder / "hybrid"),
            "weightless": engine_args(folder / "weightless"),
            "huge": engine_args(models["qwen"], kv_cache_memory_bytes=1 << 50),
        },
        disable_log_stats=True,
        model_quant_configs={
            "rounded": quant_file(folder / "quantize.json", mode="QUANTIZE"),
            "measured": quant_file(folder / "m.json", mode="MEASURE", dump_stats_path=str(folder / "measured")),
            "lynx": None,
        },
        device_memory_bytes=1 << 60,
    )
    await engine.initialize("llama")
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
async def hybrid_alone(folder: Path) -> tuple[tuple[int, ...], dict[str, Any]]:
    """What the mixed model says, and how it is aligned, where it is the engine's first and only one."""
    from service.engine import MultiModelEngine

    engine = MultiModelEngine({"hybrid": engine_args(folder / "hybrid")}, disable_log_stats=True)
    await engine.initialize("hybrid")
    try:
        return await greedy(engine), alignment(engine)
    finally:
        engine.shutdown()


def alignment(multi: Any) -> dict[str, Any]:
    cache = multi.context("hybrid").vllm_config.cache_config
    return {name: getattr(cache, name) for name in ("block_size", "mamba_block_size", "num_gpu_blocks")}


@pytest.fixture
async def multi(hpu: Any) -> Any:
    """The engine with its three generators loaded, and ``llama`` active."""
    for alias in ("qwen", "lynx"):
        await hpu.preload(alias)
    await hpu.switch("llama")
    return hpu


@pytest.fixture
def frees() -> int:
    return -16 << 20  # on the stand-in it is host memory, and what comes back is untouched


def state_of(wrapper: Any) -> dict[str, Any]:
    """What a worker process holds for the model that sits in it."""
    import os

    from vllm_gaudi.extension import ops, runtime
    from vllm_gaudi.extension.bucketing.common import HPUBucketingManager

    runner = wrapper.worker.model_runner
    return {
        "buckets": HPUBucketingManager._active_instance is runner.bucketing_manager,
        "model_type": runtime.get_config().model_type,
        "quant_config": os.environ.get("QUANT_CONFIG"),
        "inc": ops.USING_INC,
        "hybrid_cache": os.environ.get("VLLM_USE_HYBRID_CACHE"),
        "sleeping": (wrapper.worker.model_sleeping, wrapper.worker.kv_cache_sleeping),
        "ropes": [id(module) for name, module in runner.model.named_modules() if name.endswith("rotary_emb")],
    }


async def state(multi: Any, alias: str) -> dict[str, Any]:
    (found,) = await multi.collective_rpc(state_of, model=alias)
    return found


# --- what vllm-gaudi's authors measure: configured, and not loaded --------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].name)
def test_a_pair_that_its_authors_measure_is_configured_in_one_engine_and_sized_from_its_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[Shape, Shape]
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from service.engine.models.catalog import Catalog
    from service.engine.models.residency import weights_of
    from service.platforms import current
    from service.scheduling.memory import Budgets

    monkeypatch.setenv("HPU_STANDIN_BYTES", str(CARDS["Gaudi 3"]))
    folders = {shape.name: str(shape.write(tmp_path / str(at))) for at, shape in enumerate(pair)}
    given = {shape.name: AsyncEngineArgs(model=folders[shape.name], **shape.arguments) for shape in pair}
    greedy_one = AsyncEngineArgs(model=folders[pair[1].name], gpu_memory_utilization=0.65, **pair[1].arguments)
    catalog = Catalog({**given, "greedy": greedy_one})
    catalog.configure(list(catalog.arguments))
    catalog.require_compatible(pair[0].name)
    budgets = Budgets(device=current().device_budget(None))
    catalog.divide(budgets, list(catalog.arguments))
    assert catalog.broken.keys() == {"greedy"}
    assert str(catalog.broken["greedy"]).startswith("greedy: gpu_memory_utilization is 0.65, but")
    for shape in pair:
        config = catalog.config(shape.name)
        assert config.parallel_config.worker_cls == "service.platforms.hpu_worker.ContextWorker"
        assert config.cache_config.block_size == 128
        assert weights_of(config) == shape.weights_bytes
        assert config.cache_config.kv_cache_memory_bytes > shape.kv_bytes_per_token * config.model_config.max_model_len


# --- switching --------------------------------------------------------------------------------------------------


async def test_the_workers_are_vllm_gaudis_and_schedule_ahead(multi: Any) -> None:
    for alias in ALIASES:
        config = multi.context(alias).vllm_config
        assert config.parallel_config.worker_cls == "service.platforms.hpu_worker.ContextWorker"
        assert config.scheduler_config.async_scheduling
        assert config.cache_config.block_size == 128
        assert multi.info(alias).kv_bytes <= KV + KV // 8  # and a block for padding


# --- what two models of a process would share -----------------------------------------------------------------------


async def test_a_models_state_in_the_worker_is_its_own(multi: Any) -> None:
    model_types = {"llama": "llama", "qwen": "qwen3", "lynx": "llama"}
    for alias in (*ALIASES, *reversed(ALIASES)):
        found = await state(multi, alias)
        assert found["buckets"]
        assert found["model_type"] == model_types[alias]
        assert (found["quant_config"], found["inc"]) == (None, False)
    ropes = [rope for alias in ALIASES for rope in (await state(multi, alias))["ropes"]]
    assert ropes
    assert len(set(ropes)) == len(ropes)


async def test_a_quantized_model_is_built_with_its_own_quant_config_and_no_other_one_is(
    multi: Any, folder: Path
) -> None:
    plain = await alone(multi, "llama", tokens=200)
    await multi.switch("rounded")
    found = await state(multi, "rounded")
    assert (found["quant_config"], found["inc"]) == (str(folder / "quantize.json"), True)
    assert multi.context("rounded").vllm_config.load_config.device == "cpu"
    assert (await state(multi, "llama"))["quant_config"] is None
    await multi.drop("lynx")
    await multi.switch("lynx")  # loaded right after the quantized one
    assert (await state(multi, "lynx"))["quant_config"] is None
    rounded = await alone(multi, "rounded", tokens=200)
    assert await alone(multi, "llama", tokens=200) == plain
    assert await alone(multi, "rounded", tokens=200) == rounded
    await multi.switch("llama")
    await multi.drop("rounded")


async def test_a_calibration_ends_with_its_own_model_however_often_one_is_dropped(multi: Any, folder: Path) -> None:
    for times in (1, 2):
        await multi.switch("measured")
        await greedy(multi, "measured")
        await multi.switch("llama")
        await multi.drop("measured")
        assert (folder / "measured").read_text() == "Qwen3ForCausalLM\n" * times


@judge(
    "vllm-gaudi",
    "test_normalize_reconfigure_config_aligns_granite_hybrid_mamba_state",
    "test_normalize_reconfigure_resets_mamba_block_size_from_max_model_len_sentinel",
)
async def test_a_mixed_model_is_aligned_as_it_is_where_it_comes_first(multi: Any, hybrid_alone: Any) -> None:
    expected, aligned = hybrid_alone
    assert await alone(multi, "hybrid") == expected
    assert alignment(multi) == aligned
    assert aligned["block_size"] % 16 == 0
    await alone(multi, "llama")
    assert await alone(multi, "hybrid") == expected
    assert multi.info("hybrid").kv_bytes <= KV + KV // 8
    await multi.switch("llama")
    await multi.park("hybrid")
    assert await alone(multi, "hybrid") == expected
    await multi.switch("llama")
    await multi.drop("hybrid")


# --- tiers -----------------------------------------------------------------------------------------------------------


def sleeping(wrapper: Any) -> list[tuple[bool, bool]]:
    """Of each model in a worker process, in the order in which they came, whether its worker has put it to sleep."""
    from service.engine.worker.calls import contexts_of

    workers = [context.worker for _, context in sorted(contexts_of(wrapper).by_key.items())]
    return [(worker.model_sleeping, worker.kv_cache_sleeping) for worker in workers]


async def test_parking_is_the_workers_own_sleep(multi: Any) -> None:
    await multi.switch("qwen")
    await multi.park("llama")
    assert (await multi.collective_rpc(sleeping))[0].count((True, True)) == 1
    await multi.switch("llama")
    assert (True, True) not in (await multi.collective_rpc(sleeping))[0]


def slow_card(_wrapper: Any) -> None:
    """From here on the card fetches 256 KiB at a time, and has not done so when it is asked for the first time."""
    import torch

    from service.platforms import hpu

    class Event(torch.hpu.Event):
        made: ClassVar[list["Event"]] = []
        asked = 0

        def query(self) -> bool:
            self.asked += 1
            if self.asked == 1:
                self.made.append(self)
            return self.asked > 1

    hpu.PIECE, torch.hpu.Event = 256 << 10, Event


def fetched(wrapper: Any) -> tuple[int, set[int], int]:
    """How often the card was to fetch, how often each time it was asked, and bytes of the seated model's parameters."""
    import torch

    made = torch.hpu.Event.made
    sizes = [parameter.nbytes for parameter in wrapper.worker.model_runner.model.parameters()]
    return len(made), {event.asked for event in made}, sum(sizes)


async def test_a_parked_model_comes_back_between_another_ones_steps(multi: Any) -> None:
    await multi.collective_rpc(slow_card)
    expected = {alias: await alone(multi, alias, tokens=LONG) for alias in ("llama", "qwen")}
    await multi.switch("qwen")
    frozen = Greedy(multi, "qwen", PROMPT, LONG)
    await frozen.has(3)
    await multi.switch("llama")
    await multi.park("qwen")
    running = Greedy(multi, "llama", PROMPT, LONG)
    await running.has(5)
    before = running.seen
    info = await multi.preload("qwen", stall=False)
    assert info.tier is Tier.RESIDENT
    assert before < running.seen < LONG
    ((pieces, asked, size),) = await multi.collective_rpc(fetched, model="qwen")
    assert pieces >= size // (1 << 20)
    assert asked == {2}
    assert (await state(multi, "qwen"))["sleeping"] == (False, False)
    assert not (await multi.switch("qwen")).phases_ms.keys() & {"wake", "load"}
    assert await frozen.tokens() == expected["qwen"]
    await multi.switch("llama")
    assert await running.tokens() == expected["llama"]


def full_warm_up(wrapper: Any) -> bool:
    """Warm the model up as VLLM_FULL_WARMUP has it; whether the compiler may skip its guards afterwards."""
    import os

    import torch

    runner = wrapper.worker.model_runner
    skipped, runner.skip_warmup, runner.graphed_buckets = runner.skip_warmup, False, set()
    os.environ["VLLM_FULL_WARMUP"] = "true"
    try:
        wrapper.worker.compile_or_warm_up_model()
    finally:
        del os.environ["VLLM_FULL_WARMUP"]
        runner.skip_warmup = skipped
    return bool(torch._dynamo.eval_frame._stance.skip_guard_eval_unsafe)


async def test_a_full_warm_up_of_one_model_leaves_the_compilers_guards_for_the_others(multi: Any) -> None:
    expected = await alone(multi, "llama")
    assert await multi.collective_rpc(full_warm_up, model="llama") == [False]
    await multi.drop("lynx")
    await multi.switch("lynx")
    assert await alone(multi, "llama") == expected


def warmed_by_waking(wrapper: Any) -> tuple[int, bool]:
    """Sleep and wake, as a model with graphs does: how often its defragmenter was warmed, and whether it is new."""
    worker, runner = wrapper.worker, wrapper.worker.model_runner
    kind, warmed = type(runner.defragmenter), []
    whole = kind.warmup
    before = worker.model_config.enforce_eager, runner.skip_warmup

    def warmup(self: Any) -> None:
        warmed.append(self)
        whole(self)

    kind.warmup, worker.model_config.enforce_eager, runner.skip_warmup = warmup, False, False
    try:
        worker.sleep(1)
        worker.wake_up(["weights", "kv_cache"])
    finally:
        kind.warmup = whole
        worker.model_config.enforce_eager, runner.skip_warmup = before
    return len(warmed), runner.defragmenter not in warmed


async def test_a_new_kv_caches_defragmenter_is_warmed_before_the_first_request(multi: Any) -> None:
    expected = await alone(multi, "qwen")
    assert await multi.collective_rpc(warmed_by_waking, model="qwen") == [(1, True)]
    await multi.reset_prefix_cache(model="qwen")
    assert await alone(multi, "qwen") == expected


def requests_say(_worker: Any) -> Any:
    from vllm.v1.request import Request

    return Request.discard_latest_async_tokens


async def test_what_the_asynchronous_scheduler_asks_a_request_is_answered(multi: Any) -> None:
    assert await multi.collective_rpc(requests_say) == [False]


def lazy(_worker: Any) -> None:
    """Graphs in lazy mode from here on, in which the worker's own sleep asserts."""
    from service.platforms import current

    platform = current()
    vars(platform)["parks"] = lambda worker: False


async def test_a_model_that_can_not_sleep_is_dropped_where_another_would_be_parked(multi: Any) -> None:
    expected = await alone(multi, "qwen")
    await multi.switch("llama")
    await multi.drop("qwen")
    await multi.collective_rpc(lazy)
    try:
        await multi.preload("qwen")
        await multi.park("qwen")
        assert multi.info("qwen").tier is Tier.DROPPED
    finally:
        await multi.collective_rpc(not_lazy)
    assert await alone(multi, "qwen") == expected
    await multi.switch("llama")
    await multi.drop("qwen")
    await multi.preload("qwen")
    assert multi._residency.parks("qwen")


def not_lazy(_worker: Any) -> None:
    from service.platforms import current

    vars(current()).pop("parks", None)


# --- failure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alias", "says"), [("weightless", "any model weights"), ("huge", "does not fit")])
@judge("vllm-gaudi", "test_gaudi_reconfigure_engine_rolls_back_on_load_failure")
async def test_a_model_that_can_not_be_loaded_leaves_everything_as_it_was(multi: Any, alias: str, says: str) -> None:
    before = await state(multi, "llama")
    await refuses(multi, alias, says)
    assert await state(multi, "llama") == before


async def test_a_core_that_is_stuck_before_it_warms_up_is_given_up_when_a_load_is_and_not_hours_later(
    multi: Any,
) -> None:
    """The last test of this engine."""
    from vllm.v1.engine.exceptions import EngineDeadError

    await multi.drop("qwen")
    psutil.Process(multi.core_pid).suspend()
    multi._performer.timeout_s = multi._performer.stuck_s = 0.5
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(EngineDeadError, match=r"stuck: it neither loaded a model nor gave it up in \d s"):
            await multi.preload("qwen")
