"""CPU, where host and device are one: parked means that the KV cache is given back to the system."""

import os
import time
from pathlib import Path

import psutil

from service.platforms.base import Platform

_NAP_S = 20e-6
_DYNAMIC_THREADS = "TORCHINDUCTOR_CPP_DYNAMIC_THREADS"


class CpuPlatform(Platform):
    """vLLM's CPU worker."""

    weights_move = False
    own_preloads = True  # tcmalloc, and torch's libgomp, whose threads are bound where a process is forked
    seeds_rewind = False
    slices = True
    worker_modules = ("vllm.v1.worker.cpu_worker", "vllm.distributed.stateless_coordinator")

    def imported(self) -> None:
        import torch._inductor.config

        os.environ[_DYNAMIC_THREADS] = "1"
        torch._inductor.config.cpp.dynamic_threads = True

    def prepare(self) -> None:
        """Let the readers of vLLM's shared-memory queues nap between two looks instead of yielding in a tight loop.

        The spinners take the cores that the model, the frontends and everyone else on the machine need: with two
        cores, a broker beside the engine stood still for seconds. (Waiting for the queues' own notification is no
        way out: it gets lost now and then, and the reader looks again after five seconds only.)
        """
        from vllm.distributed.device_communicators import shm_broadcast

        shm_broadcast.sched_yield = lambda: time.sleep(_NAP_S)

    def device_budget(self, share: float | None) -> int:
        memory = psutil.virtual_memory()
        return memory.available // 2 if share is None else int(memory.total * share)

    def memory_used(self) -> int:
        return resident_bytes("self")


def resident_bytes(pid: int | str) -> int:
    """Resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
