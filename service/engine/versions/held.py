"""What a worker's process holds, outside of the worker's own objects, for the model that runs.

vLLM keeps it in modules because it runs one model in a process. Here each model has its own: what is listed is taken
when a model leaves and put back when it is seated again, and one that is about to be built finds it fresh. Buffers
belong to models as well, although they never run at the same time: graphs hold their addresses, and vLLM replaces one
by a larger one. Each entry names what goes wrong without it; tests find what is not listed.
"""

import functools
import gc
import linecache
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any, ClassVar, Protocol

_ABSENT = object()
"""The module has not been imported."""


class Held(Protocol):
    """One thing that the process holds for the model that runs."""

    @property
    def module(self) -> str:
        """The module that holds it."""
        ...

    @property
    def name(self) -> str:
        """What it is called there, or in plain words."""
        ...

    def take(self) -> Any:
        """What it is now."""
        ...

    def put(self, value: Any) -> None:
        """Make it what it was when it was taken."""
        ...

    def fresh(self) -> Any:
        """What a model finds that is about to be built."""
        ...


def _none(_module: Any) -> Any:
    return None


def _empty(_module: Any) -> Any:
    return {}


def _false(_module: Any) -> Any:
    return False


@dataclass(frozen=True)
class Variable:
    """A variable of a module, which its users look up there each time; ``make`` makes a fresh value."""

    module: str
    name: str
    make: Callable[[Any], Any] = _none

    def take(self) -> Any:
        return getattr(sys.modules.get(self.module), self.name, _ABSENT)

    def put(self, value: Any) -> None:
        owner = sys.modules.get(self.module)
        if hasattr(owner, self.name):
            setattr(owner, self.name, self.make(owner) if value is _ABSENT else value)

    def fresh(self) -> Any:
        owner = sys.modules.get(self.module)
        return self.make(owner) if owner is not None else _ABSENT


@dataclass(frozen=True)
class Contents:
    """What a dictionary holds that other modules have imported by name: it stays the object that it is."""

    module: str
    name: str
    attribute: str | None = None
    """The dictionary is this attribute of the variable."""

    def _dictionary(self) -> dict[Any, Any] | None:
        found = getattr(sys.modules.get(self.module), self.name, None)
        return found if self.attribute is None or found is None else getattr(found, self.attribute)

    def take(self) -> Any:
        dictionary = self._dictionary()
        return None if dictionary is None else dict(dictionary)

    def put(self, value: Any) -> None:
        dictionary = self._dictionary()
        if dictionary is not None:
            dictionary.clear()
            dictionary.update(value or {})

    def fresh(self) -> Any:
        return {}


@dataclass(frozen=True)
class Remembered:
    """What a function remembers of its answers although they hang on who asks: forgotten at each change."""

    module: str
    name: str

    def take(self) -> Any:
        return None

    def put(self, value: Any) -> None:  # noqa: ARG002 - there is nothing to bring back
        function = getattr(sys.modules.get(self.module), self.name, None)
        if function is not None:
            function.cache_clear()

    def fresh(self) -> Any:
        return None


@dataclass(frozen=True)
class Kernels:
    """Which implementations of each operation a model prefers."""

    module: str = "vllm.ir.op"
    name: str = "IrOp.registry"

    def take(self) -> Any:
        from vllm.ir.op import IrOp

        return {operation: operation._priority_impls for operation in IrOp.registry.values()}

    def put(self, value: Any) -> None:
        for operation, implementations in value.items():
            operation._priority_impls = implementations

    def fresh(self) -> Any:
        from vllm.ir.op import IrOp

        return {operation: [] for operation in IrOp.registry.values()}


