"""The entry point that vLLM calls in each of its processes: it teaches the engine core about contexts.

Only methods that must ask *whose* request, call or step this is are replaced, each by one that finds the context and
lets vLLM's own method run on it, those that end a process, two that a request which was begun elsewhere comes by, one
that a session's next part comes by, one that is called before tokens are sampled, and what makes the seed of block
hashes. A core with a single context behaves as if this were not installed.
"""

import logging
from collections.abc import Callable
from typing import Any

from service.platforms import current

_REGISTERED = "_gearshift_registered"


def register() -> None:
    """Route by context in this process's engine core. May be called any number of times."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc

    if hasattr(EngineCore, _REGISTERED):
        return
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from service.engine.core import routing
    from service.engine.core.continuing import create_grammar
    from service.engine.core.grammar import LOGGERS, hide_tokens
    from service.engine.system import garbage
    from service.engine.versions import vllm_core, vllm_kv, vllm_worker
    from service.engine.worker import calls, seeds
    from service.engine.worker.continuing import remember

    current().prepare()
    garbage.keep_imports()
    setattr(EngineCore, _REGISTERED, True)
    for logger in LOGGERS:
        logging.getLogger(logger).addFilter(hide_tokens)
    EngineCore.gearshift = routing.gearshift
    for owner, name, routed in (
        (EngineCore, "preprocess_add_request", routing.preprocess_add_request),
        (EngineCore, "add_request", routing.add_request),
        (EngineCore, "abort_requests", routing.abort_requests),
        (EngineCore, "step", routing.step),
        (EngineCore, "step_with_batch_queue", routing.step),
        (EngineCore, "shutdown", routing.shutdown),
        (Scheduler, "_update_request_as_session", vllm_core.update_request_as_session),
        (core, "init_none_hash", vllm_core.init_none_hash),
        (core, "get_kv_cache_configs", vllm_kv.get_kv_cache_configs),
        (WorkerWrapperBase, "initialize_from_config", vllm_worker.initialize_from_config),
        (WorkerProc, "shutdown", calls.shutdown),
        (StructuredOutputManager, "_create_grammar", create_grammar),
        (CachedRequestState, "__post_init__", remember),
        (InputBatch, "update_async_output_token_ids", seeds.keep),
        (EngineCoreProc, "_handle_client_request", routing.handle_client_request),
        (EngineCoreProc, "_pause_complete", routing.pause_complete),
        (DPEngineCoreProc, "_pause_complete", routing.pause_complete),
    ):
        setattr(owner, name, _routed(getattr(owner, name), routed))


def _routed(original: Callable[..., Any], routed: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        return routed(original, *args, **kwargs)

    method.__name__ = original.__name__
    method.__doc__ = original.__doc__
    method.__wrapped__ = original  # type: ignore[attr-defined]
    return method
