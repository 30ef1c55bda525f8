"""Parking on CUDA, over vLLM's own allocator with the driver's calls replaced: each step of it can fail.

What these can't show, tests/support/cuda_driver.py says; ``tests.bench.card`` runs the same on a card.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.worker.context import WorkerContext
from service.engine.worker.contexts import WorkerContexts
from service.platforms.base import KV_CACHE, WEIGHTS, Asleep
from service.platforms.cuda import CudaPlatform
from tests.support.cuda_driver import Device, Failed

BOTH = frozenset({WEIGHTS, KV_CACHE})


def worker(alias: str, **more: Any) -> Any:
    return SimpleNamespace(
        tag_of=lambda tag: f"{alias}/{tag}",
        model_config=SimpleNamespace(enable_cumem_allocator=True, enforce_eager=False),
        model_runner=SimpleNamespace(model=None, kv_caches=[]),
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={})),
        **more,
    )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A card with two models, ``a`` and ``b``."""
    device = Device(monkeypatch)
    for number, alias in enumerate("ab", start=1):
        device.give(f"{alias}/weights", 8, 24, filled=16 * number)
        device.give(f"{alias}/kv_cache", 16, 40, filled=16 * number + 1)
        device.give(f"{alias}/runtime", 5, filled=16 * number + 2)
    return device


@pytest.fixture
def contexts(device: Device) -> WorkerContexts:
    """A worker process with both, ``a`` (0) in the wrapper."""
    first, second = worker("a"), worker("b")
    for each, alias in ((first, "a"), (second, "b")):
        cache = sorted(tagged(device, f"{alias}/kv_cache"))
        each.model_runner.kv_caches = [device.tensor(at, len(device.driver.content()[at])) for at in cache]
    contexts = WorkerContexts(SimpleNamespace(worker=first, vllm_config=None, mm_receiver_cache=None))
    contexts.platform = CudaPlatform()
    contexts.by_key[1] = WorkerContext(second, None, None)
    contexts.seat(1)
    contexts.seat(0)
    return contexts


def with_empty_cache(device: Device, before: dict[int, bytes], alias: str) -> dict[int, bytes]:
    """What is on the card where a model's KV cache is new."""
    books = device.allocator.pointer_to_data
    empty = {address: bytes(len(content)) for address, content in before.items()}
    return {at: empty[at] if books[at].tag == f"{alias}/kv_cache" else content for at, content in before.items()}


def test_parking_unmaps_one_models_memory_and_waking_maps_it_where_it_was(
    device: Device, contexts: WorkerContexts
) -> None:
    before = device.driver.content()
    assert contexts.sizes(1)["kv"] == 56
    assert contexts.sizes(1)["copies"] == 8 + 32  # powers of two, as pinned memory comes
    others = tagged(device, "a/") | tagged(device, "b/runtime")
    for _ in range(2):
        contexts.park(1, 1)
        assert device.driver.mapped == others
        found = contexts.sizes(1)
        assert (found["weights"], found["kv"], found["host"]) == (32, 0, 32)
        assert found["copies"] == 8 + 24  # both are there, and pinned where there is a card
        contexts.wake(1, frozenset({WEIGHTS}))
        assert contexts.sizes(1)["kv"] == 0
        contexts.wake(1, BOTH)
        assert device.driver.content() == with_empty_cache(device, before, "b")
    assert device.driver.copied_out == 2  # each segment of the weights once


def with_blocks(device: Device, one: Any, alias: str, blocks: int = 6) -> dict[int, bytes]:
    """Give a model a KV cache of two layers whose pages lie block by block; each page's content by its address."""
    import torch

    page = 16
    device.take(f"{alias}/kv_cache")
    (at,) = device.give(f"{alias}/kv_cache", blocks * 2 * page, filled=0)
    cache = device.tensor(at, blocks * 2 * page)
    cache.copy_(torch.arange(len(cache)) % 251)
    layers = SimpleNamespace(
        layers=["first", "second"], offset=0, block_stride=2 * page, layer_stride=page, host_resident=False
    )
    one.kv_cache_config = SimpleNamespace(kv_cache_tensors=[layers], num_blocks=blocks)
    one.model_runner.kv_caches = [cache]
    content = bytes(cache.numpy())
    return {block: content[block * 2 * page : (block + 1) * 2 * page] for block in range(blocks)}


