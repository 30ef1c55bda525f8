"""What platforms promise, on tensors that are here; and that nobody else asks which platform it is."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import service
from service.platforms.base import KV_CACHE, WEIGHTS, Asleep, Platform
from service.platforms.cuda import CudaPlatform
from service.platforms.hpu import HpuPlatform

BOTH = frozenset({WEIGHTS, KV_CACHE})
ROOT = Path(service.__file__).parent
HPU_STANDIN = ROOT.parent / "tests" / "support" / "habana"


# --- who asks --------------------------------------------------------------------------------------------------------

TELLING = {"device_type", "device_name", "is_cpu", "is_cuda", "is_cuda_alike", "is_hpu", "is_rocm", "is_xpu", "is_tpu"}
VENDORS = {"vllm_gaudi", "habana_frameworks"}


def asked(tree: ast.AST) -> set[str]:
    """How a module's code asks which device it runs on."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    submodules = ("service.platforms.cpu", "service.platforms.cuda", "service.platforms.hpu")
    return {name for name in names if name in TELLING or name.split(".")[0] in VENDORS or name.startswith(submodules)}


def test_a_question_for_the_device_is_seen() -> None:
    assert asked(ast.parse("if current_platform.is_cpu(): from vllm_gaudi.extension import ops")) == {
        "is_cpu",
        "vllm_gaudi.extension",
    }


def test_nothing_outside_platforms_asks_which_device_it_runs_on() -> None:
    modules = [path for path in ROOT.rglob("*.py") if "platforms" not in path.parts]
    assert len(modules) > 50
    found = {str(path.relative_to(ROOT)): asked(ast.parse(path.read_text(encoding="utf-8"))) for path in modules}
    assert {path: names for path, names in found.items() if names} == {}


# --- parking, where storages move ------------------------------------------------------------------------------------


class Moving(Platform):
    """A device whose memory is this machine's, and which counts what is copied to the host."""

    copies = 0

    def to_host(self, storage: Any) -> Any:
        import torch

        self.copies += 1
        return torch.frombuffer(bytearray(bytes(storage)), dtype=torch.uint8)

    def memory_used(self) -> int:
        return 0


def model_of_two() -> Any:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight  # tied
    model.register_buffer("table", torch.arange(16.0))
    return model


def worker_with(model: Any) -> Any:
    import torch

    caches = [torch.ones(4, 4), (torch.ones(2, 2), None)]
    return SimpleNamespace(model_runner=SimpleNamespace(model=model, get_model=lambda: model, kv_caches=caches))


def test_a_parked_model_takes_nothing_and_comes_back_as_it_was_with_an_empty_kv_cache() -> None:
    import torch

    platform, worker, asleep = Moving(), worker_with(model_of_two()), Asleep()
    before = {name: tensor.clone() for name, tensor in worker.model_runner.model.state_dict().items()}
    weights, kv = platform.weights_bytes(worker), platform.kv_bytes(worker)
    view = worker.model_runner.model[0].weight[0]
    platform.park(worker, asleep)
    assert (platform.weights_bytes(worker), platform.kv_bytes(worker)) == (0, 0)
    assert asleep.host_bytes == weights
    platform.wake(worker, asleep, BOTH)
    assert (platform.weights_bytes(worker), platform.kv_bytes(worker)) == (weights, kv)
    after = worker.model_runner.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(view, before["0.weight"][0])
    assert not worker.model_runner.kv_caches[0].any()


def test_weights_are_copied_to_the_host_once() -> None:
    platform, worker, asleep = Moving(), worker_with(model_of_two()), Asleep()
    for _ in range(3):
        platform.park(worker, asleep)
        platform.wake(worker, asleep, BOTH)
    assert platform.copies == 4  # the tied weight, two biases, the table


def test_waking_the_weights_leaves_the_kv_cache_asleep() -> None:
    platform, worker, asleep = Moving(), worker_with(model_of_two()), Asleep()
    platform.park(worker, asleep)
    platform.wake(worker, asleep, frozenset({WEIGHTS}))
    assert platform.weights_bytes(worker) > 0
    assert platform.kv_bytes(worker) == 0
    platform.wake(worker, asleep, frozenset({KV_CACHE}))
    assert platform.kv_bytes(worker) == 20 * 4


# --- HPU: parking by the worker's own sleep --------------------------------------------------------------------------


class SleepingWorker:
    """What HPUWorker's sleep and wake_up do to a model, with float64 for the host, so that a move can be seen."""

    def __init__(self, model: Any) -> None:
        import torch

        self.host, self.device = torch.float64, torch.float32
        self.moved = 0
        self.woken: list[list[str]] = []
        self.model_sleeping = self.kv_cache_sleeping = False
        self.kv_cache_config = SimpleNamespace(kv_cache_tensors=["some"])
        self.model_runner = SimpleNamespace(model=model)

    def _move(self, place: Any) -> None:
        for parameter in self.model_runner.model.parameters():
            if parameter.dtype != place:
                self.moved += 1
                parameter.data = parameter.data.to(place)

    def sleep(self, level: int) -> None:
        assert level == 1
        self._move(self.host)
        self.model_sleeping = self.kv_cache_sleeping = True

    def wake_up(self, tags: list[str]) -> None:
        self.woken.append(tags)
        if WEIGHTS in tags:
            self._move(self.device)
            self.model_sleeping = False
        if KV_CACHE in tags:
            self.kv_cache_sleeping = False


