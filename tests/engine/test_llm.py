"""MultiModelLLM on the real engine, its core in a process of its own and in this one: LLMEngine's surface, by model."""

import gc
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas.contexts import Leftover, SwitchMode, Tier
from service.errors import SwitchFailed
from service.platforms.base import kv_tensors
from service.platforms.cpu import resident_bytes
from tests.support.adapters import make_adapter
from tests.support.engines import core_here
from tests.support.greedy import PROMPT, alone
from tests.support.held import shared_segments
from tests.support.profiles import traces
from tests.support.waiting import LOOKS

# With its core in this process, what vLLM and torch warn of is raised here.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
ALIASES = ("llama", "qwen", "lynx")
SERVERS = {"structured_outputs_config"}
"""Arguments that only the server's parser makes of a mapping what they are."""


def engine_args(models_path: Path) -> dict[str, Any]:
    from vllm.config import ProfilerConfig
    from vllm.engine.arg_utils import EngineArgs

    entries = json.loads(models_path.read_text())["models"]
    entries = {alias: entries[alias] for alias in (*ALIASES, "tuned", "minilm")}
    theirs = EngineArgs.__dataclass_fields__
    chosen = {
        alias: {key: entry[key] for key in entry.keys() & theirs.keys() - SERVERS} for alias, entry in entries.items()
    }
    chosen["lynx"]["profiler_config"] = ProfilerConfig(**chosen["lynx"]["profiler_config"])
    # Its arguments are wrong.
    chosen["greedy"] = {**chosen["qwen"], "max_model_len": 1 << 20}
    return {alias: EngineArgs(**values) for alias, values in chosen.items()}


class Held(list[Any]):
    """An engine, until the last test takes it; who repeats that one gets another."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__([make()])
        self._make = make

    def take(self) -> Any:
        return self.pop() if self else self._make()


@pytest.fixture(scope="module", params=["separate", "here"])
def held(request: pytest.FixtureRequest, models_path: Path) -> Iterator[Held]:
    """One engine per mode."""
    from service.engine import MultiModelLLM
    from tests.support.loggers import Tally

    arguments = engine_args(models_path)
    options = {"stat_loggers": [Tally], "device_memory_bytes": 8 << 30}
    separate = request.param == "separate"
    with nullcontext() if separate else core_here(heap_is_the_callers=True):
        options |= {"enable_multiprocessing": True} if separate else {}
        keeper = Held(partial(MultiModelLLM.from_engine_args, arguments, **options))
        yield keeper
        for each in keeper:
            each.shutdown()


@pytest.fixture
def llm(held: Held) -> Any:
    """The mode's engine, ``llama`` active and nothing running."""
    (llm,) = held
    llm.switch("llama")
    assert not llm.has_unfinished_requests()
    assert not llm.get_num_unfinished_requests()
    return llm


def params(tokens: int = 24, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **more})


def said(llm: Any, alias: str, prompt: str = PROMPT, tokens: int = 24) -> tuple[int, ...]:
    (output,) = llm.generate(prompt, params(tokens), model=alias)
    return tuple(output.outputs[0].token_ids)


