"""CUDA and its kin, by vLLM's GPU worker.

Run on one H200 with vLLM 0.26 by ``tests.bench.card``: models were started, switched, parked, brought back beside
another's steps, loaded in slices (``mp``) and dropped, and said the same. Not run: 0.32, several cards, kept blocks of
a KV cache, adapters, ROCm, and that a dropped model's memory is unmapped whoever holds it (``collected``).

What was checked in their source (0.26 and 0.32), vllm/v1/worker/gpu_worker.py and vllm/device_allocator:

- ``Worker.__init__`` and ``init_device`` keep everything of a model on the worker. What is global is set anew by
  ``init_device`` (workspace manager, random seed: a model's own, see ``engine/versions/held.py``) or does nothing the
  second time (distributed environment, device).
- ``init_device`` refuses where less memory is free than ``gpu_memory_utilization`` asks for, and counts the other
  models' memory as taken: hence ``init_device`` below. ``determine_available_memory`` returns
  ``kv_cache_memory_bytes`` where that is set, as our budgets set it.
- Captured graphs hold addresses. So parked memory must come back at the address it had: vLLM's cumem allocator unmaps
  and maps physical memory below addresses that stay. Its own sleep unmaps everything in the process, and its worker
  allows one model per process; cuda_worker tags each model's memory, and only what has a model's tags moves here.
- Graphs of all models come from one pool, as those of one model's batch sizes do: they never run at the same time.
  Their memory and the workspaces stay on the device while a model is parked: they are its overhead in the budgets.
- vLLM's second runner makes block tables, and tables of their addresses, in the KV cache's memory. vLLM makes the
  latter anew at each waking; here all that lies beside the cache comes back with it.
- ``Worker.shutdown`` drops every model's pools: a dropped model's worker is not shut down. Its memory is unmapped, and
  struck out of the allocator's books once no tensor is there; the pools stay, as vLLM's do, until the process ends.
- Blocks of the KV cache that are kept are gathered before its memory is unmapped, and scattered once it is mapped and
  zeroed: addresses stay, so block tables and graphs are right. A piece of some MiB is gathered in torch's own memory.
- The weights' pool has the slots of adapters, too, which change: their segments are copied at each parking.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from service.platforms.base import (
    KV_CACHE,
    WEIGHTS,
    Asleep,
    Platform,
    changing_tensors,
    kv_tensors,
    pinned_bytes,
    storages,
)

_ITS_WORKER = "vllm.v1.worker.gpu_worker.Worker"
_OUR_WORKER = "service.platforms.cuda_worker.ContextWorker"
_PINNED = {"pinned_use_cuda_host_register": True, "pinned_num_register_threads": 8}
"""Settings of torch's allocator: how pinned memory is made, and threads that touch its pages."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The variables that say those at the start; the first one that says something holds."""
_DEFAULT = 4
"""``cudaMemcpyDefault``: addresses tell where they are."""


