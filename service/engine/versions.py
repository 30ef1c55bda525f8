"""Everything that differs between the vLLM versions this engine runs on, 0.26 and 0.32. No other module asks."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any

SETTLED_CACHE = (
    "num_gpu_blocks",
    "block_size",
    "mamba_block_size",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
    "effective_attention_block_size",
)
"""Fields of the cache config that only loading a model settles; a version without one of them skips it."""

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

PLACE = (
    "rank",
    "data_parallel_size",
    "data_parallel_size_local",
    "data_parallel_rank",
    "data_parallel_rank_local",
    "data_parallel_index",
    "nnodes",
    "node_rank",
    "assigned_physical_gpu_ids",
    "_api_process_count",
    "_api_process_rank",
)
"""Fields of the parallel config in which a process keeps which one it is; a version without one of them skips it."""

WEIGHT_CHANGES = frozenset({"update_weights", "reload_weights", "reset_weights", "load_model"})
"""Methods of a worker that change a model's weights."""

EXECUTOR_CONFIGS = (
    "model_config",
    "cache_config",
    "lora_config",
    "load_config",
    "parallel_config",
    "scheduler_config",
    "device_config",
    "speculative_config",
    "observability_config",
)


@dataclass(slots=True)
class Launch:
    """A launched engine core: its process manager, and the addresses its clients take, one pair per client."""

    manager: Any
    coordinator: Any
    addresses: list[dict[str, Any]]
    keep: Any
    """vLLM's own launch object; the core dies when it is collected."""

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self.manager.processes)

    def close_listeners(self) -> None:
        """Close the sockets that no client has taken over."""
        for address in self.addresses:
            for name in ("input_listener", "output_listener"):
                if (listener := address.get(name)) is not None:
                    listener.close()


@contextmanager
def launching(config: Any, executor_class: Any, *, log_stats: bool, folder: str, clients: int) -> Iterator[Launch]:
    """Start the engine core for ``clients`` clients; leaving the block waits until it serves.

    ``folder`` takes the sockets. Raises RuntimeError where the core does not come up.
    """
    from vllm.v1.engine.utils import EngineZmqAddresses, launch_core_engines

    pairs = [(f"ipc://{folder}/i{index}", f"ipc://{folder}/o{index}") for index in range(clients)]
    addresses = EngineZmqAddresses(inputs=[pair[0] for pair in pairs], outputs=[pair[1] for pair in pairs])
    listening = [{"input_address": a, "output_address": b, **_listeners(a, b)} for a, b in pairs]
    with launch_core_engines(config, executor_class, log_stats, addresses) as started:
        if isinstance(started, tuple):  # 0.26
            manager, coordinator, addresses, tensor_queue = started
        else:
            manager, coordinator, tensor_queue = started.engine_manager, started.coordinator, started.tensor_queue
        for address in listening:
            address["tensor_queue"] = tensor_queue
            if addresses.frontend_stats_publish_address:
                address["stats_update_address"] = addresses.frontend_stats_publish_address
        launch = Launch(manager, coordinator, listening, started)
        yield launch


def _listeners(input_address: str, output_address: str) -> dict[str, Any]:
    """0.32 adopts sockets that already listen, so that the core's connection never waits for a client."""
    try:
        from vllm.utils.network_utils import make_zmq_listener
    except ImportError:  # 0.26
        return {}
    import zmq

    router, pull = getattr(zmq, "ROUTER"), getattr(zmq, "PULL")  # noqa: B009 - made at import, unknown to mypy
    return {
        "input_listener": make_zmq_listener(input_address, router).socket,
        "output_listener": make_zmq_listener(output_address, pull).socket,
    }