class Asked:
    """A request whose outputs are taken from ``step``, among others'."""

    def __init__(self, llm: Any, alias: str, tokens: int, **more: Any) -> None:
        self.llm, self.alias, self.id = llm, alias, f"asked-{os.urandom(4).hex()}"
        self.output: Any = None
        llm.add_request(self.id, PROMPT, params(tokens, **more), model=alias)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.output.outputs[0].token_ids) if self.output is not None else ()

    @property
    def finished(self) -> bool:
        return self.output is not None and self.output.finished

    def has(self, tokens: int) -> "Asked":
        while len(self.tokens) < tokens and not self.finished:
            self.take(self.llm.step())
        return self

    def take(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.request_id == self.id:
                self.output = output

    def take_what_came(self) -> None:
        """Of a frozen one: there is nothing to wait for."""
        while outputs := self.llm.step():
            self.take(outputs)

    def end(self) -> tuple[int, ...]:
        while not self.finished:
            self.take(self.llm.step())
        return self.tokens


async def test_its_words_are_those_of_the_asynchronous_engine(multi: Any, llm: Any) -> None:
    expected = {alias: await alone(multi, alias) for alias in ALIASES}
    assert {alias: said(llm, alias) for alias in ALIASES} == expected
    for alias in (*ALIASES, *reversed(ALIASES)):
        llm.switch(alias)
        assert said(llm, alias) == expected[alias]


def test_a_request_that_switches_interrupt_goes_on_with_the_same_tokens(llm: Any) -> None:
    expected = said(llm, "llama", tokens=120)
    llm.preload("qwen")
    for _ in range(LOOKS):
        asked = Asked(llm, "llama", 120).has(10)
        report = llm.switch("qwen")
        assert said(llm, "qwen") != expected[:24]
        asked.take_what_came()  # a core of its own may have been ahead when the switch was asked
        if not asked.finished:
            break
        llm.switch("llama")
    assert (report.kept, report.tier_found, report.switched) == (1, Tier.RESIDENT, True)
    frozen_at = len(asked.tokens)
    assert 10 <= frozen_at < 120
    assert said(llm, "qwen") != expected[:24]
    asked.take_what_came()
    assert len(asked.tokens) == frozen_at
    llm.switch("llama")
    assert asked.end() == expected
    assert report.core_pid == llm.core_pid
    assert report.worker_pids == llm.worker_pids


def test_the_model_that_it_was_started_with_is_loaded_again_after_a_drop(llm: Any) -> None:
    expected = said(llm, "llama")
    llm.switch("qwen")
    assert llm.drop("llama").tier is Tier.DROPPED
    assert said(llm, "llama") == expected


@pytest.fixture
def here(llm: Any) -> Any:
    """An engine whose core is in this process, where a fault can be put into it."""
    if llm.core_pid:
        pytest.skip("the core is another process")
    return llm


def test_a_fault_in_the_midst_of_the_swap_leaves_the_model_that_was_active(here: Any) -> None:
    expected = said(here, "llama", tokens=60), said(here, "qwen")
    here.switch("llama")
    asked = Asked(here, "llama", 60).has(5)
    live = here._core.contexts.live
    known, live._process_names = live._process_names, live._process_names | {"what no core has"}
    try:
        with pytest.raises(SwitchFailed, match=r"from llama to qwen: .*what no core has"):
            here.switch("qwen")
    finally:
        live._process_names = known
    assert here.active == "llama"
    assert asked.end() == expected[0]
    here.switch("qwen")
    assert said(here, "qwen") == expected[1]


def test_a_step_that_fails_while_a_switch_waits_for_it_ends_its_own_requests_only(here: Any) -> None:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.output import SchedulerOutput

    expected = said(here, "llama")
    core = here._core.contexts.active.core
    failed: Future[Any] = Future()
    failed.set_exception(MemoryError("no memory to run"))
    under_way = {"batch_queue": deque([(failed, SchedulerOutput.make_empty(), failed)]), "batch_queue_size": 2}
    plain = {name: vars(core)[name] for name in (*under_way, "step_fn")}
    vars(core).update(under_way, step_fn=core.step_with_batch_queue)
    try:
        assert here.switch("qwen").switched
    finally:
        vars(core).update(plain)
    assert here.switch("llama").switched
    assert core.scheduler.pause_state == PauseState.UNPAUSED
    assert said(here, "llama") == expected


def test_a_loop_of_steps_ends_with_the_active_models_requests(llm: Any) -> None:
    expected = said(llm, "qwen", tokens=40)
    frozen, asked = Asked(llm, "qwen", 40), Asked(llm, "llama", 24)
    while llm.has_unfinished_requests():
        asked.take(llm.step())
    assert (asked.finished, frozen.finished) == (True, False)
    assert llm.step() == []
    assert llm.has_unfinished_requests(model="qwen")
    assert not llm.has_unfinished_requests(model="llama")
    assert llm.get_num_unfinished_requests() == llm.get_num_unfinished_requests(model="qwen") == 1
    assert llm.info("qwen").unfinished == 1
    llm.switch("qwen")
    while llm.has_unfinished_requests():
        frozen.take(llm.step())
    assert frozen.tokens == expected


def test_a_loop_of_steps_does_not_wait_for_a_model_that_sleeps(llm: Any) -> None:
    llm.sleep(1, "keep", model="llama")
    asleep = Asked(llm, "llama", 4)
    while llm.has_unfinished_requests():
        assert llm.step() == []  # a core that is another process may have told statistics
    assert llm.wake_up(model="llama")
    assert llm.has_unfinished_requests()
    assert len(asleep.end()) == 4


def test_a_frozen_request_that_is_aborted_is_forgotten_by_the_core_too(llm: Any) -> None:
    asked = Asked(llm, "qwen", 500)
    llm.abort_request([asked.id])
    assert not llm.has_unfinished_requests(model="qwen")
    # The core ends it between two steps: a few questions later it knows of none.
    assert any(_unfinished_in_core(llm) == 0 for _ in range(1000))


def _unfinished_in_core(llm: Any) -> int:
    return sum(context["unfinished"] for context in llm.describe()["contexts"])


def test_several_samples_of_a_request_come_together_and_end_together(llm: Any) -> None:
    from vllm.sampling_params import RequestOutputKind

    asked = Asked(llm, "llama", 12, n=3, temperature=0.8, seed=1, output_kind=RequestOutputKind.FINAL_ONLY)
    assert llm.get_num_unfinished_requests() == 3
    asked.end()
    assert [len(sample.token_ids) for sample in asked.output.outputs] == [12, 12, 12]
    asked = Asked(llm, "llama", 500, n=3, temperature=0.8, seed=1)
    llm.switch("qwen")
    llm.abort_request([asked.id], model="llama")
    assert llm.get_num_unfinished_requests() == 0


def test_whole_answers_come_in_order_whichever_model_is_active(llm: Any) -> None:
    other = Asked(llm, "llama", 40).has(2)
    prompts = ["One", "Two", {"prompt": "Three"}, llm.get_tokenizer(model="qwen").encode("Four")]
    outputs = llm.generate(prompts, [params(3 + n) for n in range(4)], model="qwen", priority=0)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 4, 5, 6]
    assert all(output.finished for output in outputs)
    assert llm.current_model == "llama"
    assert other.end() == said(llm, "llama", tokens=40)
    with pytest.raises(ValueError, match="params: 1 for 2 prompts"):
        llm.generate(["One", "Two"], [params()])
    assert llm.generate([]) == []
    assert not llm.has_unfinished_requests()