@dataclass(frozen=True)
class CacheLayout:
    """In which order a KV cache's dimensions are (0.26; part of a model's configuration since).

    What an attention backend requires is set before anybody asks for it.
    """

    module: str = "vllm.v1.attention.backends.utils"
    name: str = "get_kv_cache_layout"

    def _utils(self) -> Any:
        utils = sys.modules.get(self.module)
        return utils if hasattr(utils, self.name) else None

    def take(self) -> Any:
        utils = self._utils()
        if utils is None:
            return None
        asked = utils.get_kv_cache_layout.cache_info().currsize
        return utils.get_kv_cache_layout() if asked else utils._KV_CACHE_LAYOUT_OVERRIDE

    def put(self, value: Any) -> None:
        utils = self._utils()
        if utils is not None:
            utils._KV_CACHE_LAYOUT_OVERRIDE = value
            utils.get_kv_cache_layout.cache_clear()

    def fresh(self) -> Any:
        return None


@dataclass(frozen=True)
class CompiledCode:
    """What compiling a model leaves in torch and in the modules of its classes, where it would keep the model for ever.

    Each compiled model has a hook that torch calls whenever it compiles anything, and its code finds its functions by
    names in the module of its class. Both are there as long as the model runs; they are taken away with it.
    """

    module: str = "torch._dynamo.convert_frame"
    name: str = "_bytecode_hooks"
    prefixes: ClassVar[tuple[str, ...]] = ("__compiled_fn_", "__builtins_dict_")

    def _hooks(self) -> dict[int, Any]:
        found: dict[int, Any] = getattr(sys.modules.get(self.module), self.name, {})
        return found

    def take(self) -> Any:
        hooks = dict(self._hooks())
        modules = [type(hook.__self__).forward.__globals__ for hook in hooks.values() if hasattr(hook, "__self__")]
        functions = [
            (module, {name: module.pop(name) for name in tuple(module) if name.startswith(self.prefixes)})
            for module in {id(module): module for module in modules}.values()
        ]
        return hooks, functions

    def put(self, value: Any) -> None:
        hooks, functions = value
        present = self._hooks()
        present.clear()
        present.update(hooks)
        for module, names in functions:
            module.update(names)

    def fresh(self) -> Any:
        return {}, []


@dataclass(frozen=True)
class RandomState:
    """Where the generators are from which a request without a seed is sampled. A new model seeds them itself.

    numpy's is exchanged as a whole: its state takes a tenth of a millisecond to read.
    """

    module: str = "torch"
    name: str = "random state"

    def take(self) -> Any:
        import random

        import numpy as np
        import torch

        return torch.get_rng_state(), random.getstate(), np.random.mtrand.get_bit_generator()

    def put(self, value: Any) -> None:
        import random

        import numpy as np
        import torch

        ours, pythons, numpys = value
        torch.set_rng_state(ours)
        random.setstate(pythons)
        np.random.mtrand.set_bit_generator(numpys)

    def fresh(self) -> Any:
        import numpy as np

        ours, pythons, _ = self.take()
        return ours, pythons, np.random.MT19937()


@dataclass(frozen=True, eq=False)
class DeviceRandomState:
    """The same of the device."""

    platform: Any
    module: str = "torch"
    name: str = "random state of the device"

    def take(self) -> Any:
        return self.platform.random_state()

    def put(self, value: Any) -> None:
        if value is not None:
            self.platform.set_random_state(value)

    def fresh(self) -> Any:
        return self.take()


def _as_now(name: str) -> Callable[[Any], Any]:
    return lambda module: getattr(module, name)


@dataclass(frozen=True)
class DefaultDtype:
    """What tensors are made of where nobody says it."""

    module: str = "torch"
    name: str = "default dtype"

    def take(self) -> Any:
        import torch

        return torch.get_default_dtype()

    def put(self, value: Any) -> None:
        import torch

        torch.set_default_dtype(value)

    def fresh(self) -> Any:
        return self.take()


_FLASHINFER_REDUCE = "vllm.distributed.device_communicators.flashinfer_all_reduce"
_SSU = "vllm.model_executor.layers.mamba.ops.ssu_dispatch"
_ENCODER = "vllm.model_executor.layers.attention.mm_encoder_attention"
_ACTIVATION = "vllm.model_executor.layers.activation"

