"""What platforms promise, on tensors that are here; and that nobody else asks which platform it is."""

import ast
import math
import os
import sys
import warnings
from array import array
from collections.abc import Callable, Iterator
from mmap import PAGESIZE
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import service
from service.platforms import cpu, hpu
from service.platforms.base import KV_CACHE, WEIGHTS, Asleep, Platform
from service.platforms.cpu import CpuPlatform, Naps
from service.platforms.hpu import HpuPlatform, _to_host
from service.platforms.kv_blocks import Region

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

    def pinned(self, shape: Any, dtype: Any) -> Any:
        import torch

        return torch.empty(shape, dtype=dtype)

    def memory_used(self) -> int:
        return 0


def model_of_two() -> Any:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight  # tied
    model.register_buffer("table", torch.arange(16.0))
    return model


def torch_of(numbers: int) -> Any:
    import torch

    return torch.zeros(numbers)


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


def test_slots_of_adapters_are_copied_each_time_where_storages_move() -> None:
    """They are neither parameters nor buffers, and an adapter may have been activated since the last time."""
    import torch

    platform, asleep, model = Moving(), Asleep(), model_of_two()
    model.lora_a_stacked = (torch.zeros(8),)
    worker = worker_with(model)
    worker.lora_config = "some"
    for adapter in (1.0, 2.0):
        model.lora_a_stacked[0].fill_(adapter)
        platform.park(worker, asleep)
        platform.wake(worker, asleep, BOTH)
        assert model.lora_a_stacked[0].tolist() == [adapter] * 8
    assert platform.copies == 5  # the second time into the copy that was there


def test_what_copies_will_take_of_the_host_is_known_before_they_are_made_and_counts_none_twice() -> None:
    platform, worker, asleep = Moving(), worker_with(model_of_two()), Asleep()
    assert platform.copies_bytes(worker, asleep) == 256 + 32 + 32 + 64  # the tied weight, two biases, the table
    platform.park(worker, asleep)
    assert platform.copies_bytes(worker, asleep) == asleep.host_bytes
    platform.wake(worker, asleep, BOTH)
    assert platform.copies_bytes(worker, asleep) == asleep.host_bytes
    worker.model_runner.model.register_buffer("more", torch_of(5))
    assert platform.copies_bytes(worker, asleep) == asleep.host_bytes + 32


# --- the blocks of a KV cache -----------------------------------------------------------------------------------------

BLOCKS = 12
LAYOUTS = {
    "layer by layer": {"page": 5000, "layer_stride": BLOCKS * 5000, "block_stride": 5000},
    "block by block": {"page": 9000, "layer_stride": 9000, "block_stride": 3 * 9000},
    "whole pages": {"page": 2 * PAGESIZE, "layer_stride": 2 * PAGESIZE, "block_stride": 6 * PAGESIZE},
    "words": {"page": 24, "layer_stride": 24, "block_stride": 72},
}


class Cached:
    """A worker with a KV cache of three layers, filled, which begins anywhere in a page."""

    def __init__(self, layout: str, offset: int = 40) -> None:
        import torch

        self.region = Region(offset=offset, blocks=BLOCKS, layers=3, **LAYOUTS[layout])
        size = offset + BLOCKS * 3 * self.region.page
        self.cache = torch.randint(1, 256, (size,), dtype=torch.uint8)
        self.model_runner = SimpleNamespace(kv_caches=[self.cache], model=None)
        self.before = self.pages()

    def pages(self) -> dict[int, list[bytes]]:
        region, content = self.region, self.cache.clone().numpy().tobytes()
        starts = {
            block: [region.offset + layer * region.layer_stride + block * region.block_stride for layer in range(3)]
            for block in range(BLOCKS)
        }
        return {block: [content[at : at + region.page] for at in found] for block, found in starts.items()}

    def some(self, blocks: tuple[int, ...]) -> dict[int, list[bytes]]:
        return {block: self.before[block] for block in blocks}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("platform", [Moving(), CpuPlatform()], ids=["copied", "in place"])
@pytest.mark.parametrize("kept", [(0,), (11,), (7, 1, 0, 2), tuple(range(BLOCKS)), ()])
def test_kept_blocks_are_there_after_waking_and_nothing_of_the_others_is_held(
    layout: str, platform: Platform, kept: tuple[int, ...]
) -> None:
    worker: Any = Cached(layout)
    asleep = Asleep(regions=(worker.region,))
    for _ in range(2):
        platform.park(worker, asleep, kept)
        assert asleep.kept_bytes <= len(kept) * platform.block_bytes(asleep.regions)
        assert asleep.kept_bytes >= len(kept) * 3 * worker.region.page or asleep.in_place
        platform.wake(worker, asleep, BOTH)
        assert asleep.kept_bytes == 0
        after = worker.pages()
        assert {block: after[block] for block in kept} == worker.some(kept)


