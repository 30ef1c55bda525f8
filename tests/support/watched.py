"""An executor whose core answers for itself too where its workers are asked for a snapshot of their process."""

from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from service.engine.system import envelope
from service.engine.worker import calls
from tests.support import detector


class Watched(MultiprocExecutor):
    """vLLM's executor of worker processes; the answers of ``detector.take`` are the workers', then the core's."""

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, **how: Any
    ) -> Any:
        answers = super().collective_rpc(method, timeout, args, kwargs, **how)
        if method is calls.run and envelope.unseal(args[1], key=envelope.launch_key())[0] is detector.take:
            return [*answers, detector.take()]
        return answers