OF_LAYERS: tuple[Held, ...] = (
    CompiledCode(),
    # Modules that layers share: built under one model's configuration, and moved with one model's weights.
    Variable("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT", _empty),
    Variable("vllm.model_executor.layers.quantization.utils.marlin_utils", "_quant_fp8_method"),
    Contents(_ACTIVATION, "_ACTIVATION_REGISTRY", "_dict"),
    Contents(_ACTIVATION, "_ACTIVATION_AND_MUL_REGISTRY", "_dict"),
    # Keyed by names of layers, which models share, or by addresses and identities, which are used again after a drop.
    Variable("vllm.model_executor.models.utils", "_model_to_pp_missing_layer_names", _empty),
    Variable("vllm.model_executor.layers.fused_moe.cpu_fused_moe", "_CPU_MOE_LAYER_CACHE", _empty),
    Variable("vllm.model_executor.layers.hpc.rope_norm", "_hpc_rope_norm_instances", _empty),
    Variable(_ENCODER, "_fp8_saved_scale_refs", _empty),
    Contents("vllm.lora.ops.triton_ops.utils", "_LORA_A_PTR_DICT"),
    Contents("vllm.lora.ops.triton_ops.utils", "_LORA_B_PTR_DICT"),
    Contents("vllm.lora.ops.triton_ops.fused_moe_lora_op", "_LORA_PTR_DICT"),
    Contents("vllm.lora.ops.triton_ops.fused_moe_lora_fp8_op", "_LORA_PTR_DICT"),
    Contents("vllm.lora.ops.triton_ops.lora_expand_fp8_op", "_EXPAND_LORA_SCALE_PTR_DICT"),
    Contents("vllm.lora.ops.triton_ops.lora_shrink_fp8_op", "_SHRINK_LORA_SCALE_PTR_DICT"),
    Contents("vllm.config.utils", "_config_hash_cache"),
)
"""What holds a model's layers, or is found by them: it is of no use to layers that are built anew."""

OF_LOADS: tuple[Held, ...] = (
    DefaultDtype(),
    *(
        Variable(module, name, _as_now(name))
        for module, name in (
            ("torch.utils._device", "CURRENT_DEVICE"),
            ("vllm.config.vllm", "_current_vllm_config"),
            ("vllm.config.vllm", "_current_prefix"),
            ("vllm.forward_context", "_forward_context"),
            # A CPU's runner is made with others in their place.
            ("torch", "Event"),
            ("torch.cuda", "Stream"),
        )
    ),
    Remembered("vllm.config.vllm", "get_cached_compilation_config"),
)
"""What is one model's only while it is loaded, and changes hands where that is done in slices."""