class CudaPlatform(Platform):
    """vLLM's GPU worker."""

    slices = True
    idle_threads = rf"{Platform.idle_threads}|cuda\d+"
    """The second is there once vLLM has asked NVML for devices. Children of a process with both opened theirs."""

    def __init__(self) -> None:
        super().__init__()
        self._gone: set[str] = set()
        """What the tags of models begin with that were let go of."""

    def prepare(self) -> None:
        """Let several threads register pinned memory: 8 GB a second instead of 2, on the H200 that was tried."""
        import torch

        settings = _allocator_settings()
        said = {field.partition(":")[0].strip() for field in settings.split(",")}
        missing = [f"{name}:{value}" for name, value in _PINNED.items() if name not in said]
        torch._C._accelerator_setAllocatorSettings(",".join([settings, *missing] if settings else missing))

    def arrange(self, config: Any) -> None:
        """Let its memory be tagged; a worker class or a KV connector with memory of its own stays as it is."""
        from vllm.platforms import current_platform

        ours = config.parallel_config.worker_cls == _ITS_WORKER and config.kv_transfer_config is None
        if ours and current_platform.is_cumem_allocator_available():
            config.parallel_config.worker_cls = _OUR_WORKER
            config.model_config.enable_cumem_allocator = True

    def local_rank(self, worker: Any) -> int:
        """The one that it was made with: initializing its device added the ranks of data parallelism before it."""
        rank, parallel = super().local_rank(worker), worker.parallel_config
        apart = parallel.distributed_executor_backend in {"ray", "external_launcher"}
        if apart or parallel.data_parallel_backend == "ray" or parallel.nnodes_within_dp != 1:
            return rank
        before = parallel.data_parallel_rank_local
        if before is None:
            before = parallel.data_parallel_index
        return rank - before * int(parallel.world_size)

    def init_device(self, worker: Any) -> None:
        import torch

        free, total = torch.cuda.mem_get_info()
        cache = worker.cache_config
        cache.gpu_memory_utilization = min(cache.gpu_memory_utilization, 0.95 * free / total)
        super().init_device(worker)

    def random_state(self) -> Any:
        import torch

        return torch.cuda.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        import torch

        torch.cuda.set_rng_state(state)

    def release(self, worker: Any) -> None:
        super().release(worker)
        self._let_go(worker)

    def _let_go(self, worker: Any) -> None:
        if _is_tagged(worker):
            self._gone.add(worker.tag_of(""))

    def collected(self) -> None:
        """The memory of models that went goes, whoever still holds tensors in it: a core beside the worker, or what
        compiled it. What nobody holds is struck out of the allocator's books.

        On an H200 graphs and buffers of compiled models stayed behind, 46 MiB for each load of a tiny one, and it was
        not found who holds them.
        """
        if not self._gone:
            return
        import torch
        from vllm.device_allocator.cumem import CuMemAllocator

        torch.cuda.synchronize()
        allocator, prefixes = CuMemAllocator.get_instance(), tuple(self._gone)
        books = allocator.pointer_to_data
        for data in list(books.values()):
            if data.tag.startswith(prefixes):
                _unmap(data)
        for tag, entry in allocator.allocator_and_pools.items():
            if not tag.startswith(prefixes):
                continue
            for pool, _ in entry if isinstance(entry, list) else [entry]:  # 0.26 has one pool a tag
                for segment in pool.snapshot():
                    if not segment["allocated_size"]:
                        books.pop(segment["address"], None)
        self._gone = {prefix for prefix in prefixes if any(data.tag.startswith(prefix) for data in books.values())}

    def parks(self, worker: Any) -> bool:
        return _is_tagged(worker) or bool(worker.model_config.enforce_eager)

    def park(self, worker: Any, asleep: Asleep, blocks: Sequence[int] = ()) -> None:
        """Unmap a model's memory, its weights copied to pinned memory the first time, kept blocks each time.

        So is what lies beside the cache in the cache's memory, which a runner makes together with it: block tables,
        and tables of addresses.

        Raises ValueError where the model has graphs and its memory is not tagged.
        """
        if not _is_tagged(worker):
            if not worker.model_config.enforce_eager:
                raise ValueError("a model with CUDA graphs is parked by the cumem allocator, which it does not use")
            return super().park(worker, asleep, blocks)
        import torch

        torch.cuda.synchronize()
        self.keep_blocks(worker, asleep, blocks)
        changing = [tensor.data_ptr() for tensor in changing_tensors(worker)]
        for address, allocation in _allocations(worker, WEIGHTS):
            if allocation.is_asleep:
                continue
            size = allocation.handle[1]
            if address not in asleep.away:  # otherwise the host has it, and the device not yet
                if address not in asleep.host:
                    asleep.host[address] = _copied_out(address, size)
                elif any(address <= each < address + size for each in changing):
                    _copy_out(address, asleep.host[address])
            asleep.away.add(address)
            _unmap(allocation)
        cache = sorted((each.data_ptr(), each.nbytes()) for each in storages(kv_tensors(worker)))
        for address, allocation in _allocations(worker, KV_CACHE):
            if not allocation.is_asleep and address not in asleep.away:
                for at, size in _beside(cache, address, allocation.handle[1]):
                    asleep.beside[at] = _copied_out(at, size)
            asleep.away.add(address)
            _unmap(allocation)
        return None

    def wake(self, worker: Any, asleep: Asleep, tags: frozenset[str]) -> None:
        if not _is_tagged(worker):
            return super().wake(worker, asleep, tags)
        back: list[int] = []
        with _copies() as copies:
            for tag in (WEIGHTS, KV_CACHE):
                for address, allocation in _allocations(worker, tag):
                    if tag not in tags or address not in asleep.away:
                        continue
                    _map(allocation)
                    if tag == WEIGHTS:
                        copies.bring(address, asleep.host[address])
                    else:
                        copies.zero(address, allocation.handle[1])
                        for at, copy in asleep.beside.items():
                            if address <= at < address + allocation.handle[1]:
                                copies.bring(at, copy)
                    back.append(address)
        asleep.away.difference_update(back)
        if KV_CACHE in tags:
            asleep.beside = {}
            self.return_blocks(worker, asleep)
        return None

    @contextmanager
    def aside(self, worker: Any) -> Iterator[None]:
        """On its device: a new thread has the first one."""
        import torch

        with torch.cuda.device(worker.device):
            yield
            torch.cuda.current_stream().synchronize()

    def empty(self, worker: Any, asleep: Asleep) -> None:
        if not _is_tagged(worker):
            return super().empty(worker, asleep)
        worker.model_runner.model = None
        worker.model_runner.kv_caches = []
        for layer in worker.vllm_config.compilation_config.static_forward_context.values():
            layer.kv_cache = None
        asleep.host, asleep.away, asleep.beside = {}, set(), {}
        asleep.forget_blocks()
        self._let_go(worker)
        return None

    def device_budget(self, share: float | None) -> int:
        from vllm.platforms import current_platform

        return int(current_platform.get_device_total_memory() * (share or 0.9))

    def memory_used(self) -> int:
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free

    def weights_bytes(self, worker: Any) -> int:
        """Those of a parked model, too: what it takes when it is back."""
        if not _is_tagged(worker):
            return super().weights_bytes(worker)
        return sum(each.handle[1] for _, each in _allocations(worker, WEIGHTS))

    def copies_bytes(self, worker: Any, asleep: Asleep) -> int:
        if not _is_tagged(worker):
            return super().copies_bytes(worker, asleep)
        coming = [each.handle[1] for address, each in _allocations(worker, WEIGHTS) if address not in asleep.host]
        return asleep.copies_bytes + sum(map(pinned_bytes, coming))

    def kv_bytes(self, worker: Any) -> int:
        if not _is_tagged(worker):
            return super().kv_bytes(worker)
        return sum(each.handle[1] for _, each in _allocations(worker, KV_CACHE) if not each.is_asleep)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _allocator_settings() -> str:
    """All that torch's allocator was told: it forgets what it is not told again when it is told something."""
    import torch

    if (told := getattr(torch._C, "_accelerator_getAllocatorSettings", None)) is not None:  # not in 0.26's torch
        return str(told())
    return next(filter(None, map(os.environ.get, _SETTINGS)), "")