def blocks_of(one: Any) -> dict[int, bytes]:
    content = bytes(one.model_runner.kv_caches[0].numpy())
    return {block: content[block * 32 : (block + 1) * 32] for block in range(len(content) // 32)}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks make a piece."""
    monkeypatch.setattr("service.platforms.kv_blocks._PIECE", 64)


@pytest.mark.usefixtures("small_pieces")
def test_kept_blocks_come_back_under_their_ids_and_the_others_empty(device: Device, contexts: WorkerContexts) -> None:
    one = contexts.by_key[1].worker
    before = with_blocks(device, one, "b")
    assert contexts.sizes(1)["kv_block"] == 32
    for kept in ((5, 0, 2), (1,), ()):
        contexts.park(1, 1, kept)
        found = contexts.sizes(1)
        assert (found["kv"], found["kv_kept"], found["host"]) == (0, 32 * len(kept), 32 + 32 * len(kept))
        assert not tagged(device, "b/kv_cache") & device.driver.mapped
        contexts.wake(1, frozenset({WEIGHTS}))
        assert contexts.sizes(1)["kv_kept"] == 32 * len(kept)
        contexts.wake(1, BOTH)
        expected = {block: content if block in kept else bytes(32) for block, content in before.items()}
        assert blocks_of(one) == expected
        assert contexts.sizes(1)["kv_kept"] == 0
        one.model_runner.kv_caches[0].copy_(_bytes(before))


def _bytes(blocks: dict[int, bytes]) -> Any:
    import torch

    return torch.frombuffer(bytearray(b"".join(blocks.values())), dtype=torch.uint8)


@pytest.mark.usefixtures("small_pieces")
def test_parking_or_waking_that_fails_at_any_step_loses_no_kept_block(device: Device, contexts: WorkerContexts) -> None:
    one, kept = contexts.by_key[1].worker, (5, 0, 2)
    before = with_blocks(device, one, "b")
    kept_only = {block: content if block in kept else bytes(32) for block, content in before.items()}
    steps = calls_of(device, lambda: contexts.park(1, 1, kept))
    assert steps == 2 * 3 + 1 + 2  # weights; the cache's segment; two pieces of kept blocks
    contexts.wake(1, BOTH)
    for at in range(steps):
        contexts.by_key[1].asleep = Asleep()
        device.driver.fails_in = at
        with pytest.raises(Failed):
            contexts.park(1, 1, kept)
        found = blocks_of(one)
        assert {block: found[block] for block in kept} == {block: before[block] for block in kept}
        assert contexts.sizes(1)["kv_kept"] == 0
    contexts.park(1, 1, kept)
    steps = calls_of(device, lambda: contexts.wake(1, BOTH))
    for at in range(steps):
        contexts.park(1, 1, kept)
        device.driver.fails_in = at
        with pytest.raises(Failed):
            contexts.wake(1, BOTH)
        assert contexts.sizes(1)["kv_kept"] == 32 * 3
        contexts.wake(1, BOTH)
        assert blocks_of(one) == kept_only


def test_a_waking_that_fails_once_all_is_back_keeps_its_blocks(
    device: Device, contexts: WorkerContexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, kept = contexts.by_key[1].worker, (3, 4)
    before = with_blocks(device, one, "b")
    contexts.park(1, 1, kept)
    wake = contexts.platform.wake

    def fail(*given: Any) -> None:
        wake(*given)
        raise Failed("the device says no")

    with monkeypatch.context() as fault:
        fault.setattr(contexts.platform, "wake", fail)
        with pytest.raises(Failed):
            contexts.wake(1, BOTH)
    assert contexts.sizes(1)["kv_kept"] == 64
    contexts.wake(1, BOTH)
    assert {block: blocks_of(one)[block] for block in kept} == {block: before[block] for block in kept}


def test_a_parked_model_can_let_its_kept_blocks_go(device: Device, contexts: WorkerContexts) -> None:
    one = contexts.by_key[1].worker
    with_blocks(device, one, "b")
    contexts.park(1, 1, (1, 2))
    contexts.park(1, 1)
    assert (contexts.sizes(1)["kv_kept"], contexts.sizes(1)["host"]) == (0, 32)
    contexts.wake(1, BOTH)
    assert not any(map(any, blocks_of(one).values()))


def test_what_a_runner_keeps_in_the_caches_memory_is_as_it_was(device: Device, contexts: WorkerContexts) -> None:
    """vLLM's second runner makes block tables, and tables of their addresses, together with the cache."""
    one = contexts.by_key[1].worker
    device.take("b/kv_cache")
    shared, own = device.give("b/kv_cache", 40, 12, filled=0x77)
    one.model_runner.kv_caches = [device.tensor(shared + 4, 10), device.tensor(shared + 20, 8)]
    device.tensor(own, 12).copy_(device.tensor(own, 12) + 1)
    before = device.driver.content()
    expected = {**before, shared: b"\x77" * 4 + bytes(10) + b"\x77" * 6 + bytes(8) + b"\x77" * 12}
    contexts.park(1, 1)
    assert contexts.sizes(1)["host"] == 32 + 4 + 6 + 12 + 12
    contexts.wake(1, BOTH)
    assert device.driver.content() == expected
    assert contexts.sizes(1)["host"] == 32
    for at in range(calls_of(device, lambda: contexts.park(1, 1))):
        contexts.wake(1, BOTH)
        device.driver.fails_in = at
        with pytest.raises(Failed):
            contexts.park(1, 1)
        assert device.driver.content() == expected
    contexts.park(1, 1)
    for at in range(calls_of(device, lambda: contexts.wake(1, BOTH))):
        contexts.park(1, 1)
        device.driver.fails_in = at
        with pytest.raises(Failed):
            contexts.wake(1, BOTH)
        contexts.wake(1, BOTH)
        assert device.driver.content() == expected


def test_what_a_model_has_beside_weights_and_cache_is_measured_once_it_is_loaded(
    device: Device, contexts: WorkerContexts
) -> None:
    contexts.by_key[1].used_before = device.driver.used - 32 - 56 - 5
    beside = {"overhead": 5, "kv_kept": 0, "kv_block": 0, "parks": True}
    assert contexts.sizes(1) == {"weights": 32, "kv": 56, "host": 0, "copies": 40, **beside}
    contexts.park(1, 1)
    assert contexts.sizes(1) == {"weights": 32, "kv": 0, "host": 32, "copies": 32, **beside}


def calls_of(device: Device, work: Any) -> int:
    before = device.driver.calls
    work()
    return device.driver.calls - before


def test_parking_that_fails_at_any_step_leaves_both_models_as_they_were(
    device: Device, contexts: WorkerContexts
) -> None:
    before = device.driver.content()
    steps = calls_of(device, lambda: contexts.park(1, 1))
    contexts.wake(1, BOTH)
    assert steps == 2 * 3 + 2  # pinned memory, copies and unmapping of the weights, unmapping of the cache
    for at in range(steps):
        contexts.by_key[1].asleep = Asleep()
        device.driver.fails_in = at
        with pytest.raises(Failed):
            contexts.park(1, 1)
        assert with_empty_cache(device, device.driver.content(), "b") == with_empty_cache(device, before, "b")
        assert not contexts.by_key[1].weights_away
        assert contexts.active == 0
        contexts.park(1, 1)
        contexts.wake(1, BOTH)
        assert device.driver.content() == with_empty_cache(device, before, "b")


def test_waking_that_fails_at_any_step_gives_its_memory_back_and_works_another_time(
    device: Device, contexts: WorkerContexts
) -> None:
    before = device.driver.content()
    contexts.park(1, 1)
    parked = device.driver.content()
    steps = calls_of(device, lambda: contexts.wake(1, BOTH))
    assert steps == 8  # each of four segments is mapped and filled
    for at in range(steps):
        contexts.park(1, 1)
        device.driver.fails_in = at
        with pytest.raises(Failed):
            contexts.wake(1, BOTH)
        assert device.driver.content() == parked
        contexts.wake(1, BOTH)
        assert device.driver.content() == with_empty_cache(device, before, "b")


def test_what_was_mapped_and_not_filled_is_filled_the_next_time(device: Device) -> None:
    """The platform alone: nobody parks again what a failed waking left."""
    platform, one, asleep = CudaPlatform(), worker("b"), Asleep()
    one.model_runner.kv_caches = [device.tensor(at, 40) for at in tagged(device, "b/kv_cache")]
    before = device.driver.content()
    platform.park(one, asleep)
    device.driver.fails_in = 1
    with pytest.raises(Failed):
        platform.wake(one, asleep, BOTH)
    platform.wake(one, asleep, BOTH)
    assert device.driver.content() == with_empty_cache(device, before, "b")


def test_a_parked_model_is_dropped_without_mapping_anything(device: Device, contexts: WorkerContexts) -> None:
    ours = {at: content for at, content in device.driver.content().items() if at in tagged(device, "a/")}
    contexts.park(1, 1)
    contexts.forget(1)
    assert device.driver.maps == 0
    assert not tagged(device, "b/")
    assert device.driver.content() == ours


def tagged(device: Device, prefix: str) -> set[int]:
    return {at for at, data in device.allocator.pointer_to_data.items() if data.tag.startswith(prefix)}


def test_a_resident_model_is_dropped_and_its_memory_released(device: Device, contexts: WorkerContexts) -> None:
    contexts.forget(1)
    assert device.driver.mapped == tagged(device, "a/")
    assert len(device.driver.mapped) == 5


def test_a_dropped_model_is_given_back_though_its_configuration_holds_its_cache(
    device: Device, contexts: WorkerContexts
) -> None:
    """Layers hold the cache, the configuration the layers, and each other: they go with the context, when collected."""

    class Layer:
        """Found by a search for garbage only."""

        def __init__(self) -> None:
            self.itself = self

    layer = Layer()
    device.held_by("b/kv_cache", layer)
    contexts.by_key[1].vllm_config = SimpleNamespace(static_forward_context={"attention": layer})
    del layer
    contexts.forget(1)
    assert device.driver.mapped == tagged(device, "a/")
    assert not tagged(device, "b/")


def test_a_dropped_model_whose_cache_somebody_holds_is_given_back_all_the_same(
    device: Device, contexts: WorkerContexts
) -> None:
    class Core:
        """In the process of its one worker it has the model's configuration, and goes after it."""

    core = Core()
    device.held_by("b/kv_cache", core)
    contexts.forget(1)
    assert not tagged(device, "b/") & device.driver.mapped
    assert tagged(device, "b/"), "torch still has tensors there"
    del core
    contexts.platform.collected()
    assert not tagged(device, "b/")


def test_nothing_is_unmapped_where_the_process_ends(device: Device, contexts: WorkerContexts) -> None:
    """vLLM lets go of its pools then, and the driver of everything."""
    before = set(device.driver.mapped)
    contexts.forget_others()
    assert device.driver.mapped == before


def test_a_parked_model_that_lets_go_of_its_weights_unmaps_nothing_twice(
    device: Device, contexts: WorkerContexts
) -> None:
    contexts.park(1, 1)
    contexts.park(1, 2)
    assert not tagged(device, "b/weights")
    assert contexts.by_key[1].asleep.host_bytes == 0


def test_slots_of_adapters_are_copied_each_time(device: Device) -> None:
    """They lie in the weights' memory, and an adapter may have been activated since the last time."""
    import torch

    (segment,) = device.give("c/weights", 32, filled=7)
    content = (ctypes.c_char * 32).from_address(segment)
    slot = torch.frombuffer(content, dtype=torch.uint8)[8:16]
    layer = torch.nn.Module()
    layer.lora_a_stacked = (slot,)
    platform, asleep = CudaPlatform(), Asleep()
    tuned = worker("c", lora_config="some")
    tuned.model_runner.model = layer
    for adapter in (1, 2):
        slot.fill_(adapter)
        platform.park(tuned, asleep)
        platform.wake(tuned, asleep, BOTH)
        assert slot.tolist() == [adapter] * 8
    plain = worker("c")
    plain.model_runner.model = layer
    before = device.driver.copied_out
    platform.park(plain, asleep)
    assert device.driver.copied_out == before


def test_a_load_that_fails_gives_back_what_it_had_taken(device: Device, contexts: WorkerContexts) -> None:
    from vllm.config import VllmConfig

    class Loading:
        """A worker that takes memory and then can't go on."""

        local_rank = rank = 0
        distributed_init_method = ""
        is_driver_worker = True
        model_config = SimpleNamespace(enable_cumem_allocator=True)
        cache_config = SimpleNamespace(gpu_memory_utilization=0.9)
        model_runner: Any = None

        def __init__(self, **_: Any) -> None:
            self.tag_of = worker("c").tag_of

        def init_device(self) -> None:
            self.model_runner = SimpleNamespace(model=None, kv_caches=[])

        def load_model(self) -> None:
            device.give("c/weights", 8, 8, filled=3)
            raise MemoryError("no memory for the third layer")

    wanted = VllmConfig()
    wanted.model_config = SimpleNamespace(is_moe=False)  # type: ignore[assignment]
    before, random = device.driver.content(), contexts.platform
    random.memory_used = lambda: 0  # type: ignore[method-assign]
    random.init_device = lambda worker: worker.init_device()  # type: ignore[method-assign]
    Loading.parallel_config = wanted.parallel_config  # type: ignore[attr-defined]
    contexts.by_key[0].worker, pattern = Loading(), contexts.by_key[0].worker
    with pytest.raises(MemoryError):
        contexts.load(2, wanted, {})
    contexts.by_key[0].worker = pattern
    assert device.driver.content() == before
    assert not tagged(device, "c/")


def test_what_a_user_told_torchs_allocator_holds_beside_what_we_tell_it() -> None:
    import torch

    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch does not tell what its allocator was told")
    before = torch._C._accelerator_getAllocatorSettings()
    theirs = "expandable_segments:True,max_split_size_mb:512,pinned_num_register_threads:2"
    try:
        torch._C._accelerator_setAllocatorSettings(theirs)
        for _ in range(2):
            CudaPlatform().prepare()
            assert torch._C._accelerator_getAllocatorSettings() == f"{theirs},pinned_use_cuda_host_register:True"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def test_where_torch_does_not_tell_them_its_settings_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    told: list[str] = []
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    CudaPlatform().prepare()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    CudaPlatform().prepare()
    ours = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    assert told == [ours, f"max_split_size_mb:512,{ours}"]


def test_a_model_with_graphs_is_not_parked_without_tagged_memory() -> None:
    untagged = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False))
    assert not CudaPlatform().parks(untagged)
    with pytest.raises(ValueError, match="CUDA graphs"):
        CudaPlatform().park(untagged, Asleep())
    assert CudaPlatform().parks(SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True)))
    assert CudaPlatform().parks(worker("a"))