def test_on_cpu_all_whole_pages_without_a_kept_block_are_given_back_and_what_lies_around_it_is_not() -> None:
    import torch

    whole = torch.full((40 * PAGESIZE,), 7, dtype=torch.uint8)
    cache = torch.frombuffer(memoryview(whole.numpy())[100 : 100 + 30 * PAGESIZE], dtype=torch.uint8)
    owner = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[cache], model=None))
    region = Region(offset=0, blocks=30, layers=1, block_stride=PAGESIZE, layer_stride=30 * PAGESIZE, page=PAGESIZE)
    asleep = Asleep(regions=(region,))
    CpuPlatform().park(owner, asleep, (3,))
    content = whole.numpy()
    assert (content[:100] == 7).all()
    assert (content[100 + 30 * PAGESIZE :] == 7).all()
    assert (cache.numpy()[3 * PAGESIZE : 4 * PAGESIZE] == 7).all()
    assert int((content == 0).sum()) >= (29 - 4) * PAGESIZE  # all but the pages that others have a part of
    assert asleep.kept_bytes == 2 * PAGESIZE


@pytest.mark.parametrize("platform", [Moving(), CpuPlatform()], ids=["copied", "in place"])
def test_a_parked_models_kept_blocks_stay_until_they_are_let_go(platform: Platform) -> None:
    worker: Any = Cached("block by block")
    asleep = Asleep(regions=(worker.region,))
    platform.park(worker, asleep, (1, 2, 3))
    kept = asleep.kept_bytes
    platform.park(worker, asleep, (1, 2))  # fewer are needed now, which is no reason to copy
    assert asleep.kept_bytes == kept > 0
    platform.park(worker, asleep)
    assert asleep.kept_bytes == 0
    platform.wake(worker, asleep, BOTH)
    assert all(not any(page) for page in worker.pages()[2])


def present(tensor: Any) -> list[int]:
    """Which pages of a tensor, which begins with one, the system has given."""
    first, pages = tensor.data_ptr() // PAGESIZE, -(-tensor.nbytes // PAGESIZE)
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * first)
        entries = array("Q", pagemap.read(8 * pages))
    return [page for page, entry in enumerate(entries) if entry >> 63]


@pytest.mark.parametrize("lent", [True, False])
def test_on_cpu_a_kv_cache_has_only_the_pages_that_were_written_and_gives_them_back(lent: bool) -> None:
    import torch

    platform = CpuPlatform()
    with platform.kv_memory(lent=lent):
        cache = torch.zeros(64 * PAGESIZE, dtype=torch.int8)
        assert torch.zeros(3).tolist() == [0, 0, 0]
    assert present(cache) == []
    region = Region(0, 16, 2, block_stride=2 * PAGESIZE, layer_stride=32 * PAGESIZE, page=2 * PAGESIZE)
    blocks = region.pages(cache.untyped_storage())
    blocks[3], blocks[5] = 3, 5
    assert present(cache) == [6, 7, 10, 11, 38, 39, 42, 43]
    owner = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[cache], model=None))
    platform.give_back(owner, (region,), [0, 5, 7])
    assert present(cache) == [10, 11, 42, 43]
    assert (blocks[5] == 5).all()
    assert not blocks[3].any()
    platform.empty(owner, Asleep())
    assert present(cache) == []


def test_blocks_are_not_given_back_because_nobody_says_where_they_lie() -> None:
    import torch

    cache = torch.ones(4 * PAGESIZE, dtype=torch.int8)
    owner = SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[cache], model=None))
    with pytest.raises(ValueError, match="layout"):
        CpuPlatform().give_back(owner, (), [1])
    assert (cache == 1).all()


@pytest.mark.parametrize(("mode", "lends"), [("0", True), ("1", True), ("2", False), (None, True)])
def test_nothing_is_lent_where_the_kernel_counts_pages_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None, lends: bool
) -> None:
    """Not run under such a kernel."""
    if mode is not None:
        (tmp_path / "overcommit_memory").write_text(f"{mode}\n")
    monkeypatch.setattr("service.platforms.cpu._OVERCOMMIT", tmp_path / "overcommit_memory")
    assert CpuPlatform().lends is lends


