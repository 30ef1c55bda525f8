"""What models must have in common to live in one engine: everything that vLLM settles once per process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.engine.versions import vllm_core
from service.errors import ConfigError
from service.platforms import current

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
        for place in _events_places(config):
            if taken := next(filter(place.meets, _events_places(theirs)), None):
                raise ConfigError(
                    f"{alias}: kv_events_config takes {place}, and that of {other} takes {taken}; give each its own "
                    "endpoint, and a port beside those of its data parallel ranks"
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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a socket is bound: at a host's port, or, without one, under a name of the process or the machine."""

    name: str
    port: int | None

    def meets(self, other: "_Place") -> bool:
        """Whether both can't be had. At port 0 the system chooses."""
        if self.port != other.port or self.port == 0:
            return False
        return self.name == other.name or (self.port is not None and bool({self.name, other.name} & _ALL_HOSTS))

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


_ALL_HOSTS = frozenset({"tcp://*", "tcp://0.0.0.0", "tcp://[::]"})


def _events_places(config: Any) -> list[_Place]:
    """What a model's publishers bind in all its ranks, of which vLLM gives each the port behind the one before."""
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return []
    found: list[_Place] = []
    for endpoint in filter(None, (events.endpoint, events.replay_endpoint)):
        name, _, port = endpoint.rpartition(":")
        for rank in range(config.parallel_config.data_parallel_size):
            if endpoint.startswith("tcp://") and port.isdecimal():
                found.append(_Place(name, int(port) and int(port) + rank))
            else:
                found.append(_Place(f"{endpoint}_dp{rank}" if rank else endpoint, None))
    return found


_READ_AT_IMPORT = {
    "VLLM_USE_BREAKABLE_CUDAGRAPH": "vLLM's operations are made with or without breaks when its modules are imported",
}
"""Environment variables that vLLM may set for a model, and that its modules read once for all models."""


def require_one_import(
    theirs: Mapping[str, str | None], ours: Mapping[str, str | None], *, first_alias: str, alias: str
) -> None:
    """Raises ConfigError where two models want other modules; ``theirs`` and ``ours`` are what vLLM set for them.

    That it sets it for some architectures on CUDA is by reading; it was not run on a card.
    """
    for name, reason in _READ_AT_IMPORT.items():
        wanted = [(each.get(name) or os.environ.get(name)) == "1" for each in (theirs, ours)]
        if wanted[0] != wanted[1]:
            raise ConfigError(
                f"{alias}: {name} is {wanted[1]:d}, but {wanted[0]:d} for {first_alias}: {reason}; "
                f"set {name} to 0 or 1 for the whole engine"
            )


def require_compatible(first: Any, config: Any, *, first_alias: str, alias: str) -> None:
    """Raises ConfigError that names the alias, the argument, both values and the reason."""
    if (reason := vllm_core.refused_executor(config)) is not None:
        backend = config.parallel_config.distributed_executor_backend
        raise ConfigError(f"{alias}: distributed_executor_backend is {backend!r}: {reason}")
    if getattr(config.parallel_config, "enable_eplb", False) and current().weights_move:
        raise ConfigError(
            f"{alias}: enable_eplb is True: experts would move behind the copy of the weights that a parked model has "
            "on the host; leave it out"
        )
    multimodal = getattr(config.model_config, "multimodal_config", None)
    if multimodal is not None and getattr(multimodal, "mm_processor_cache_type", None) == "shm":
        raise ConfigError(
            f"{alias}: mm_processor_cache_type is 'shm': its memory has one name for a whole engine, which is begun "
            "before a model's frontend; leave it at 'lru'"
        )
    for group, name, reason in _ONE_PER_ENGINE:
        theirs, ours = (getattr(getattr(each, group, None), name, None) for each in (first, config))
        if theirs != ours:
            raise ConfigError(f"{alias}: {name} is {ours!r}, but {theirs!r} for {first_alias}: {reason}")
    if config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe:
        raise ConfigError(
            f"{alias}: a mixture of experts with data parallelism steps in lockstep over all ranks, "
            "which can't be switched one by one"
        )
