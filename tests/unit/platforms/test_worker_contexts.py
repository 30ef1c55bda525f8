"""A worker process's models with a vLLM worker that only says what is done to it: the order, the environment, the way
back from each failure. Weights, tokens and devices: tests/engine.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from service.engine.worker.calls import Failure, call, park, seat
from service.engine.worker.contexts import WorkerContexts
from service.platforms.base import KV_CACHE, WEIGHTS, Asleep, Platform
from tests.support.judge import judge

PATH = "/calibrated/quant.json"


class Worker:
    """vLLM's worker as far as its process drives it. ``fails`` names a step that does not work."""

    said: list[tuple[str, str | None]] = []  # noqa: RUF012 - emptied by the fixture
    fails: str | None = None

    def __init__(self, vllm_config: Any, **where: Any) -> None:
        self.vllm_config = vllm_config
        self.local_rank = self.rank = 0
        self.distributed_init_method = ""
        self.is_driver_worker = True
        self.model_runner = None
        self._step("built")

    def init_device(self) -> None:
        self._step("device")

    def load_model(self) -> None:
        self._step("weights")

    def _step(self, name: str) -> None:
        self.said.append((name, os.environ.get("QUANT_CONFIG")))
        if self.fails == name:
            raise RuntimeError(f"no {name}")


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> WorkerContexts:
    """A process with its first model, whose QUANT_CONFIG is the caller's."""
    monkeypatch.setenv("QUANT_CONFIG", "/callers.json")
    monkeypatch.setattr(Worker, "fails", None)
    first = Worker(config())
    Worker.said.clear()
    return WorkerContexts(SimpleNamespace(worker=first, vllm_config=first.vllm_config, mm_receiver_cache=None))


def config() -> Any:
    from vllm.config import VllmConfig

    made = VllmConfig()
    made.model_config = SimpleNamespace(
        is_multimodal_model=False, supports_multimodal_inputs=False, is_hybrid=False, is_moe=False
    )  # type: ignore[assignment]
    return made


@judge("vllm-gaudi", "test_initialize_and_switch_reconfigures_engine")
def test_a_model_is_built_with_its_own_quant_config_in_place_from_the_start(contexts: WorkerContexts) -> None:
    contexts.load(1, config(), {"QUANT_CONFIG": PATH})
    assert Worker.said == [("built", PATH), ("device", PATH), ("weights", PATH)]
    contexts.load(2, config(), {"QUANT_CONFIG": None})
    assert Worker.said[3:] == [("built", None), ("device", None), ("weights", None)]


def test_a_loaded_model_sits_in_the_wrapper_with_its_configuration(contexts: WorkerContexts) -> None:
    first, loaded = contexts.wrapper.worker, config()
    contexts.load(1, loaded, {})
    assert contexts.wrapper.worker is not first
    assert contexts.wrapper.vllm_config is loaded
    contexts.seat(0)
    assert contexts.wrapper.worker is first


def test_weights_that_change_while_their_model_is_brought_back_are_copied_anew(contexts: WorkerContexts) -> None:
    contexts.load(1, config(), {})
    context, context.waking = contexts.by_key[1], Future()
    context.weights_away, context.asleep.host = True, {1: "what they were"}
    context.waking.set_result(None)
    contexts.weights_change(1)
    assert (context.weights_away, context.asleep.host) == (False, {})