def _is_tagged(worker: Any) -> bool:
    return hasattr(worker, "tag_of") and worker.model_config.enable_cumem_allocator


def _allocations(worker: Any, tag: str) -> Iterator[tuple[int, Any]]:
    """Address and allocation of a model's tagged memory."""
    if _is_tagged(worker):
        from vllm.device_allocator.cumem import CuMemAllocator

        wanted = worker.tag_of(tag)
        everything = list(CuMemAllocator.get_instance().pointer_to_data.items())  # a thread may wake one meanwhile
        yield from [(address, each) for address, each in everything if each.tag == wanted]


def _beside(cache: Sequence[tuple[int, int]], address: int, size: int) -> Iterator[tuple[int, int]]:
    """Address and bytes of each part of some memory that is none of a KV cache's, whose storages are in order."""
    at, end = address, address + size
    for start, many in cache:
        if start < end and start + many > at:
            if start > at:
                yield at, start - at
            at = start + many
    if at < end:
        yield at, end - at


class _Copies:
    """What is on its way to a device, on a stream of its own."""

    def __init__(self, stream: int) -> None:
        self._stream = ctypes.c_void_p(stream)

    def bring(self, address: int, copy: Any) -> None:
        whole = ctypes.c_size_t(copy.nbytes)
        _runtime(
            "MemcpyAsync", ctypes.c_void_p(address), ctypes.c_void_p(copy.data_ptr()), whole, _DEFAULT, self._stream
        )

    def zero(self, address: int, size: int) -> None:
        _runtime("MemsetAsync", ctypes.c_void_p(address), 0, ctypes.c_size_t(size), self._stream)


@contextmanager
def _copies() -> Iterator[_Copies]:
    """Copies that have arrived once it is left, in whatever way: no memory is unmapped that one is on its way to."""
    import torch

    stream = torch.cuda.Stream()
    try:
        yield _Copies(stream.cuda_stream)
    finally:
        stream.synchronize()


def _runtime(name: str, *given: Any) -> None:
    """A call of CUDA's runtime, or of its kin's."""
    import torch
    from vllm.device_allocator.cumem import libcudart

    libcudart.CUDART_CHECK(getattr(libcudart.lib, f"{'hip' if torch.version.hip else 'cuda'}{name}")(*given))


def _unmap(allocation: Any) -> None:
    from vllm.device_allocator.cumem import unmap_and_release

    if not allocation.is_asleep:
        unmap_and_release(allocation.handle)
        allocation.is_asleep = True


def _map(allocation: Any) -> None:
    from vllm.device_allocator.cumem import create_and_map

    if allocation.is_asleep:
        create_and_map(allocation.handle)
        allocation.is_asleep = False


def _copied_out(address: int, size: int) -> Any:
    import torch

    copy = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    _copy_out(address, copy)
    return copy


def _copy_out(address: int, copy: Any) -> None:
    from vllm.device_allocator.cumem import libcudart

    libcudart.cudaMemcpy(copy.data_ptr(), address, copy.nbytes)
