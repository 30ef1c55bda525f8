"""An executor for cores that run two batches at once, as they do with a pipeline, or where they schedule ahead."""

from vllm.config import VllmConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class TwoAhead(MultiprocExecutor):
    """vLLM's executor of worker processes; each core of its process keeps two batches under way."""

    def _init_executor(self) -> None:
        super()._init_executor()
        VllmConfig.max_concurrent_batches = 2  # type: ignore[method-assign, assignment]
