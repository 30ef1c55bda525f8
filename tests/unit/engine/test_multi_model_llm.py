"""MultiModelLLM with its LLMEngines and its core replaced: what it asks of them, and what becomes of a stuck core."""

import json
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from schemas.contexts import Tier
from service.engine import MultiModelLLM
from service.engine.models.residency import Residency
from service.engine.sync.cores import SeparateCore
from service.engine.sync.frontend import SyncFrontend
from service.scheduling.memory import Budgets

SIZES = {"weights": 60, "kv": 0, "host": 0}
ANSWER = {"stall_ms": 0.5, "phases_ms": {}, "memory": [0], "sizes": SIZES, "left": SIZES}


class Client:
    """The first model's client of a core; a stuck one answers nothing."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self.failed: list[BaseException] = []

    def call(self, command: str, arguments: tuple[Any, ...]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._core.asked.append((command, *arguments[:1]))
        if not self._core.stuck:
            answer.set_result(ANSWER)
        return answer

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)

    def close(self) -> None:
        """There is nothing to close."""


class Core(SeparateCore):
    """A core in a process of its own, which is not there."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.stuck = False
        self.stopped: list[float | None] = []
        self._clients = {0: Client(self)}
        self._processes: Any = SimpleNamespace(stop=lambda grace=None: self.stopped.append(grace), seal=json.dumps)


class LLM:
    """An LLMEngine that ends each request with its first step."""

    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={})
        self.renderer = SimpleNamespace(clear_mm_cache=lambda: None)
        self.asked: list[Any] = []
        self.asleep = False

    def add_request(self, name: str, _prompt: Any, params: Any, **_: Any) -> None:
        self.output_processor.request_states[name] = params
        self.asked.append(params)

    def step(self) -> list[Any]:
        ended = [SimpleNamespace(request_id=name, finished=True) for name in self.output_processor.request_states]
        self.output_processor.request_states.clear()
        return ended

    def sleep(self, _level: int, _mode: str) -> None:
        self.asleep = True

    def wake_up(self, _tags: Any) -> None:
        self.asleep = False

    def is_sleeping(self) -> bool:
        return self.asleep


class Model(SyncFrontend):
    """A frontend of such an LLMEngine, whose model's generation_config says a temperature."""

    def __init__(self, alias: str, key: int) -> None:
        self.alias, self.key, self.registry = alias, key, None
        said = {"temperature": 0.25}
        model = SimpleNamespace(model="/none", revision=None, max_model_len=256, get_diff_sampling_param=lambda: said)
        self.config = SimpleNamespace(
            model_config=model,
            cache_config=SimpleNamespace(kv_cache_memory_bytes=0),
            parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
            profiler_config=SimpleNamespace(profiler=None),
            speculative_config=None,
        )
        self._llm: Any = LLM()

    @property
    def ready(self) -> bool:
        return False


class Models(MultiModelLLM):
    """Two models of 60 bytes, the first one active, on a device of ``device``."""

    def __init__(self, *, device: int, **tiers: Tier) -> None:
        self._device, self._tiers = device, tiers
        super().__init__(dict.fromkeys(tiers), multiprocess_mode=True, switch_timeout_s=0.0, stuck_timeout_s=0.0)

    def _start(self, first: str, *, separate: bool) -> None:
        assert separate
        self._core = Core()
        self._frontends = {alias: Model(alias, key) for key, alias in enumerate(self._tiers)}
        self._catalog.loading = lambda alias: (alias, {})  # type: ignore[method-assign]
        self._catalog.loadable = self._catalog.require  # type: ignore[method-assign]
        residency = Residency(self._frontends, Budgets(device=self._device))
        for alias, tier in self._tiers.items():
            residency.add(alias, self._frontends[alias].config)
            residency.note(alias, tier, {"sizes": SIZES})
        self._begin(first, residency, {"pids": (2,), "sizes": SIZES}, 1)

    @property
    def core(self) -> Any:
        return self._core


def test_a_model_is_asked_without_parameters_where_one_fits_at_a_time() -> None:
    """What its generation_config says is known without its being loaded beside the active one."""
    with Models(device=100, llama=Tier.RESIDENT, qwen=Tier.DROPPED) as llm:
        assert len(llm.generate("Hello", model="qwen")) == 1
        assert [command for command in llm.core.asked if command[0] != "warming"] == [("activate", 1), ("activate", 0)]
        (params,) = llm._frontends["qwen"].llm.asked
        assert params.temperature == SamplingParams(temperature=0.25).temperature


def test_a_core_that_never_answers_is_the_end_of_the_engine_and_every_one_is_told() -> None:
    with Models(device=200, llama=Tier.RESIDENT, qwen=Tier.RESIDENT) as llm:
        core = llm.core
        core.stuck = True
        (client,) = core._clients.values()
        with pytest.raises(EngineDeadError, match="the engine core is stuck: it neither loaded a model nor gave it up"):
            llm.switch("qwen")
        assert core.stopped == [0]
        assert [type(error) for error in client.failed] == [EngineDeadError]


def test_room_is_made_for_who_wakes() -> None:
    with Models(device=100, llama=Tier.RESIDENT, qwen=Tier.RESIDENT) as llm:
        llm._changes.active = "qwen"
        llm.sleep(model="qwen")
        assert llm.wake_up(model="qwen")
        assert llm.core.asked == [("park", 0)]
        assert llm.tiers() == {"llama": Tier.PARKED, "qwen": Tier.RESIDENT}
        llm.sleep(model="llama")
        assert llm.wake_up()
        assert llm.tiers() == {"llama": Tier.PARKED, "qwen": Tier.RESIDENT}
        assert not llm.info("llama").asleep


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_model_that_was_dropped_while_it_slept_answers_when_it_is_loaded_again(level: int) -> None:
    with Models(device=200, llama=Tier.RESIDENT, qwen=Tier.RESIDENT) as llm:
        llm.sleep(level, "keep", model="qwen")
        llm.drop("qwen")
        llm._frontends["qwen"].llm.asleep = False  # its core is another one
        assert len(llm.generate("Hello", model="qwen")) == 1


@pytest.mark.parametrize("level", [0, 1])
def test_who_wants_whole_answers_of_a_model_that_sleeps_is_told_so(level: int) -> None:
    with Models(device=200, llama=Tier.RESIDENT, qwen=Tier.RESIDENT) as llm:
        llm.sleep(level, "keep", model="qwen")
        with pytest.raises(RuntimeError, match="qwen sleeps"):
            llm.generate("Hello", model="qwen")
        assert not llm.has_unfinished_requests()
        assert llm.wake_up(model="qwen")
        assert len(llm.generate("Hello", model="qwen")) == 1