def test_on_hpu_no_block_is_kept() -> None:
    assert HpuPlatform().block_bytes((Cached("words").region,)) == 0


@pytest.mark.parametrize(("size", "takes"), [(0, 0), (1, 1), (8, 8), (9, 16), (4097, 8192)])
def test_a_pinned_copy_takes_a_power_of_two_of_the_host(size: int, takes: int) -> None:
    """As torch's allocator of pinned memory gives it. A copy is only pinned where there is a device."""

    def copy(pinned: bool) -> Any:
        return SimpleNamespace(nbytes=size, is_pinned=lambda: pinned)

    assert Asleep(host={"pinned": copy(True)}).host_bytes == takes
    assert Asleep(host={"pageable": copy(False)}).host_bytes == size
    assert Asleep(host={1: copy(True), 2: copy(False)}).host_bytes == takes + size


# --- HPU: parking by the worker's own sleep --------------------------------------------------------------------------


@pytest.mark.parametrize("pins", [True, False])
def test_on_hpu_parked_weights_are_pinned_where_that_can_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pins: bool
) -> None:
    import torch

    def pin_memory(tensor: Any) -> Any:
        if not pins:
            raise RuntimeError("there is no accelerator")
        return tensor.as_subclass(Pinned)

    class Pinned(torch.Tensor): ...

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    hpu._say_unpinned.cache_clear()
    weight = torch.arange(8.0)
    for _ in range(2):
        copy = _to_host(weight)
        assert isinstance(copy, Pinned) is pins
        assert torch.equal(copy, weight)
    told = {id(each): each.getMessage() for each in caplog.records if each.name == hpu.__name__}  # by several handlers
    assert len(told) == (not pins)
    assert all(message.endswith("there is no accelerator") for message in told.values())


