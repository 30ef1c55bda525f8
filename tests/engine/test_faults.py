"""Steps of a load, a wake, a park or a drop fail in a worker: nothing of them is left, and nobody else notices.

Core and worker are in this process, so that each step can be broken where it is.
"""

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from schemas.contexts import Tier
from service.errors import SwitchFailed
from service.platforms.cpu import resident_bytes
from tests.support.engines import core_here
from tests.support.greedy import PROMPT

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
MIB = 1 << 20
KV = 64 * MIB


@pytest.fixture(scope="module")
def started(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from vllm.engine.arg_utils import EngineArgs

    from service.engine import MultiModelLLM

    common = {"max_model_len": 1024, "dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": KV}
    empty = tmp_path_factory.mktemp("faults") / "weightless"
    shutil.copytree(models["qwen"], empty, ignore=shutil.ignore_patterns("*.safetensors"))
    arguments = {
        "llama": EngineArgs(model=str(models["llama"]), enforce_eager=True, **common),
        "qwen": EngineArgs(model=str(models["qwen"]), enforce_eager=True, **common),
        "compiled": EngineArgs(model=str(models["lynx"]), **common),
        "weightless": EngineArgs(model=str(empty), enforce_eager=True, **common),
    }
    with core_here():
        llm = MultiModelLLM.from_engine_args(arguments, device_memory_bytes=1 << 60)
        yield llm
        llm.shutdown()


@pytest.fixture
def llm(started: Any) -> Any:
    """With ``llama`` and ``qwen`` loaded, ``llama`` active and nothing running."""
    started.preload("qwen")
    started.switch("llama")
    assert not started.has_unfinished_requests()
    return started


def params(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def said(llm: Any, alias: str, tokens: int = 24) -> tuple[int, ...]:
    llm.switch(alias)
    (output,) = llm.generate(PROMPT, params(tokens), model=alias)
    return tuple(output.outputs[0].token_ids)


class Running:
    """A request that has begun."""

    def __init__(self, llm: Any, alias: str, tokens: int) -> None:
        self._llm, self.id, self.tokens, self.finished = llm, f"{alias}-{os.urandom(4).hex()}", (), False
        llm.switch(alias)
        llm.add_request(self.id, PROMPT, params(tokens), model=alias)
        while not self.tokens:
            self._take()

    def _take(self) -> None:
        for output in self._llm.step():
            if output.request_id == self.id:
                self.tokens, self.finished = tuple(output.outputs[0].token_ids), output.finished

    def end(self, alias: str) -> tuple[int, ...]:
        self._llm.switch(alias)
        while not self.finished:
            self._take()
        return self.tokens


def held() -> int:
    gc.collect()
    return resident_bytes("self")


@contextmanager
def failing(owner: Any, name: str, *, whole: bool) -> Iterator[list[str]]:
    """A step raises inside, after its work where that is ``whole``; how often it did."""
    theirs, failed = getattr(owner, name), []

    def fail(*given: Any, **more: Any) -> Any:
        if whole:
            theirs(*given, **more)
        failed.append(name)
        raise MemoryError(f"no memory for {name}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield failed


def worker_class() -> Any:
    from vllm.v1.worker.cpu_worker import CPUWorker

    return CPUWorker


def runner_class() -> Any:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    return CPUModelRunner


LOADING = [
    pytest.param(worker_class, "init_device", marks=pytest.mark.long),
    pytest.param(worker_class, "load_model", marks=pytest.mark.long),
    pytest.param(runner_class, "load_model", marks=pytest.mark.long),
    (worker_class, "initialize_from_config"),
    pytest.param(worker_class, "compile_or_warm_up_model", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("owner", "step"), LOADING)
def test_a_load_that_fails_at_any_step_leaves_nothing_and_disturbs_nobody(llm: Any, owner: Any, step: str) -> None:
    expected = {alias: said(llm, alias, 100) for alias in ("qwen", "llama")}
    llm.drop("qwen")
    request = Running(llm, "llama", 100)
    sizes = []
    with failing(owner(), step, whole=True) as failed:
        for _ in range(5):
            with pytest.raises(SwitchFailed, match=f"no memory for {step}"):
                llm.switch("qwen")
            sizes.append(held())
    assert len(failed) == 5
    assert llm.active == "llama"
    assert llm.info("qwen").tier is Tier.DROPPED
    assert request.end("llama") == expected["llama"]
    assert sizes[-1] - sizes[1] < KV // 4
    assert said(llm, "qwen", 100) == expected["qwen"]


def owner_of(name: str) -> Any:
    """The module or class of ours that has a step."""
    from service.engine.core import context, contexts
    from service.engine.versions import held as module_state
    from service.engine.versions import vllm_worker
    from service.engine.worker import calls

    owners = (context.LiveCore, contexts.Contexts, calls, vllm_worker, module_state)
    return next(owner for owner in owners if hasattr(owner, name))


CORE = [pytest.param(step, marks=pytest.mark.long) for step in ("make_expert_groups", "put", "_measure", "memory")]


@pytest.mark.parametrize("step", ["take", "build", *CORE])
def test_a_load_that_fails_in_the_core_or_between_two_models_leaves_nothing_either(llm: Any, step: str) -> None:
    """``build`` is the core's half; measured is what has been loaded."""
    expected = {alias: said(llm, alias, 100) for alias in ("qwen", "llama")}
    llm.drop("qwen")
    request = Running(llm, "llama", 100)
    sizes = []
    with failing(owner_of(step), step, whole=True) as failed:
        for ask in (llm.switch, llm.preload, llm.switch):
            with pytest.raises(SwitchFailed, match=f"no memory for {step}"):
                ask("qwen")
            sizes.append(held())
    assert len(failed) >= 3
    assert llm.active == "llama"
    assert llm.info("qwen").tier is Tier.DROPPED
    assert [context["loaded"] for context in llm.describe()["contexts"]].count(True) == 1
    assert request.end("llama") == expected["llama"]
    assert sizes[-1] - sizes[0] < KV // 4
    assert said(llm, "qwen", 100) == expected["qwen"]


def platform() -> Any:
    from service.platforms import current

    return current()


@pytest.mark.parametrize(
    "whole", [pytest.param(False, id="before its work", marks=pytest.mark.long), pytest.param(True, id="after it")]
)
@pytest.mark.parametrize("step", ["park", "wake"])
def test_parking_or_waking_that_fails_leaves_the_model_where_it_was_with_its_requests(
    llm: Any, step: str, whole: bool
) -> None:
    expected = {alias: said(llm, alias, 200) for alias in ("llama", "qwen")}
    frozen, running = Running(llm, "qwen", 200), Running(llm, "llama", 200)
    if step == "wake":
        llm.park("qwen")
    before = held()
    with failing(platform(), step, whole=whole) as failed, pytest.raises(SwitchFailed, match=f"no memory for {step}"):
        (llm.park if step == "park" else llm.preload)("qwen")
    assert len(failed) == 1
    assert llm.info("qwen").tier is (Tier.RESIDENT if step == "park" else Tier.PARKED)
    assert held() - before < KV // 2
    assert running.end("llama") == expected["llama"]
    assert frozen.end("qwen") == expected["qwen"]


def test_what_fails_while_a_model_is_dropped_does_not_keep_its_memory(llm: Any) -> None:
    expected = {alias: said(llm, alias) for alias in ("qwen", "llama")}
    sizes = []
    with failing(platform(), "release", whole=False) as failed:
        for number in range(1, 5):
            llm.drop("qwen")
            assert llm.info("qwen").tier is Tier.DROPPED
            assert len(failed) == number
            sizes.append(held())
            llm.preload("qwen")
    assert sizes[-1] - sizes[1] < KV // 4
    assert said(llm, "llama") == expected["llama"]
    assert said(llm, "qwen") == expected["qwen"]


def test_a_model_that_can_not_be_seated_any_more_can_be_dropped(llm: Any) -> None:
    expected = {alias: said(llm, alias) for alias in ("qwen", "llama")}
    with failing(platform(), "enter", whole=False):
        llm.drop("qwen")
    assert llm.info("qwen").tier is Tier.DROPPED
    assert said(llm, "llama") == expected["llama"]
    assert said(llm, "qwen") == expected["qwen"]


def compiled_models() -> int:
    """How many compiled models there are, alive or pinned."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    gc.unfreeze()
    gc.collect()
    return sum(isinstance(each, TorchCompileWithNoGuardsWrapper) for each in gc.get_objects())


@pytest.mark.timeout(900)
@pytest.mark.compiled
def test_a_compiled_model_that_was_dropped_or_emptied_or_could_not_be_loaded_is_gone(llm: Any) -> None:
    before = compiled_models()
    expected = said(llm, "compiled")
    assert compiled_models() > before
    llm.switch("llama")
    llm.sleep(2, model="compiled")
    assert compiled_models() == before
    llm.wake_up(model="compiled")
    assert said(llm, "compiled") == expected
    llm.switch("llama")
    llm.drop("compiled")
    assert compiled_models() == before
    with failing(worker_class(), "load_model", whole=True), pytest.raises(SwitchFailed):
        llm.switch("compiled")
    assert compiled_models() == before


def test_a_model_that_can_not_be_parked_makes_room_by_going(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test of this engine."""
    from service.scheduling.memory import Budgets

    expected = {alias: said(llm, alias) for alias in ("qwen", "llama")}
    for alias in ("qwen", "compiled"):
        llm.drop(alias)
    monkeypatch.setattr(platform(), "parks", lambda worker: False, raising=False)
    llm.switch("qwen")
    llm.drop("llama")
    monkeypatch.setattr(llm._residency, "budgets", Budgets(device=KV * 3 // 2, shared=True))
    llm.switch("llama")
    assert llm.info("qwen").tier is Tier.DROPPED
    assert said(llm, "llama") == expected["llama"]
    with pytest.raises(SwitchFailed, match="any model weights"):
        llm.switch("weightless")
    assert llm.active == "llama"
    assert said(llm, "llama") == expected["llama"]  # loaded again
    assert said(llm, "qwen") == expected["qwen"]
    assert llm.info("llama").tier is Tier.DROPPED
