"""CPU, where host and device are one: parked means that the KV cache is given back to the system."""

import mmap
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil

from service.platforms.base import KV_CACHE, Asleep, Platform, kv_tensors, storages
from service.platforms.kv_blocks import Region

_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3
_NAP_SHARE = 1 / 256
"""Of the time that was waited so far: so much later at most than it could, a step goes on."""
_DYNAMIC_THREADS = "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_COUNTED_AHEAD = "2"


class CpuPlatform(Platform):
    """vLLM's CPU worker."""

    weights_move = False
    own_preloads = True  # tcmalloc, and torch's libgomp, whose threads are bound where a process is forked
    seeds_rewind = False
    slices = True
    worker_modules = (
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.distributed.stateless_coordinator",
        "vllm.distributed.elastic_ep.elastic_execute",
        "vllm.model_executor.layers.quantization.online.base",
    )

    def imported(self) -> None:
        import torch._inductor.config
        from vllm.platforms import current_platform

        # A worker would look through all that was imported for each kernel that has another implementation here.
        if (override := getattr(type(current_platform), "register_triton_kernel_overrides", None)) is not None:
            with warnings.catch_warnings(action="ignore"):  # of what is old there, which is nobody's to mend
                override()
            current_platform.register_triton_kernel_overrides = lambda: None
        os.environ[_DYNAMIC_THREADS] = "1"
        torch._inductor.config.cpp.dynamic_threads = True

    def prepare(self) -> None:
        """Let the readers of vLLM's shared-memory queues nap between two looks instead of yielding in a tight loop.

        The spinners take the cores that the model, the frontends and everyone else on the machine need: with two
        cores, a broker beside the engine stood still for seconds. (Waiting for the queues' own notification is no
        way out: it gets lost now and then, and the reader looks again after five seconds only.)
        """
        from vllm.distributed.device_communicators import shm_broadcast

        naps, theirs = Naps(), shm_broadcast.SpinCondition.record_read

        def record_read(condition: Any) -> None:
            theirs(condition)
            naps.found()

        shm_broadcast.sched_yield = naps.nap
        shm_broadcast.SpinCondition.record_read = record_read

    def park(self, worker: Any, asleep: Asleep, blocks: Sequence[int] = ()) -> None:
        """Give the pages of a KV cache back, but for those of ``blocks``, which stay where they are.

        The system answers the next touch of a page that was given back with zeros, so waking takes no time.
        """
        from service.platforms.cpu_memory import give_back

        if KV_CACHE in asleep.away and (blocks or not asleep.blocks):
            return
        asleep.away.add(KV_CACHE)
        asleep.blocks = tuple(blocks)
        asleep.in_place = sum(give_back(each, asleep.regions, blocks) for each in storages(kv_tensors(worker)))

    def wake(self, worker: Any, asleep: Asleep, tags: frozenset[str]) -> None:  # noqa: ARG002 - nothing has moved
        if KV_CACHE in tags:
            asleep.away.discard(KV_CACHE)
            asleep.forget_blocks()

    def empty(self, worker: Any, asleep: Asleep) -> None:
        from service.platforms.cpu_memory import give_back

        for storage in storages(kv_tensors(worker)):
            if not storage.resizable():
                give_back(storage, (), ())
        super().empty(worker, asleep)

    @property
    def lends(self) -> bool:
        """Not with ``vm.overcommit_memory`` 2: the kernel counts pages as soon as they are mapped then."""
        return not (_OVERCOMMIT.exists() and _OVERCOMMIT.read_text().strip() == _COUNTED_AHEAD)

    def kv_memory(self, *, lent: bool) -> AbstractContextManager[object]:
        """Its zeros are the system's: to have torch write them took longer than the load of a model's weights."""
        from service.platforms.cpu_memory import Untouched

        return Untouched(small_pages=lent) if self.lends else nullcontext()

    def give_back(self, worker: Any, regions: Sequence[Region], blocks: Sequence[int]) -> None:
        from service.platforms.cpu_memory import give_back

        for storage in storages(kv_tensors(worker)):
            give_back(storage, regions, blocks)

    def block_bytes(self, regions: Sequence[Region]) -> int:
        """In whole pages of the system's, of which a block may have the first and the last with others."""
        return sum(
            region.layers * (-(-(region.page + mmap.PAGESIZE - 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
            for region in regions
        )

    def device_budget(self, share: float | None) -> int:
        memory = psutil.virtual_memory()
        return memory.available // 2 if share is None else int(memory.total * share)

    def memory_used(self) -> int:
        return resident_bytes("self")


def resident_bytes(pid: int | str) -> int:
    """Resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


class Naps:
    """Pauses between two looks at what is not there yet, which get longer with the time that was looked in vain."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._since: float | None = None

    def nap(self) -> None:
        now = self._clock()
        if self._since is None:
            self._since = now
        self._sleep(min(_LONGEST_NAP_S, max(_SHORTEST_NAP_S, _NAP_SHARE * (now - self._since))))

    def found(self) -> None:
        """It is there: whatever is looked for next has been looked for no time yet."""
        self._since = None