def test_on_hpu_the_workers_sleep_finds_weights_on_the_host_that_were_there_before() -> None:
    platform, worker, asleep = HpuPlatform(), SleepingWorker(model_of_two()), Asleep()
    for _ in range(3):
        platform.park(worker, asleep)
        assert all(p.dtype == worker.host for p in worker.model_runner.model.parameters())
        platform.wake(worker, asleep, BOTH)
    assert worker.moved == 3 + 3 * 3  # out once, in each time
    assert worker.model_runner.model[1].weight is worker.model_runner.model[0].weight


def test_on_hpu_only_what_sleeps_is_woken() -> None:
    platform, worker, asleep = HpuPlatform(), SleepingWorker(model_of_two()), Asleep()
    platform.wake(worker, asleep, BOTH)
    platform.park(worker, asleep)
    platform.wake(worker, asleep, frozenset({WEIGHTS}))
    platform.wake(worker, asleep, BOTH)
    assert worker.woken == [[WEIGHTS], [KV_CACHE]]


def test_on_hpu_an_encoder_without_a_kv_cache_wakes_without_one() -> None:
    platform, worker, asleep = HpuPlatform(), SleepingWorker(model_of_two()), Asleep()
    worker.kv_cache_config.kv_cache_tensors = []
    platform.park(worker, asleep)
    platform.wake(worker, asleep, BOTH)
    assert worker.woken == [[WEIGHTS]]
    assert not worker.kv_cache_sleeping


def test_the_budget_of_an_hpu_is_what_the_drivers_tool_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{HPU_STANDIN / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HPU_STANDIN_BYTES", str(1000 << 20))
    assert HpuPlatform().device_budget(None) == 810 << 20  # nine tenths, of which a tenth is its graphs'
    assert HpuPlatform().device_budget(0.5) == 450 << 20


def test_without_the_drivers_tool_no_budget_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert HpuPlatform().device_budget(None) is None


# --- whose worker ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "gets"),
    [
        ("vllm_gaudi.v1.worker.hpu_worker.HPUWorker", "service.platforms.hpu_worker.ContextWorker"),
        ("somebody.elses.Worker", "somebody.elses.Worker"),
    ],
)
def test_on_hpu_the_usual_worker_becomes_one_that_minds_budgets(chosen: str, gets: str) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=chosen))
    HpuPlatform().arrange(config)
    assert config.parallel_config.worker_cls == gets


def test_on_cuda_a_model_with_graphs_is_not_parked_without_tagged_memory() -> None:
    worker = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False))
    with pytest.raises(ValueError, match="CUDA graphs"):
        CudaPlatform().park(worker, Asleep())


# --- CUDA: parking by vLLM's allocator, over memory that a test can look into ----------------------------------------


class Driver:
    """The few calls of CUDA's driver and runtime that parking makes, over host memory at made-up addresses."""

    def __init__(self) -> None:
        self.mapped: dict[int, bytearray] = {}
        self.copied_out = 0

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        assert handle[2] not in self.mapped
        self.mapped[handle[2]] = bytearray(b"\xee" * handle[1])

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        del self.mapped[handle[2]]

    def cudaMemcpy(self, to: int, source: int, size: int) -> None:
        import ctypes

        if source in self.mapped:
            self.copied_out += 1
            ctypes.memmove(to, bytes(self.mapped[source]), size)
        else:
            self.mapped[to][:] = ctypes.string_at(source, size)

    def cudaMemset(self, address: int, value: int, size: int) -> None:
        self.mapped[address][:] = bytes([value]) * size


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    import torch
    from vllm.device_allocator import AllocationData, cumem

    driver = Driver()
    for name in ("create_and_map", "unmap_and_release"):
        monkeypatch.setattr(cumem, name, getattr(driver, name))
    monkeypatch.setattr(cumem, "libcudart", driver)
    allocator = cumem.CuMemAllocator()
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: allocator)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    empty = torch.empty

    def unpinned(*size: int, pin_memory: bool = False, **kwargs: Any) -> Any:
        return empty(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", unpinned)
    for number, tag in enumerate(("a/weights", "a/kv_cache", "a/runtime", "b/weights", "b/kv_cache"), start=1):
        handle = (0, 8 * number, 4096 * number, 0)
        driver.create_and_map(handle)
        driver.mapped[handle[2]][:] = bytes([number]) * handle[1]
        allocator.pointer_to_data[handle[2]] = AllocationData(handle, tag)
    return driver


def cuda_worker(alias: str) -> Any:
    return SimpleNamespace(
        tag_of=lambda tag: f"{alias}/{tag}", model_config=SimpleNamespace(enable_cumem_allocator=True)
    )


def test_on_cuda_parking_unmaps_one_models_memory_and_waking_maps_it_where_it_was(driver: Driver) -> None:
    platform, worker, asleep = CudaPlatform(), cuda_worker("a"), Asleep()
    before = {address: bytes(content) for address, content in driver.mapped.items()}
    assert platform.kv_bytes(worker) == 16
    for _ in range(2):
        platform.park(worker, asleep)
        assert set(driver.mapped) == set(before) - {4096, 8192}
        assert (platform.kv_bytes(worker), asleep.host_bytes) == (0, 8)
        platform.wake(worker, asleep, frozenset({WEIGHTS}))
        assert set(driver.mapped) == set(before) - {8192}
        platform.wake(worker, asleep, BOTH)
        assert {address: bytes(content) for address, content in driver.mapped.items()} == {**before, 8192: b"\0" * 16}
    assert driver.copied_out == 1
