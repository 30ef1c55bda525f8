"""What differs between the vLLM versions about a worker: what its process holds for the model that it runs."""

import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

WORKER_GLOBALS: dict[tuple[str, str], str | None] = {
    ("vllm.v1.worker.workspace", "_manager"): None,
    ("vllm.distributed.kv_transfer.kv_transfer_state", "_KV_CONNECTOR_AGENT"): None,
    ("vllm.distributed.ec_transfer.ec_transfer_state", "_EC_CONNECTOR_AGENT"): None,
    ("vllm.model_executor.offloader.base", "_instance"): "NoopOffloader",
    ("vllm.model_executor.layers.mamba.ops.ssu_dispatch", "_mamba_ssu_backend"): None,
    ("vllm.ir.op", "_ENABLE_TORCH_WRAP"): None,
}
"""Module variables of a worker process that belong to one model. A new model finds None, or what the named class of
the module makes, and makes its own."""


@dataclass(slots=True)
class ModelGlobals:
    """What a worker's process holds in modules for the model that it runs; another model has its own."""

    variables: dict[tuple[str, str], Any]
    kernels: dict[Any, Any]
    """Which implementations of each operation the model prefers."""
    layout: Any
    """In which order its KV cache's dimensions are (0.26; with the cache itself since)."""


def model_globals(more: Iterable[tuple[str, str]] = ()) -> ModelGlobals:
    """Those of the model that runs; ``more`` are the platform's variables."""
    from vllm.ir.op import IrOp

    return ModelGlobals(
        {name: getattr(sys.modules.get(name[0]), name[1], None) for name in (*WORKER_GLOBALS, *more)},
        {operation: operation._priority_impls for operation in IrOp.registry.values()},
        _kv_cache_layout(),
    )


def set_model_globals(saved: ModelGlobals) -> None:
    """Make them those of a model that is about to run again."""
    for (module, name), value in saved.variables.items():
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, value)
    for operation, implementations in saved.kernels.items():
        operation._priority_impls = implementations
    _set_kv_cache_layout(saved.layout)


def unset_model_globals(more: Iterable[tuple[str, str]] = ()) -> None:
    """Let a model that is about to be built make its own."""
    fresh = {
        (module, name): getattr(sys.modules[module], factory)() if factory and module in sys.modules else None
        for (module, name), factory in WORKER_GLOBALS.items()
    }
    set_model_globals(ModelGlobals({**fresh, **dict.fromkeys(more)}, {}, None))
    selection = getattr(import_module("vllm.v1.attention.selector"), "_cached_get_attn_backend", None)
    if selection is not None:  # choosing a backend settles the layout, the first time only
        selection.cache_clear()


def _kv_cache_layout() -> Any:
    utils: Any = sys.modules.get("vllm.v1.attention.backends.utils")
    if not hasattr(utils, "get_kv_cache_layout"):
        return None
    return utils.get_kv_cache_layout() if utils.get_kv_cache_layout.cache_info().currsize else None


def _set_kv_cache_layout(layout: Any) -> None:
    utils: Any = sys.modules.get("vllm.v1.attention.backends.utils")
    if hasattr(utils, "get_kv_cache_layout"):
        utils._KV_CACHE_LAYOUT_OVERRIDE = layout
        utils.get_kv_cache_layout.cache_clear()


def mm_receiver_cache(config: Any) -> Any:
    """The worker's side of a model's multimodal cache; None where the model has none."""

    try:
        from vllm.multimodal.cache import worker_receiver_cache_from_config
    except ImportError:  # 0.26
        from vllm.multimodal import MULTIMODAL_REGISTRY

        return MULTIMODAL_REGISTRY.worker_receiver_cache_from_config(config, threading.Lock())
    return worker_receiver_cache_from_config(config, threading.Lock())


def keep_lora(worker: Any, lora_id: int) -> None:
    """In a worker: never drop an adapter that it has loaded from the host's memory.

    vLLM's own pin takes a place on the device, too, of which its scheduler knows nothing: the next step whose adapters
    need that place ends the engine. So the places are left to whoever runs, and are filled from memory.
    """
    worker.model_runner.lora_manager._adapter_manager._pin_lora_in_cpu_cache(lora_id)


def unhook(worker: Any) -> None:
    """Let go of what torch's compiler holds of a worker's models: hooks that vLLM takes back nowhere."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    runner = worker.model_runner
    owners = (runner, getattr(runner, "drafter", None))
    for model in filter(None, (getattr(owner, "model", None) for owner in owners)):
        for module in model.modules() if hasattr(model, "modules") else ():
            if isinstance(module, TorchCompileWithNoGuardsWrapper):
                module.cleanup()


def kv_cache_config(worker: Any) -> Any:
    """The layout of a worker's KV cache, as it was initialized."""
    return getattr(worker, "kv_cache_config", None) or worker.model_runner.kv_cache_config


def fresh(config: Any) -> Any:
    """The configuration of a loaded model with which it can be built again: without the layers it registered."""
    config.compilation_config.static_forward_context = {}
    for name in ("static_all_moe_layers", "static_all_attention_layers"):
        if hasattr(config.compilation_config, name):
            setattr(config.compilation_config, name, [])
    return config
