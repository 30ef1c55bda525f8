"""CUDA and its kin, by the worker that vLLM's GPU worker is."""

from typing import Any

from service.platforms.base import Platform


class CudaPlatform(Platform):
    """vLLM's GPU worker."""

    def init_device(self, worker: Any) -> None:
        # The check that this share of the device is free counts the other contexts' memory as taken;
        # what a context may use is decided by our budgets, and given as kv_cache_memory_bytes.
        worker.cache_config.gpu_memory_utilization = 0.0
        super().init_device(worker)

    def device_budget(self) -> int:
        from vllm.platforms import current_platform

        return int(current_platform.get_device_total_memory() * 0.9)

    def memory_used(self) -> int:
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
