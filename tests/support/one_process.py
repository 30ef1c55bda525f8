"""An executor for a core that has its worker in its own process, as on one card of a GPU or of Gaudi."""

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class OneProcess(UniProcExecutor):
    """vLLM's own; by its name, "uni", its CPU platform would take worker processes instead."""