def test_how_large_weights_are_is_looked_at_again_where_they_may_have_changed(
    contexts: WorkerContexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def load_model(worker: Worker) -> None:
        worker.model_runner = SimpleNamespace(model=torch.nn.Linear(4, 4, bias=False), kv_caches=[])

    monkeypatch.setattr(Worker, "load_model", load_model)
    contexts.load(1, config(), {})
    assert contexts.sizes(1)["weights"] == 64
    contexts.weights_change(1)
    contexts.by_key[1].worker.model_runner.model.weight.data = torch.ones(4, 8)
    assert contexts.sizes(1)["weights"] == 128
    contexts.park(1, 1)
    assert contexts.sizes(1)["weights"] == 128
    contexts.wake(1, frozenset({WEIGHTS, KV_CACHE}))
    assert contexts.sizes(1)["weights"] == 128
    contexts.park(1, 2)
    assert contexts.sizes(1)["weights"] == 0
    contexts.wake(1, frozenset({WEIGHTS}))
    assert contexts.sizes(1)["weights"] == 64


def test_an_environment_comes_and_goes_with_its_model(contexts: WorkerContexts) -> None:
    contexts.load(1, config(), {"QUANT_CONFIG": PATH})
    seen = []
    for key in (0, 1, 0):
        contexts.seat(key)
        seen.append(os.environ.get("QUANT_CONFIG"))
    assert seen == ["/callers.json", PATH, "/callers.json"]


@pytest.mark.parametrize("step", ["built", "device", "weights"])
@judge("vllm-gaudi", "test_gaudi_reconfigure_engine_skips_restore_without_stash_marker")
def test_a_load_that_fails_leaves_the_model_before_it_and_its_environment(
    contexts: WorkerContexts, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = (contexts.wrapper.worker, contexts.wrapper.vllm_config)
    monkeypatch.setattr(Worker, "fails", step)
    with pytest.raises(RuntimeError, match=f"no {step}"):
        contexts.load(1, config(), {"QUANT_CONFIG": PATH})
    assert (contexts.wrapper.worker, contexts.wrapper.vllm_config) == before
    assert os.environ["QUANT_CONFIG"] == "/callers.json"
    assert set(contexts.by_key) == {0}
    monkeypatch.setattr(Worker, "fails", None)
    contexts.load(1, config(), {})
    assert contexts.active == 1


@pytest.mark.parametrize("asleep", [False, True])
def test_nothing_that_may_need_its_weights_is_run_on_a_model_whose_weights_are_away(
    contexts: WorkerContexts, monkeypatch: pytest.MonkeyPatch, asleep: bool
) -> None:
    """On a device that they leave, others have that memory meanwhile, or nobody has: there is no telling which."""
    ran: list[str] = []
    wrapper = contexts.wrapper
    vars(wrapper).update(gearshift=contexts, **{name: partial(ran.append, name) for name in ("reload", "list_loras")})
    contexts.load(1, config(), {})
    contexts.seat(0)
    away = contexts.by_key[1]
    away.weights_away, away.emptied = not asleep, {WEIGHTS} if asleep else set()
    for method in ("reload", cloudpickle.dumps(lambda _worker: ran.append("a function"))):
        refused = call(wrapper, 1, method, (), {})
        assert isinstance(refused, Failure)
        assert "not on the device" in refused.message
    assert call(wrapper, 1, "list_loras", (), {}) is None
    away.weights_away, away.emptied = False, set()
    assert call(wrapper, 1, "reload", (), {}) is None
    assert ran == ["list_loras", "reload"]


def test_seating_a_model_that_is_not_there_changes_nothing(contexts: WorkerContexts) -> None:
    with pytest.raises(KeyError):
        contexts.forget(7)
    assert contexts.active == 0


@pytest.fixture
def broken(contexts: WorkerContexts, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The wrapper of a process with two models, of which the second could not be seated."""
    wrapper = contexts.wrapper
    vars(wrapper)["gearshift"] = contexts
    contexts.load(1, config(), {"QUANT_CONFIG": PATH})
    assert seat(wrapper, 0) is None
    with monkeypatch.context() as fault:
        fault.setattr(contexts.platform, "enter", lambda _worker: 1 / 0)
        assert str(seat(wrapper, 1)) == "ZeroDivisionError: division by zero"
    return wrapper


def test_where_a_model_can_not_be_seated_nothing_runs_on_another_one_until_one_is(
    contexts: WorkerContexts, broken: Any
) -> None:
    with pytest.raises(RuntimeError, match="no model is seated: division by zero"):
        broken.worker.execute_model()
    for key in (0, 1):
        assert seat(broken, key) is None
        assert broken.worker is contexts.by_key[key].worker


def test_what_is_done_to_other_models_meanwhile_is_done_and_seats_none(contexts: WorkerContexts, broken: Any) -> None:
    parked: list[Any] = []
    contexts.platform.park = lambda worker, *_: parked.append(worker)  # type: ignore[method-assign]
    contexts.platform.kv_bytes = lambda _worker: 7  # type: ignore[method-assign]
    try:
        assert park(broken, 1, 1)["kv"] == 7
    finally:
        del contexts.platform.park, contexts.platform.kv_bytes
    assert parked == [contexts.by_key[1].worker]
    contexts.forget(1)
    assert set(contexts.by_key) == {0}
    with pytest.raises(RuntimeError, match="no model is seated"):
        broken.worker.execute_model()
    contexts.load(2, config(), {})
    assert broken.worker is contexts.by_key[2].worker


def test_a_load_that_fails_where_none_is_seated_seats_none(
    contexts: WorkerContexts, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as fault:
        fault.setattr(Worker, "fails", "weights")
        with pytest.raises(RuntimeError, match="no weights"):
            contexts.load(2, config(), {})
    with pytest.raises(RuntimeError, match="no model is seated"):
        broken.worker.execute_model()
    contexts.seat(0)
    assert os.environ["QUANT_CONFIG"] == "/callers.json"


def test_at_the_end_every_model_is_let_go_of_but_the_one_that_vllm_ends_itself(contexts: WorkerContexts) -> None:
    for key in (1, 2):
        contexts.load(key, config(), {"QUANT_CONFIG": PATH})
    workers = [context.worker for context in contexts.by_key.values()]
    for worker in workers:
        worker.model_runner = "its tensors"
    contexts.seat(1)
    contexts.forget_others()
    assert set(contexts.by_key) == {1}
    assert [worker.model_runner for worker in workers] == [None, "its tensors", None]
    assert os.environ["QUANT_CONFIG"] == PATH


def test_every_models_worker_is_made_with_the_rank_that_the_platform_gives(
    contexts: WorkerContexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    plain = Worker.__init__

    def remember(worker: Worker, vllm_config: Any, **where: Any) -> None:
        made.append(where["local_rank"])
        plain(worker, vllm_config, **where)

    monkeypatch.setattr(Worker, "__init__", remember)
    monkeypatch.setattr(type(contexts.platform), "local_rank", lambda _platform, _worker: 5)
    for key in (1, 2):
        contexts.load(key, config(), {})
    assert made == [5, 5]


def test_vllm_reads_its_variables_anew_for_each_model(contexts: WorkerContexts) -> None:
    """Once it serves it remembers them, and a model would be built and run with another one's."""
    from vllm import envs

    envs.enable_envs_cache()
    try:
        contexts.load(1, config(), {"VLLM_LOG_STATS_INTERVAL": "7"})
        seen = [envs.VLLM_LOG_STATS_INTERVAL]
        for key in (0, 1, 0):
            contexts.seat(key)
            seen.append(envs.VLLM_LOG_STATS_INTERVAL)
        assert (seen[0], seen[2]) == (7, 7)
        assert seen[1] == seen[3] != 7
    finally:
        envs.disable_envs_cache()


class Untakable:
    """Something of a module's that can't be taken along."""

    module = name = "broken"

    def take(self) -> Any:
        raise MemoryError("no memory to take it along")

    def put(self, value: Any) -> None:
        """There is nothing to put."""

    def fresh(self) -> Any:
        """There is nothing fresh."""


@pytest.mark.parametrize(
    "left_for", [lambda contexts: contexts.seat(1), lambda contexts: contexts.load(2, config(), {})]
)
def test_a_model_that_can_not_take_along_what_it_has_stays_seated_with_what_it_has_now(
    contexts: WorkerContexts, left_for: Any
) -> None:
    import torch

    contexts.load(1, config(), {})
    contexts.seat(0)
    torch.rand(1)
    state = torch.get_rng_state()
    contexts.held.append(Untakable())
    with pytest.raises(MemoryError, match="to take it along"):
        left_for(contexts)
    assert contexts.wrapper.worker is contexts.by_key[0].worker
    assert torch.equal(torch.get_rng_state(), state)
    contexts.held.pop()
    for key in (1, 0):
        contexts.seat(key)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_variable_that_a_later_model_brings_is_not_left_to_those_before_it(
    contexts: WorkerContexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to one that had left the seat before anybody knew of it, nor in place of what was said for all."""
    monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", "10")
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    contexts.load(1, config(), {})
    contexts.seat(0)
    contexts.load(2, config(), {"VLLM_LOG_STATS_INTERVAL": "7", "VLLM_PP_LAYER_PARTITION": "1,1"})
    seen = {}
    for key in (1, 2, 0):
        contexts.seat(key)
        seen[key] = os.environ["VLLM_LOG_STATS_INTERVAL"], os.environ.get("VLLM_PP_LAYER_PARTITION")
    assert seen == {0: ("10", None), 1: ("10", None), 2: ("7", "1,1")}


class Cut(Worker):
    """A worker whose load is cut: it asks something of torch at each step, and changes what the process holds."""

    def _step(self, name: str) -> None:
        import torch

        super()._step(name)
        torch.set_default_dtype({"built": torch.float64, "device": torch.bfloat16, "weights": torch.float16}[name])
        os.environ["QUANT_CONFIG"] += "."
        for _ in range(3):
            torch.empty(1)
        if self.fails == f"after {name}":
            raise RuntimeError(f"no {name}")


@pytest.fixture
def cut(contexts: WorkerContexts) -> Iterator[WorkerContexts]:
    """A process that loads in slices, each of which is over at once."""
    first = contexts.by_key[0]
    first.worker = contexts.wrapper.worker = Cut.__new__(Cut)
    vars(first.worker).update(local_rank=0, rank=0, distributed_init_method="", is_driver_worker=True)
    yield contexts
    contexts.seat(0)


def to_the_end(contexts: WorkerContexts) -> Any:
    while (answer := contexts.go_on(1, 0, idle=False, within_s=None)) is None:
        pass
    return answer


def test_between_the_slices_of_a_load_the_process_is_the_seated_models(cut: WorkerContexts) -> None:
    import torch

    state = torch.get_rng_state()
    cut.begin(1, config(), {"QUANT_CONFIG": PATH})
    slices = 0
    while (answer := cut.go_on(1, 0, idle=False, within_s=None)) is None:
        slices += 1
        assert (cut.active, cut.wrapper.worker) == (0, cut.by_key[0].worker)
        assert os.environ["QUANT_CONFIG"] == "/callers.json"
        assert torch.get_default_dtype() is torch.float32
        assert torch.equal(torch.get_rng_state(), state)
        with pytest.raises(RuntimeError, match="being loaded"):
            cut.by_key[1].worker.execute_model()
    assert slices > 6
    assert Worker.said == [("built", PATH), ("device", PATH + "."), ("weights", PATH + "..")]
    assert answer[0].keys() == {"runner", "weights"}
    cut.seat(1)
    assert isinstance(cut.wrapper.worker, Cut)
    assert os.environ["QUANT_CONFIG"] == PATH + "..."
    cut.seat(0)
    assert torch.get_default_dtype() is torch.float32


def test_a_load_that_has_ended_says_so_again_to_a_core_that_waits_for_other_workers(cut: WorkerContexts) -> None:
    cut.begin(1, config(), {"QUANT_CONFIG": PATH})
    answer = to_the_end(cut)
    loaded = cut.by_key[1].worker
    assert cut.go_on(1, 0, idle=False, within_s=None) == answer
    assert cut.by_key[1].worker is loaded


@pytest.mark.parametrize("step", ["built", "device", "weights", "after built", "after device", "after weights"])
def test_a_load_in_slices_that_fails_leaves_the_seated_model_as_it_was(
    cut: WorkerContexts, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    import torch

    before = cut.wrapper.worker
    monkeypatch.setattr(Cut, "fails", step)
    cut.begin(1, config(), {"QUANT_CONFIG": PATH})
    with pytest.raises(RuntimeError, match=f"no {step.removeprefix('after ')}"):
        to_the_end(cut)
    cut.forget(1)
    assert set(cut.by_key) == {0}
    assert cut.wrapper.worker is before
    assert os.environ["QUANT_CONFIG"] == "/callers.json"
    assert torch.get_default_dtype() is torch.float32
    monkeypatch.setattr(Cut, "fails", None)
    cut.load(1, config(), {"QUANT_CONFIG": PATH})
    assert cut.active == 1


@pytest.mark.parametrize("slices", [0, 1, 5])
def test_a_load_in_slices_that_is_forgotten_lets_go_of_what_it_has(cut: WorkerContexts, slices: int) -> None:
    released: list[Any] = []
    cut.platform.release = released.append  # type: ignore[method-assign]
    try:
        cut.begin(1, config(), {"QUANT_CONFIG": PATH})
        for _ in range(slices):
            assert cut.go_on(1, 0, idle=False, within_s=None) is None
        cut.forget(1)
    finally:
        del cut.platform.release
    assert set(cut.by_key) == {0}
    assert any(isinstance(worker, Cut) for worker in released) == (slices == 5)
    assert os.environ["QUANT_CONFIG"] == "/callers.json"


def test_models_come_and_go_between_the_slices_of_another_ones_load(cut: WorkerContexts) -> None:
    cut.begin(1, config(), {"QUANT_CONFIG": PATH})
    for _ in range(2):
        assert cut.go_on(1, 0, idle=False, within_s=None) is None
    cut.load(2, config(), {"QUANT_CONFIG": "/second"})
    assert cut.go_on(1, 0, idle=False, within_s=None) is None
    assert (cut.active, os.environ["QUANT_CONFIG"]) == (2, "/second...")
    cut.seat(0)
    cut.forget(2)
    while cut.go_on(1, 0, idle=False, within_s=None) is None:
        assert os.environ["QUANT_CONFIG"] == "/callers.json"
    cut.seat(1)
    assert os.environ["QUANT_CONFIG"] == PATH + "..."


def test_at_the_end_a_load_that_is_under_way_is_not_waited_for(cut: WorkerContexts) -> None:
    cut.begin(1, config(), {"QUANT_CONFIG": PATH})
    assert cut.go_on(1, 0, idle=False, within_s=None) is None
    cut.forget_others()
    assert cut.active == 0


class Between(Platform):
    """A platform that brings a parked model back between the steps of another one, in three pieces and ``wake``'s."""

    wakes_aside = weights_move = False

    def __init__(self) -> None:
        super().__init__()
        self.brought: list[int] = []
        self.fails_at: int | None = None

    def ahead(self, worker: Any, asleep: Asleep) -> Iterator[None]:
        for number in range(3):
            if number == self.fails_at:
                raise MemoryError("no room")
            self.brought.append(number)
            yield

    def memory_used(self) -> int:
        return 0


@pytest.fixture
def between(contexts: WorkerContexts, monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerContexts, Between, Any]:
    """The process's second model is on its way back; its KV cache, which is empty until it is there."""
    import torch

    platform = contexts.platform = Between()
    contexts.load(1, config(), {"QUANT_CONFIG": PATH})
    cache = torch.ones(16, dtype=torch.uint8)
    contexts.by_key[1].worker.model_runner = SimpleNamespace(model=torch.nn.Linear(4, 4), kv_caches=[cache])
    contexts.by_key[1].worker.kv_cache_config = SimpleNamespace(kv_cache_tensors=[])
    contexts.seat(0)
    contexts.park(1, 1)
    assert cache.untyped_storage().nbytes() == 0
    assert contexts.wake_aside(1)
    assert contexts.wake_aside(1)
    return contexts, platform, cache.untyped_storage()


def slice_of(contexts: WorkerContexts) -> Any:
    return contexts.go_on(1, 0.01, idle=False, within_s=None)


def test_a_parked_model_comes_back_a_piece_at_a_time_and_the_other_one_is_seated_in_between(between: Any) -> None:
    contexts, platform, cache = between
    for brought in ([0], [0, 1], [0, 1, 2]):
        assert slice_of(contexts) is None
        assert platform.brought == brought
        assert (contexts.active, os.environ["QUANT_CONFIG"]) == (0, "/callers.json")
        assert not contexts.awake(1)
    assert slice_of(contexts) is None  # the weights
    assert cache.nbytes() == 0
    assert slice_of(contexts) is None  # the KV cache
    assert cache.nbytes() == 16
    assert slice_of(contexts) == (None,)
    assert slice_of(contexts) == (None,)
    assert contexts.awake(1)
    contexts.wake(1, frozenset({WEIGHTS, KV_CACHE}))
    contexts.require_weights(1)
    assert platform.brought == [0, 1, 2]


@pytest.mark.parametrize("pieces", [0, 1, 4])
def test_who_wants_a_model_that_is_on_its_way_gets_the_rest_at_once(between: Any, pieces: int) -> None:
    contexts, platform, cache = between
    for _ in range(pieces):
        slice_of(contexts)
    contexts.wake(1, frozenset({WEIGHTS, KV_CACHE}))
    assert (platform.brought, cache.nbytes(), contexts.active) == ([0, 1, 2], 16, 0)
    contexts.park(1, 1)
    assert cache.nbytes() == 0


def test_where_a_piece_fails_the_model_is_parked_as_before_and_can_come_another_time(between: Any) -> None:
    contexts, platform, cache = between
    platform.fails_at = 1
    assert slice_of(contexts) is None
    with pytest.raises(MemoryError, match="no room"):
        slice_of(contexts)
    assert contexts.awake(1)
    with pytest.raises(MemoryError, match="no room"):
        contexts.wake(1, frozenset({WEIGHTS, KV_CACHE}))
    assert (cache.nbytes(), contexts.active) == (0, 0)
    platform.fails_at = None
    contexts.wake(1, frozenset({WEIGHTS, KV_CACHE}))
    assert cache.nbytes() == 16


def test_a_model_that_is_dropped_on_its_way_back_is_gone(between: Any) -> None:
    contexts, platform, _ = between
    slice_of(contexts)
    contexts.forget(1)
    assert (platform.brought, set(contexts.by_key), contexts.active) == ([0], {0}, 0)