HELD: tuple[Held, ...] = (
    *OF_LAYERS,
    *OF_LOADS,
    RandomState(),
    Kernels(),
    CacheLayout(),
    Variable("vllm.ir.op", "_ENABLE_TORCH_WRAP"),
    # Which backend serves a model's state space layers; loading another one would choose for all.
    Variable(_SSU, "_mamba_ssu_backend"),
    Variable(_SSU, "_flashinfer_replayssm_kernel"),
    # Scratch memory, sized for one model; graphs hold its address.
    Variable("vllm.v1.worker.workspace", "_manager"),
    Variable("vllm.v1.attention.backends.flashinfer", "trtllm_workspace_buffer"),
    Variable("vllm.v1.attention.backends.mla.flashinfer_mla", "_fi_workspace"),
    Variable("vllm.v1.attention.backends.mla.flashinfer_mla", "_fi_multi_ctas_kv_counter"),
    Variable("vllm.v1.attention.backends.mla.flashinfer_mla_sparse", "_fi_sparse_workspace"),
    Variable("vllm.v1.attention.backends.mla.tokenspeed_mla", "_g_workspace", _empty),
    Variable("vllm.models.deepseek_v4.nvidia.flashinfer_sparse", "_flashinfer_dsv4_workspace_by_device", _empty),
    Variable("vllm.models.deepseek_v41.nvidia.flashinfer_sparse", "_flashinfer_dsv4_workspace_by_device", _empty),
    Variable("vllm.model_executor.layers.minimax_rms_norm.lamport_workspace", "_workspace_cache", _empty),
    Variable(_ENCODER, "_flashinfer_workspace_buffer"),
    Variable(_FLASHINFER_REDUCE, "_fi_ar_workspace"),
    Variable(_FLASHINFER_REDUCE, "_fi_ar_quant_workspace"),
    Variable(_FLASHINFER_REDUCE, "_fi_ar_workspace_groups", _empty),
    Variable(_FLASHINFER_REDUCE, "_fi_ar_workspace_failed", _false),
    Variable(_FLASHINFER_REDUCE, "_fi_ar_quant_workspace_failed", _false),
    # Fused collectives, which are made for one model's sizes and refuse another's.
    Variable("vllm.model_executor.kernels.linear.cute_dsl.gemm_rs_ar", "_gemm_rs_ar"),
    Variable("vllm.models.deepseek_v41.amd.mono_decode", "_runner"),
    Variable("vllm.models.deepseek_v41.nvidia.ops.mhc", "_all_reduce_mhc"),
    Variable("vllm.models.inkling.nvidia.ops.lamport", "_STATE"),
    Variable("vllm.models.inkling.nvidia.ops.lamport", "_STATE_FAILED", _false),
    # Where a model's cache and encoder outputs are sent, and how its weights are moved.
    Variable("vllm.distributed.kv_transfer.kv_transfer_state", "_KV_CONNECTOR_AGENT"),
    Variable("vllm.distributed.ec_transfer.ec_transfer_state", "_EC_CONNECTOR_AGENT"),
    Variable("vllm.model_executor.offloader.base", "_instance", lambda module: module.NoopOffloader()),
    Variable(_ENCODER, "_fp8_scale_save_path"),
    Variable(
        _ENCODER, "_fp8_scale_save_margin", lambda module: module.MultiModalConfig.mm_encoder_fp8_scale_save_margin
    ),
    # Answers that hang on a model's configuration or its environment.
    Remembered("vllm.v1.attention.selector", "_cached_get_attn_backend"),
    Remembered("vllm.v1.attention.selector", "_cached_get_mamba_attn_backend"),
    Remembered("vllm.model_executor.layers.mamba.mamba_utils", "get_conv_state_layout"),
    Remembered("vllm.utils.deep_gemm", "is_deep_gemm_e8m0_used"),
    Remembered("vllm.utils.deep_gemm", "is_deep_gemm_supported"),
    Remembered("vllm.v1.attention.backends.mla.prefill.selector", "_auto_select_mla_prefill_backend"),
)