@pytest.mark.parametrize(("asks", "arrival_s", "waits"), [(1, 60.0, 2), (3, 60.0, 6), (10**9, 0.0, 2)])
def test_on_hpu_weights_come_back_in_pieces_each_after_the_last_one_as_far_as_the_card_says(
    monkeypatch: pytest.MonkeyPatch, asks: int, arrival_s: float, waits: int
) -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    class Event:
        """It has happened when it is asked for that time."""

        def __init__(self) -> None:
            self.asked = 0

        def record(self) -> None: ...

        def query(self) -> bool:
            self.asked += 1
            return self.asked >= asks

    monkeypatch.setattr(torch, "hpu", SimpleNamespace(Event=Event), raising=False)
    monkeypatch.setattr(hpu, "PIECE", 3 * 64)
    monkeypatch.setattr(hpu, "ARRIVAL_S", arrival_s)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(7)))
    where = SimpleNamespace(device_config=SimpleNamespace(device=torch.device("cpu")))
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model), vllm_config=where)

    class Fetched(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.Tensor.to and bool((kwargs or {}).get("non_blocking"))
            return func(*args, **(kwargs or {}))

    with Fetched() as fetched:
        there = [fetched.count for _ in HpuPlatform().ahead(worker, Asleep())]
    assert sorted(set(there)) == [3, 6]
    assert (len(there), fetched.count) == (waits, 7)


@pytest.fixture(autouse=True)
def host_is_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a move can be seen without a card: what is in float32 is there."""
    monkeypatch.setattr(hpu, "_to_host", lambda tensor: tensor.double())


class SleepingWorker:
    """What HPUWorker's sleep and wake_up do to a model."""

    def __init__(self, model: Any) -> None:
        import torch

        self.host, self.device = torch.float64, torch.float32
        self.moved = 0
        self.woken: list[list[str]] = []
        self.model_sleeping = self.kv_cache_sleeping = False
        self.kv_cache_config = SimpleNamespace(kv_cache_tensors=["some"])
        self.model_runner = SimpleNamespace(model=model, kv_caches=["some"], defragmenter="one")
        self.layer = SimpleNamespace(kv_cache="some")
        compilation = SimpleNamespace(static_forward_context={"layer": self.layer})
        self.vllm_config = SimpleNamespace(compilation_config=compilation)
        self.moves_until_failure: int | None = None

    def _move(self, place: Any) -> None:
        for parameter in self.model_runner.model.parameters():
            if parameter.dtype != place:
                if self.moves_until_failure is not None:
                    self.moves_until_failure -= 1
                    if self.moves_until_failure < 0:
                        self.moves_until_failure = None
                        raise MemoryError("no memory there")
                self.moved += 1
                parameter.data = parameter.data.to(place)

    def sleep(self, level: int) -> None:
        assert level == 1
        if not self.model_sleeping:
            self._move(self.host)
        if not self.kv_cache_sleeping:
            self.model_runner.kv_caches = []
        self.model_sleeping = self.kv_cache_sleeping = True

    def wake_up(self, tags: list[str]) -> None:
        self.woken.append(tags)
        if WEIGHTS in tags:
            self._move(self.device)
            self.model_sleeping = False
        if KV_CACHE in tags:
            self.model_runner.kv_caches = ["new"]
            self.kv_cache_sleeping = False


def test_on_hpu_the_workers_sleep_finds_weights_on_the_host_that_were_there_before() -> None:
    platform, worker, asleep = HpuPlatform(), SleepingWorker(model_of_two()), Asleep()
    for _ in range(3):
        platform.park(worker, asleep)
        assert all(p.dtype == worker.host for p in worker.model_runner.model.parameters())
        platform.wake(worker, asleep, BOTH)
    assert worker.moved == 3 * 3  # in each time; out they were copied once, and not by the worker
    assert worker.model_runner.model[1].weight is worker.model_runner.model[0].weight


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_on_hpu_parking_that_fails_half_way_is_undone_by_waking(monkeypatch: pytest.MonkeyPatch, copies: int) -> None:
    left = [copies]

    def to_host(tensor: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no memory there")
        return tensor.double()

    platform, worker, asleep = HpuPlatform(), SleepingWorker(model_of_two()), Asleep()
    monkeypatch.setattr(hpu, "_to_host", to_host)
    with pytest.raises(MemoryError):
        platform.park(worker, asleep)
    platform.wake(worker, asleep, BOTH)
    assert all(p.dtype == worker.device for p in worker.model_runner.model.parameters())
    assert worker.model_runner.kv_caches == ["some"]
    assert (worker.model_sleeping, worker.kv_cache_sleeping) == (False, False)


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_on_hpu_what_a_model_takes_of_the_host_counts_what_is_there_and_what_is_to_come(copies: int) -> None:
    """Also where a parking that failed has left a part of it."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(5, 3, bias=False))
    model.register_buffer("table", torch.ones(7))
    platform, worker, asleep = HpuPlatform(), SleepingWorker(model), Asleep()
    for name, parameter in list(model.named_parameters())[:copies]:
        asleep.host[name] = parameter.data.clone()
    assert platform.copies_bytes(worker, asleep) == 28 + copies * 60 + (2 - copies) * 64
    worker.model_runner.model = None
    assert platform.copies_bytes(worker, asleep) == 0


def test_on_hpu_what_a_failed_waking_brought_back_goes_again() -> None:
    platform, worker, asleep = HpuPlatform(), SleepingWorker(model_of_two()), Asleep()
    platform.park(worker, asleep)
    worker.moves_until_failure = 1
    with pytest.raises(MemoryError):
        platform.wake(worker, asleep, BOTH)
    worker.model_runner.kv_caches = ["half of one"]
    platform.park(worker, asleep)
    assert all(p.dtype == worker.host for p in worker.model_runner.model.parameters())
    assert worker.model_runner.kv_caches == []
    assert worker.layer.kv_cache is None
    platform.wake(worker, asleep, BOTH)
    assert all(p.dtype == worker.device for p in worker.model_runner.model.parameters())


def test_on_hpu_what_does_not_move_to_the_host_is_overhead() -> None:
    """Scales, slots of adapters: tensors that are neither parameters nor buffers."""
    import torch

    model = model_of_two()
    model.scale = torch.ones(1000)
    platform, worker = HpuPlatform(), SleepingWorker(model)
    moving = sum(each.nbytes for each in {*model.parameters(), *model.buffers()})
    assert platform.weights_bytes(worker) == moving


def test_on_hpu_a_kv_cache_counts_as_it_was_planned_where_its_storages_do_not_tell() -> None:
    """In lazy mode they may be empty until something was computed. One that sleeps takes nothing."""
    import torch

    platform, worker = HpuPlatform(), SleepingWorker(model_of_two())
    worker.model_runner.kv_caches = [torch.empty(0)]
    worker.kv_cache_config.kv_cache_tensors = [SimpleNamespace(size=100), SimpleNamespace(size=28)]
    assert platform.kv_bytes(worker) == 128
    worker.model_runner.kv_caches = [torch.empty(64)]
    assert platform.kv_bytes(worker) == 256
    platform.park(worker, Asleep())
    assert platform.kv_bytes(worker) == 0


@pytest.mark.parametrize(("lazy", "eager", "parks"), [(True, False, False), (True, True, True), (False, False, True)])
def test_on_hpu_a_model_with_graphs_in_lazy_mode_is_not_parked(
    monkeypatch: pytest.MonkeyPatch, lazy: bool, eager: bool, parks: bool
) -> None:
    internal = ModuleType("habana_frameworks.torch.utils.internal")
    vars(internal)["is_lazy"] = lambda: lazy
    monkeypatch.setitem(sys.modules, internal.__name__, internal)
    assert HpuPlatform().parks(SimpleNamespace(model_config=SimpleNamespace(enforce_eager=eager))) is parks


def test_on_hpu_weights_are_let_go_of_in_a_mode_that_refuses_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    platform, worker, asleep = HpuPlatform(), SleepingWorker(model_of_two()), Asleep()
    monkeypatch.setattr(worker, "sleep", lambda level: pytest.fail("it asserts in lazy mode"))
    platform.empty(worker, asleep)
    assert worker.model_runner.model is None
    assert (worker.model_runner.kv_caches, worker.layer.kv_cache, worker.kv_cache_sleeping) == ([], None, True)


def test_on_hpu_requests_have_what_its_scheduler_asks_them_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26's have no such attribute, and the engine would end at the first spurious token."""
    from vllm.v1.request import Request

    monkeypatch.delattr(Request, "discard_latest_async_tokens", raising=False)
    HpuPlatform().prepare()
    assert Request.discard_latest_async_tokens is False


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


def found_after(naps: Naps, clock: list[float], seconds: float) -> tuple[float, int]:
    """How much later than it was there something is found, and after how many naps."""
    there, count = clock[0] + seconds, 0
    while clock[0] < there:
        naps.nap()
        count += 1
    naps.found()
    return clock[0] - there, count


@given(st.lists(st.floats(1e-6, 2.0), min_size=1, max_size=5))
def test_what_is_waited_for_for_longer_is_looked_for_less_often_and_found_hardly_later(waits: list[float]) -> None:
    clock = [100.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    naps = Naps(clock=lambda: clock[0], sleep=sleep)
    for seconds in waits:
        late, count = found_after(naps, clock, seconds)
        assert late <= max(20e-6, min(1e-3, seconds / 250)) + 1e-9
        assert count <= 260 + 256 * math.log(1 + seconds / 5e-3) + seconds / 1e-3
        sleep(0.5)  # nothing is waited for


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Ends the imports of a process to fork from, where vLLM's platform is the given one."""
    import torch._inductor.config
    import vllm.platforms

    def end_imports(theirs: Any) -> None:
        monkeypatch.setattr(vllm.platforms, "current_platform", theirs)
        CpuPlatform().imported()

    monkeypatch.setenv("TORCHINDUCTOR_CPP_DYNAMIC_THREADS", "0")
    with torch._inductor.config.patch("cpp.dynamic_threads", False):
        yield end_imports


def test_kernels_that_are_others_on_a_cpu_are_replaced_once_for_all_that_are_forked(
    imported: Callable[[Any], None], recwarn: pytest.WarningsRecorder
) -> None:
    replaced = []

    class Theirs:
        @classmethod
        def register_triton_kernel_overrides(cls) -> None:
            replaced.append(cls)
            warnings.warn("some name that was seen on the way is old", FutureWarning, stacklevel=2)

    theirs = Theirs()
    imported(theirs)
    assert replaced == [Theirs]
    assert not recwarn
    theirs.register_triton_kernel_overrides()  # as each of vLLM's workers does
    assert replaced == [Theirs]


def test_a_vllm_that_replaces_no_kernels_is_left_as_it_is(imported: Callable[[Any], None]) -> None:
    theirs = SimpleNamespace()
    imported(theirs)
    assert vars(theirs) == {}


def test_a_reader_on_a_cpu_has_read_and_naps_as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    slept: list[float] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)
    monkeypatch.setattr(shm_broadcast.SpinCondition, "record_read", shm_broadcast.SpinCondition.record_read)
    now = iter([0.0, 0.1, 0.2, 0.3])
    monkeypatch.setattr(cpu, "Naps", lambda: Naps(clock=lambda: next(now), sleep=slept.append))
    CpuPlatform().prepare()
    condition = object.__new__(shm_broadcast.SpinCondition)
    for _ in range(2):
        shm_broadcast.sched_yield()
    condition.record_read()
    shm_broadcast.sched_yield()
    assert slept[0] == slept[2] < slept[1]
    assert condition.last_read > 0