def view_of(executor: Any, config: Any, contexts: Any, key: int) -> Any:
    """The live ``executor`` as one context sees it: the same workers, this model's configs and cached answers.

    What it has no attribute of its own for is the live executor's: queues and workers are held once, and end with it.
    ``contexts`` relays what is called on a model that is not the active one, and decides about sleep.
    """
    kind: Any = type(executor)
    view: Any = object.__new__(_view_class(kind))
    view.gearshift_live = executor
    view.gearshift_contexts = contexts
    view.gearshift_key = key
    view.vllm_config = config
    for name in EXECUTOR_CONFIGS:
        setattr(view, name, getattr(config, name, None))
    view.kv_output_aggregator = None
    if hasattr(executor, "ec_output_aggregator"):
        view.ec_output_aggregator = None
    view.sleeping_tags = set()
    if "is_sleeping" in vars(executor):  # 0.26; a property since
        view.is_sleeping = False
    return view


@functools.cache
def _view_class(executor_class: Any) -> type:
    class ContextView(executor_class):
        """An executor as one context sees it."""

        gearshift_live: Any
        gearshift_contexts: Any
        gearshift_key: int

        def __getattr__(self, name: str) -> Any:
            return getattr(self.gearshift_live, name)

        @property
        def is_failed(self) -> bool:
            return bool(self.gearshift_live.is_failed)

        @is_failed.setter
        def is_failed(self, failed: bool) -> None:
            self.gearshift_live.is_failed = failed

        def collective_rpc(
            self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, **how: Any
        ) -> Any:
            contexts = self.gearshift_contexts
            if method in {"sleep", "wake_up"}:
                return contexts.nap(self.gearshift_key, method, **(kwargs or {}))
            if method in WEIGHT_CHANGES:
                contexts.weights_change(self.gearshift_key)
            if contexts.active.key == self.gearshift_key:
                contexts.tell_workers()
                return super().collective_rpc(method, timeout, args, kwargs, **how)
            return contexts.relay(self.gearshift_key, method, timeout, args, kwargs or {}, **how)

        def shutdown(self) -> None:
            self.gearshift_live.shutdown()

    ContextView.__name__ = f"ContextView{executor_class.__name__}"
    return ContextView


def steps_by_rpc(executor: Any) -> bool:
    """Whether steps are calls of workers in other processes, taken in order with whatever else they are asked."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return isinstance(executor, MultiprocExecutor)


@contextmanager
def keeping_none_hash() -> Iterator[None]:
    """The seed of block hashes, which each core's start makes anew, stays what it is: one for all contexts."""
    from vllm.v1.core import kv_cache_utils

    before = getattr(kv_cache_utils, "NONE_HASH", None)
    try:
        yield
    finally:
        if before is not None:
            kv_cache_utils.NONE_HASH = before


def settled(config: Any) -> dict[str, Any]:
    """What loading a model settled of its configuration, for its frontend to adopt."""
    cache = {name: getattr(config.cache_config, name) for name in SETTLED_CACHE if hasattr(config.cache_config, name)}
    return {"max_model_len": config.model_config.max_model_len, "cache": cache}


def adopt(config: Any, values: dict[str, Any]) -> None:
    """Make a frontend's configuration say what its context settled."""
    config.model_config.max_model_len = values["max_model_len"]
    for name, value in values["cache"].items():
        setattr(config.cache_config, name, value)


def take_place(config: Any, live: Any) -> None:
    """Give a further model's configuration the place of the process that it is loaded in, as ``live`` has it."""
    for name in PLACE:
        if hasattr(live.parallel_config, name):
            setattr(config.parallel_config, name, getattr(live.parallel_config, name))
    rank = live.parallel_config.data_parallel_rank_local
    if rank is not None and config.kv_transfer_config is not None:
        config.kv_transfer_config.engine_id += f"_dp{rank}"


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
    import threading

    try:
        from vllm.multimodal.cache import worker_receiver_cache_from_config
    except ImportError:  # 0.26
        from vllm.multimodal import MULTIMODAL_REGISTRY

        return MULTIMODAL_REGISTRY.worker_receiver_cache_from_config(config, threading.Lock())
    return worker_receiver_cache_from_config(config, threading.Lock())


# --- the OpenAI server and the frontend's state ---------------------------------------------------------------------


