"""What models must have in common to live in one engine: everything that vLLM settles once per process."""

from typing import Any

from service.engine.versions import vllm_core
from service.errors import ConfigError

_ONE_PER_ENGINE = (
    ("parallel_config", "tensor_parallel_size", "worker processes are started once, for all models"),
    ("parallel_config", "pipeline_parallel_size", "worker processes are started once, for all models"),
    ("parallel_config", "prefill_context_parallel_size", "worker processes are started once, for all models"),
    ("parallel_config", "decode_context_parallel_size", "process groups are made once, for all models"),
    ("parallel_config", "data_parallel_size", "engine cores are started once, for all models"),
    ("parallel_config", "distributed_executor_backend", "there is one executor"),
    ("parallel_config", "worker_cls", "there is one worker class"),
    ("parallel_config", "worker_extension_cls", "it is mixed into the one worker class"),
    ("scheduler_config", "async_scheduling", "a worker process decides at its start how it hands outputs out"),
)


def require_compatible(first: Any, config: Any, *, first_alias: str, alias: str) -> None:
    """Raises ConfigError that names the alias, the argument, both values and the reason."""
    if (reason := vllm_core.refused_executor(config)) is not None:
        raise ConfigError(f"{alias}: distributed_executor_backend is 'ray': {reason}")
    for group, name, reason in _ONE_PER_ENGINE:
        theirs, ours = (getattr(getattr(each, group, None), name, None) for each in (first, config))
        if theirs != ours:
            raise ConfigError(f"{alias}: {name} is {ours!r}, but {theirs!r} for {first_alias}: {reason}")
    if config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe:
        raise ConfigError(
            f"{alias}: a mixture of experts with data parallelism steps in lockstep over all ranks, "
            "which can't be switched one by one"
        )