@pytest.mark.parametrize("backend", ["mp", "uni", "ray"])
@pytest.mark.parametrize("engine", [0, 1, 3])
def test_on_cuda_every_model_of_a_data_parallel_rank_goes_to_the_same_device(backend: str, engine: int) -> None:
    """By vLLM's own ``init_device``, stopped as soon as it has chosen a device: there is none here."""
    from vllm.v1.worker.gpu_worker import Worker

    parallel = SimpleNamespace(
        distributed_executor_backend=backend,
        data_parallel_backend="mp",
        nnodes_within_dp=1,
        data_parallel_rank_local=engine,
        data_parallel_index=engine,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        tensor_parallel_size=2,
        world_size=2,
        assigned_physical_gpu_ids=None,
        nnodes=1,
        local_world_size=2,
    )

    def chosen(local_rank: int) -> Any:
        worker = object.__new__(Worker)
        worker.local_rank, worker.parallel_config = local_rank, parallel
        worker.device_config = SimpleNamespace(device_type="cuda", device=SimpleNamespace(type="cuda"))
        with pytest.raises((AssertionError, RuntimeError, AttributeError)):  # which one is the version's
            worker.init_device()
        return worker

    for given in (0, 1):
        first = chosen(given)
        assert first.local_rank == given + (0 if backend == "ray" else 2 * engine)
        second = chosen(CudaPlatform().local_rank(first))
        assert second.local_rank == first.local_rank