def _first(*places: tuple[str, str]) -> Any:
    for module, name in places:
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError:
            continue
    raise ImportError(f"this vLLM has none of {places}")


CLI_ARGS_FILES = ("entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")
"""The file that declares the server's arguments, in 0.32 and in 0.26, below vLLM's package."""


def make_arg_parser() -> Callable[..., Any]:
    return _first(
        ("vllm.entrypoints.launchers.cli_args", "make_arg_parser"),
        ("vllm.entrypoints.openai.cli_args", "make_arg_parser"),
    )


def frontend_args() -> type:
    return _first(
        ("vllm.entrypoints.launchers.cli_args", "FrontendArgs"), ("vllm.entrypoints.openai.cli_args", "FrontendArgs")
    )


def validate_server_arguments(namespace: Any) -> None:
    """vLLM's own checks of a server's arguments against each other. Raises TypeError, ValueError or KeyError."""
    _first(
        ("vllm.entrypoints.launchers.cli_args", "validate_parsed_serve_args"),
        ("vllm.entrypoints.openai.cli_args", "validate_parsed_serve_args"),
    )(namespace)
    _first(
        ("vllm.entrypoints.launchers.launcher", "validate_api_server_args"),
        ("vllm.entrypoints.openai.api_server", "validate_api_server_args"),
    )(namespace)


def build_app() -> Callable[..., Any]:
    return _first(("vllm.entrypoints.launchers.app", "build_app"), ("vllm.entrypoints.openai.api_server", "build_app"))


def init_app_state() -> Callable[..., Any]:
    return _first(
        ("vllm.entrypoints.launchers.api_server.app_state", "init_app_state"),
        ("vllm.entrypoints.openai.api_server", "init_app_state"),
    )


def generated(llm: Any, request_id: str) -> int:
    """Tokens that the unfinished engine requests under an external id have generated."""
    processor = llm.output_processor
    states = (processor.request_states.get(each) for each in processor.external_req_ids.get(request_id, ()))
    return sum(state.detokenizer.num_output_tokens() for state in states if state is not None and state.detokenizer)


def first_token_latency(output: Any) -> float | None:
    """Seconds until a request's first token, where vLLM keeps statistics."""
    return getattr(output.metrics, "first_token_latency", None) or None


def aborted_output(request_id: str, prompt: Any, sampling_params: Any) -> Any:
    """The final output of a request that was aborted before the engine had it."""
    from vllm.outputs import CompletionOutput, RequestOutput

    inner = prompt.get("decoder_prompt", prompt)
    completions = [
        CompletionOutput(
            index=index,
            text="",
            token_ids=[],
            cumulative_logprob=0.0,
            logprobs=None if sampling_params.logprobs is None else [],
            finish_reason="abort",
        )
        for index in range(sampling_params.n)
    ]
    return RequestOutput(
        request_id=request_id,
        prompt=inner.get("prompt"),
        prompt_token_ids=list(inner.get("prompt_token_ids") or ()),
        prompt_logprobs=None,
        outputs=completions,
        finished=True,
        num_cached_tokens=0,
    )


def streaming_input(prompt: Any, sampling_params: Any) -> Any:
    """A part of a prompt, as AsyncLLM takes one that comes in several."""
    from vllm.engine.protocol import StreamingInput

    return StreamingInput(prompt, sampling_params)


def check_streaming_input(llm: Any, sampling_params: Any) -> None:
    """vLLM's own check of what a prompt in parts may ask for. Raises its ValueError."""
    llm._validate_streaming_input_sampling_params(in_pieces(sampling_params))


def in_pieces(sampling_params: Any) -> Any:
    """The same parameters, with outputs that have what is new and nothing else."""
    from vllm.sampling_params import RequestOutputKind

    sampling_params = sampling_params.clone()
    sampling_params.output_kind = RequestOutputKind.DELTA
    return sampling_params


PRIVATE_FIELDS = frozenset({"request_id", "kv_transfer_params", "ec_transfer_params"})
"""Fields of vLLM's request models that must not come from outside."""

LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})
"""Events of a streamed response that carry the whole of it."""