ENVIRONMENT = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Environment variables that vLLM sets for the model that it compiles, and whose values its later compiling reads."""

Holdings = dict[Held, Any]
"""What was taken of each entry."""


def take(more: Iterable[Held] = ()) -> Holdings:
    """What the process holds for the model that runs; ``more`` are entries of the platform.

    Where one can't be taken all are left as they are: taking some of them takes them away.
    """
    taken: Holdings = {}
    try:
        for entry in (*HELD, *more):
            taken[entry] = entry.take()
    except BaseException:
        put(taken)
        raise
    return taken


def put(holdings: Holdings) -> None:
    """Give a model that is about to run again what it had; what was not there when it left is fresh."""
    for entry, value in holdings.items():
        entry.put(value)


OF_TRACINGS = (
    ("torch._dynamo.precompile_context", "PrecompileContext.clear"),
    ("torch._dynamo.utils", "clear_compilation_metrics"),
    ("torch._inductor.codecache", "PyCodeCache.cache_clear"),
    ("torch._inductor.codecache", "PyCodeCache.linemaps.clear"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode.cache_clear"),
    ("torch.compiler._cache", "CacheArtifactManager.clear"),
)
"""What makes torch forget what tracings have left, by module."""


def fresh(more: Iterable[Held] = ()) -> Holdings:
    """What a model finds that is about to be built."""
    return {entry: entry.fresh() for entry in (*HELD, *more)}


def put_fresh(more: Iterable[Held] = ()) -> None:
    """Let a model that is about to be built make its own."""
    put(fresh(more))


def forget_modules() -> None:
    """The model that runs was emptied and will be built anew: nothing holds its layers, or takes new ones for them."""
    for entry in OF_LAYERS:
        entry.take()
        entry.put(entry.fresh())


def forget_tracing() -> None:
    """What torch keeps of every tracing, for ever: shapes, guards, metrics, what it would save for another process, and
    the source of what it made; three megabytes for each load of a small compiled model. Nothing that runs needs them,
    and the next tracing makes its own.
    """
    for module, path in OF_TRACINGS:
        if (there := sys.modules.get(module)) is not None:
            attrgetter(path)(there)()
    if (shapes := sys.modules.get("torch.fx.experimental.symbolic_shapes")) is not None:
        _forget_shapes(shapes.ShapeEnv)
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        _detach(guards.CheckFunctionManager.invalidate)
        _take_away(sys.modules["torch._dynamo.utils"].CleanupManager.instance.values)
    if (graphs := sys.modules.get("torch.fx.graph_module")) is not None:
        sources = graphs._loader.eval_cache
        for name in sources:  # of its own only: in the caller's process there are a notebook's cells, too
            linecache.cache.pop(name, None)
        sources.clear()


def _detach(invalidate: Callable[..., None]) -> None:
    """End the finalizers by which guards of a function that is compiled ahead of time wait for objects to go: builtins,
    which never do. Nothing would be invalidated then, and until then each holds all that its tracing made.
    """
    registry: dict[weakref.finalize[Any, Any], Any] = getattr(weakref.finalize, "_registry", {})
    for finalizer in list(registry):
        waiting = finalizer.peek()
        call = waiting[1].func if waiting and isinstance(waiting[1], functools.partial) else None
        if getattr(call, "__func__", None) is not invalidate:
            continue
        manager = getattr(getattr(call, "__self__", None), "guard_manager", None)
        if getattr(manager, "cache_entry", None) is None:
            finalizer.detach()


def _forget_shapes(shapes: Any) -> None:
    """Forget what was derived from the shapes of tracings: of what an environment of them has cached, some holds that
    environment again by way of C++, which no collector sees.
    """
    for remembering in vars(shapes).values():
        if hasattr(remembering, "cache_clear"):
            remembering.cache_clear()
    for environment in [each for each in gc.get_objects() if type(each) is shapes]:
        environment.fake_tensor_cache.clear()


def _take_away(hooks: Mapping[int, Iterable[Any]]) -> None:
    """Compiled code that torch puts into a model's module and, ahead of time, leaves there; what runs has its own. What
    runs out of its module has a hook of ``hooks`` that will take it away.
    """
    run = {(id(hook.scope), hook.name) for each in hooks.values() for hook in each}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.startswith("vllm."):
            scope = vars(module)
            for name in [name for name in scope if name.startswith("__compiled_fn_")]:
                if (id(scope), name) not in run:
                    del scope[name]


def forget_environment() -> None:
    """Have vLLM read its environment variables anew: once it serves, it remembers what they were."""
    import vllm.envs

    forget: Callable[[], None] | None = getattr(vars(vllm.envs)["__getattr__"], "cache_clear", None)
    if forget is not None:
        forget()


def environment(names: Iterable[str]) -> dict[str, str | None]:
    """What variables of the process's environment are now."""
    return {name: os.environ.get(name) for name in names}
