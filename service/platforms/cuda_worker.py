"""vLLM's GPU worker as one of several in its process. Imported in worker processes only."""

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.worker.gpu_worker import Worker

_NUMBERS = itertools.count()


class ContextWorker(Worker):
    """One model's worker, whose memory carries tags of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prefix = f"context-{next(_NUMBERS)}/"

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if not self.model_config.enable_cumem_allocator:
            return nullcontext()
        return get_mem_allocator_instance().use_memory_pool(tag=self.tag_of(tag))

    def tag_of(self, tag: str) -> str:
        """vLLM's ``tag`` for this model; no other worker of this process has it or will."""
        return self._prefix + tag