def test_outputs_that_come_while_something_else_is_waited_for_are_there_at_the_next_step(llm: Any) -> None:
    asked = Asked(llm, "llama", 4)
    said(llm, "llama", tokens=40)
    assert llm.has_unfinished_requests()
    assert len(asked.end()) == 4
    assert not llm.has_unfinished_requests()


def test_a_pooling_model_answers_beside_generators(llm: Any) -> None:
    (output,) = llm.encode("hello", pooling_task="embed", model="minilm")
    assert output.outputs.data.shape == (384,)
    assert set(llm.get_supported_tasks()) == {"generate"}
    assert "embed" in llm.get_supported_tasks(model="minilm")
    with pytest.raises(AssertionError, match="Stat logging disabled"):
        llm.get_metrics(model="minilm")
    with pytest.raises(Exception, match="does not support pooling"):
        llm.encode("hello", pooling_task="embed")
    assert not llm.has_unfinished_requests()


def test_an_adapter_is_its_models_alone_and_survives_switches(llm: Any, models_path: Path, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    entries = json.loads(models_path.read_text())["models"]
    make_adapter(tmp_path / "random", Path(entries["tuned"]["model"]))
    accent = LoRARequest("accent", 1, str(tmp_path / "random"))
    plain = said(llm, "tuned")
    assert llm.add_lora(accent, model="tuned")
    assert set(llm.list_loras(model="tuned")) == {1}
    assert llm.pin_lora(1, model="tuned")

    def accented() -> tuple[int, ...]:
        (output,) = llm.generate(PROMPT, params(), lora_request=accent, model="tuned")
        return tuple(output.outputs[0].token_ids)

    heard = accented()
    assert heard != plain
    llm.switch("qwen")
    assert accented() == heard
    assert llm.remove_lora(1, model="tuned")
    assert not llm.list_loras(model="tuned")
    assert said(llm, "tuned") == plain


def sizes(llm: Any, alias: str) -> dict[str, int]:
    return next(each for each in llm.describe()["contexts"] if each["key"] == llm._frontend(alias).key)


@pytest.mark.parametrize("level", [1, 2])
def test_what_sleeps_is_not_stepped_and_wakes_as_it_was(llm: Any, level: int) -> None:
    expected = said(llm, "llama")
    llm.preload("qwen")
    llm.sleep(level, model="llama")
    assert llm.is_sleeping(model="llama")
    assert not llm.is_sleeping(model="qwen")
    asleep = Asked(llm, "llama", 24)
    assert llm.step() == []
    assert not llm.wake_up(["weights"], model="llama")
    assert llm.step() == []
    assert said(llm, "qwen")
    assert llm.wake_up(["kv_cache"], model="llama")
    assert asleep.end() == expected


def test_a_core_that_does_not_say_that_it_warms_up_has_no_more_time_for_it(llm: Any) -> None:
    if not llm.core_pid:
        pytest.skip("a core in this process is not waited for")
    core = psutil.Process(llm.core_pid)
    core.suspend()
    try:
        with pytest.raises(TimeoutError):
            llm._core.answer("describe", (), timeout_s=0.5, warm_up_s=600.0)
    finally:
        core.resume()
    assert llm._core.ask("describe", timeout_s=30.0, warm_up_s=600.0)["contexts"]


def test_callables_reach_the_workers_of_a_frozen_model(llm: Any) -> None:
    assert llm.apply_model(lambda model: type(model).__name__, model="qwen") == ["Qwen3ForCausalLM"]
    assert llm.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]
    (names,) = llm.collective_rpc(lambda worker, *, end: type(worker).__name__ + end, kwargs={"end": "!"})
    assert names == "WorkerWrapperBase!"
    with pytest.raises(Exception, match="modulo by zero"):
        llm.apply_model(lambda model: 1 // 0, model="qwen")
    assert llm.current_model == "llama"
    assert len(said(llm, "llama")) == 24


def test_a_drained_models_last_words_wait_for_the_next_step(llm: Any) -> None:
    expected = said(llm, "llama", tokens=20)
    asked = Asked(llm, "llama", 20).has(2)
    report = llm.switch("qwen", mode=SwitchMode.DRAIN)
    assert (report.kept, report.aborted) == (0, 0)
    assert llm.has_unfinished_requests(model="llama")
    assert asked.end() == expected
    asked = Asked(llm, "qwen", 500).has(2)
    report = llm.switch("llama", mode=SwitchMode.DRAIN, drain_timeout=0, leftover=Leftover.KEEP)
    assert report.kept == 1
    assert llm.switch("qwen").switched
    report = llm.switch("llama", mode=SwitchMode.ABORT)
    assert (report.kept, report.aborted) == (0, 1)
    assert not llm.has_unfinished_requests()


def test_contexts_move_between_tiers_and_a_failed_switch_changes_nothing(llm: Any) -> None:
    expected = said(llm, "llama", tokens=40)
    asked = Asked(llm, "llama", 40).has(3)
    with pytest.raises(SwitchFailed, match="Failed to switch model from llama to greedy: "):
        llm.switch("greedy")
    with pytest.raises(ValueError, match=r"Model 'lama' not found.*did you mean 'llama'"):
        llm.switch("lama")
    with pytest.raises(ValueError, match="negative"):
        llm.switch("qwen", drain_timeout=-1)
    with pytest.raises(SwitchFailed, match="llama can't be parked"):
        llm.park("llama")
    assert llm.park("qwen").tier is Tier.PARKED
    assert llm.drop("lynx").tier is Tier.DROPPED
    assert llm.pin("qwen").pinned
    assert not llm.pin("qwen", False).pinned
    assert asked.end() == expected
    assert llm.get_tokenizer(model="lynx").encode("loaded again")
    assert llm.info("lynx").tier is Tier.RESIDENT
    assert llm.switch("qwen").tier_found is Tier.PARKED
    assert not llm.switch("qwen").switched


def test_every_other_operation_reaches_the_model_that_it_names(llm: Any) -> None:
    from tests.support.loggers import Tally

    for alias in ALIASES:
        assert llm.context(alias).model_config.model == llm.get_vllm_config(alias).model_config.model
        assert llm.reset_prefix_cache(reset_running_requests=False, reset_connector=False, model=alias)
        llm.reset_mm_cache(model=alias)
        llm.reset_encoder_cache(model=alias)
        assert said(llm, alias)
        generated = [m for m in llm.get_metrics(model=alias) if m.name == "vllm:generation_tokens"]
        assert sum(metric.value for metric in generated) >= 24
        assert len(llm.get_tokenizer(model=alias).encode("hello")) > 0
    before = Tally.logged.copy()
    llm.do_log_stats()
    paths = {llm.context(alias).model_config.model for alias in ("qwen", "lynx")}  # no other alias has these
    assert {path: Tally.logged[path] - before[path] for path in paths} == dict.fromkeys(paths, 1)
    llm.do_log_stats_with_interval()
    before = Tally.logged.copy()
    for alias in ALIASES:
        llm.context(alias)._last_log_time = 0.0  # long ago
    llm.do_log_stats_with_interval()
    assert {path: Tally.logged[path] - before[path] for path in paths} == dict.fromkeys(paths, 1)
    llm.do_log_stats_with_interval()
    assert {path: Tally.logged[path] - before[path] for path in paths} == dict.fromkeys(paths, 1)
    assert llm.available_models == [*ALIASES, "tuned", "minilm", "greedy"]
    assert llm.tokenizer is llm.context("llama").tokenizer
    assert llm.vllm_config is llm.context().vllm_config
    assert {info.alias for info in llm.contexts() if info.active} == {"llama"}


def test_whatever_an_llm_engine_has_the_engine_has_too(llm: Any) -> None:
    for alias in ("llama", "qwen"):
        llm.switch(alias)
        theirs = {name: value for name, value in vars(llm.context(alias)).items() if not name.startswith("_")}
        assert {name: getattr(llm, name) for name in theirs} == theirs


def test_the_executor_of_a_core_in_this_process_runs_the_active_models_workers(here: Any) -> None:
    for alias, kind in (("llama", "LlamaForCausalLM"), ("qwen", "Qwen3ForCausalLM")):
        here.switch(alias)
        assert here.model_executor.collective_rpc(lambda worker: type(worker.get_model()).__name__) == [kind]


def test_a_stat_logger_hears_of_its_own_models_tokens(llm: Any) -> None:
    from tests.support.loggers import Tally

    paths = {alias: llm.get_vllm_config(alias).model_config.model for alias in ("llama", "qwen")}
    before = Tally.generated.copy()
    said(llm, "qwen", tokens=30)
    assert {alias: Tally.generated[path] - before[path] for alias, path in paths.items()} == {"llama": 0, "qwen": 30}


def test_a_profile_is_what_the_workers_did_meanwhile(llm: Any, profiles: Path) -> None:
    before = traces(profiles)
    llm.start_profile(model="lynx")
    said(llm, "llama", tokens=2)
    llm.stop_profile()
    assert [b"aten::" in trace for name, trace in traces(profiles).items() if name not in before] == [True]


def fill(worker: Any) -> None:
    """Called in the workers: the system gives memory to what is written."""
    for each in kv_tensors(worker):
        each.fill_(1)


@pytest.mark.delicate
def test_deleting_it_frees_every_context(held: Held) -> None:
    """The last test of each engine."""
    llm = held.take()
    for alias in ALIASES:
        llm.switch(alias)
        llm.collective_rpc(fill, model=alias)
    others = [psutil.Process(pid) for pid in {llm.core_pid, *llm.worker_pids} - {0, os.getpid()}]
    kv_bytes = sum(info.kv_bytes for info in llm.contexts() if info.tier is Tier.RESIDENT)
    assert kv_bytes > 0.99 * len(ALIASES) * (64 << 20)
    before, segments = resident_bytes(os.getpid()), {name for each in others for name in shared_segments(each.pid)}
    started = time.perf_counter()
    del llm
    gc.collect()
    assert [each.pid for each in others if each.is_running()] == []
    assert [name for name in segments if Path(name).exists()] == []
    assert time.perf_counter() - started < 60  # vLLM kills a worker that hangs
    if not others:
        assert before - resident_bytes(os.getpid()) > 0.9 * kv_bytes