def is_event_stream(response: Any) -> bool:
    return getattr(response, "media_type", None) == "text/event-stream" and hasattr(response, "body_iterator")


def is_engine_dead(error: BaseException) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def lora_request(name: str) -> type:
    """The request models of the LoRA registry."""
    return _first(("vllm.entrypoints.serve.lora.protocol", name))


def keep_lora(worker: Any, lora_id: int) -> None:
    """In a worker: never drop an adapter that it has loaded from the host's memory.

    vLLM's own pin takes a place on the device, too, of which its scheduler knows nothing: the next step whose adapters
    need that place ends the engine. So the places are left to whoever runs, and are filled from memory.
    """
    worker.model_runner.lora_manager._adapter_manager._pin_lora_in_cpu_cache(lora_id)


def lora_room(config: Any) -> tuple[int, int]:
    """How many adapters a step may have, and how many the workers' memory has room for; none where none are taken."""
    lora = config.lora_config
    return (0, 0) if lora is None else (lora.max_loras, lora.max_cpu_loras)


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


def prometheus_logger() -> tuple[Any, type]:
    """A Prometheus registry, and vLLM's stat logger that writes to it rather than to the process's common one."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    registry = CollectorRegistry()
    kinds = {"_gauge_cls": Gauge, "_counter_cls": Counter, "_histogram_cls": Histogram}
    bound = {name: functools.partial(kind, registry=registry) for name, kind in kinds.items()}
    return registry, type("ModelPrometheusLogger", (PrometheusStatLogger,), bound)


@contextmanager
def clients_made_by(make: Callable[..., Any], module: str) -> Iterator[None]:
    """Inside, the engine class of ``module`` gets its client from ``make``; it would start an engine core itself."""
    engine_module: Any = import_module(module)
    theirs = engine_module.EngineCoreClient

    class Client:
        """Stands for the class by which vLLM's engine classes make their clients."""

        make_async_mp_client = staticmethod(make)

        @staticmethod
        def make_client(*, multiprocess_mode: bool, asyncio_mode: bool, **given: Any) -> Any:  # noqa: ARG004
            return make(**given)

    engine_module.EngineCoreClient = Client
    try:
        yield
    finally:
        engine_module.EngineCoreClient = theirs


def llm_engine(config: Any, make_client: Callable[..., Any], **options: Any) -> Any:
    """vLLM's LLMEngine with a client that ``make_client`` makes."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    with clients_made_by(make_client, "vllm.v1.engine.llm_engine"):
        return LLMEngine(
            vllm_config=config, executor_class=Executor.get_class(config), multiprocess_mode=True, **options
        )


def async_client(config: Any, *, address: dict[str, Any], key: int) -> Any:
    """Client ``key`` of a running core, as AsyncLLM makes its own, for a model that is yet to come."""
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    return EngineCoreClient.make_async_mp_client(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
        client_addresses=address,
        client_index=key,
    )


def async_llm(config: Any, *, client: Any, address: dict[str, Any], key: int, **options: Any) -> Any:
    """vLLM's AsyncLLM as client ``key`` of a running core, with a new client, or one that another model left behind."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    given = {"vllm_config": config, "executor_class": Executor.get_class(config), **options}
    if client is None:
        return AsyncLLM(**given, client_addresses=address, client_index=key)

    def again(vllm_config: Any, renderer: Any = None, **_: Any) -> Any:
        client.vllm_config = vllm_config
        client._renderer = renderer
        if renderer is not None:  # 0.32
            client._start_mm_warmup()
        return client

    with clients_made_by(again, "vllm.v1.engine.async_llm"):
        return AsyncLLM(**given)


def metrics_snapshot(registry: Any) -> list[Any]:
    """vLLM's snapshot of its metrics, of another registry than the process's common one."""
    from vllm.v1.metrics import reader

    ours = {**vars(reader), "REGISTRY": registry}
    snapshot: list[Any] = FunctionType(reader.get_metrics_snapshot.__code__, ours)()
    return snapshot
