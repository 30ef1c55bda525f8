"""What models must have in common to live in one engine: everything that vLLM settles once per process."""

from collections.abc import Mapping
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
    ("parallel_config", "disable_custom_all_reduce", "process groups are made once, for all models"),
    ("parallel_config", "enable_elastic_ep", "process groups are made once, for all models"),
    ("scheduler_config", "async_scheduling", "a worker process decides at its start how it hands outputs out"),
)


_BESIDE_EXPERTS = (
    ("use_all2all", "their process group is made once, with or without exchange between all ranks"),
    ("all2all_backend", "the exchange between all ranks is set up once, for all of them"),
)
"""Of the parallel configs of two mixtures of experts, where there is more than one rank to exchange with."""


def require_beside(others: Mapping[str, Any], config: Any, *, alias: str) -> None:
    """Raises ConfigError where a model can't live beside one of ``others``, whichever of them was first."""
    for other, theirs in others.items():
        if config.model_config.is_moe and theirs.model_config.is_moe:
            _require_one_exchange(other, theirs.parallel_config, alias, config.parallel_config)
        if (port := _events_port(config)) is not None and port == _events_port(theirs):
            raise ConfigError(
                f"{alias}: kv_events_config publishes at {port}, and so does that of {other}; "
                "give each its own endpoint"
            )


def _require_one_exchange(other: str, theirs: Any, alias: str, ours: Any) -> None:
    if not (getattr(theirs, "use_all2all", False) or getattr(ours, "use_all2all", False)):
        return
    for name, reason in _BESIDE_EXPERTS:
        values = getattr(theirs, name), getattr(ours, name)
        if values[0] != values[1]:
            raise ConfigError(
                f"{alias}: {name} is {values[1]!r}, but {values[0]!r} for {other}: both are mixtures of experts, "
                f"and {reason}"
            )


def _events_port(config: Any) -> str | None:
    events = config.kv_events_config
    return events.endpoint if events is not None and events.enable_kv_cache_events else None


def require_compatible(first: Any, config: Any, *, first_alias: str, alias: str) -> None:
    """Raises ConfigError that names the alias, the argument, both values and the reason."""
    if (reason := vllm_core.refused_executor(config)) is not None:
        backend = config.parallel_config.distributed_executor_backend
        raise ConfigError(f"{alias}: distributed_executor_backend is {backend!r}: {reason}")
    for group, name, reason in _ONE_PER_ENGINE:
        theirs, ours = (getattr(getattr(each, group, None), name, None) for each in (first, config))
        if theirs != ours:
            raise ConfigError(f"{alias}: {name} is {ours!r}, but {theirs!r} for {first_alias}: {reason}")
    if config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe:
        raise ConfigError(
            f"{alias}: a mixture of experts with data parallelism steps in lockstep over all ranks, "
            "which can't be switched one by one"
        )
