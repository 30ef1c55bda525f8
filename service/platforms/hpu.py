"""Gaudi, by vllm-gaudi's HPUWorker."""

from typing import Any

from service.platforms.base import Platform


class HpuPlatform(Platform):
    """vLLM's HPU worker. The bucketing manager is one per process, and belongs to the model that runs."""

    def leave(self, worker: Any) -> None:
        manager = getattr(worker.model_runner, "bucketing_manager", None)
        if manager is not None:
            type(manager).deactivate()

    def enter(self, worker: Any) -> None:
        manager = getattr(worker.model_runner, "bucketing_manager", None)
        if manager is not None:
            manager.activate()

    def memory_used(self) -> int:
        import torch

        free, total = torch.hpu.mem_get_info()
        return total - free
