"""What differs between the vLLM versions about an engine core: its launch, its executor, its configuration."""

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from service.platforms.base import KV_CACHE, WEIGHTS

_KEEPING = threading.local()

SETTLED_CACHE = (
    "num_gpu_blocks",
    "block_size",
    "mamba_block_size",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
    "effective_attention_block_size",
)
"""Fields of the cache config that only loading a model settles; a version without one of them skips it."""


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


WEIGHT_CHANGES = frozenset({"update_weights", "finish_weight_update", "reload_weights", "reset_weights", "load_model"})
"""Methods of a worker that change a model's weights."""


_ONE_BY_ONE = frozenset({"auto", "hf", "safetensors", "dummy"})
"""Formats whose tensors are read one by one, by each worker without the others."""


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


CORE_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.utils",
    "vllm.v1.engine.coordinator",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.worker_base",
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.layers.linear",
    "vllm.transformers_utils.config",
    "vllm.tokenizers",
)
"""What the core and any platform's worker import as they start."""
LOGGING = "VLLM_LOGGING_CONFIG_PATH"
"""The variable that names a file of ``logging.config`` for vLLM's logger."""
STARTERS = ("vllm.v1.engine.coordinator", "vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
"""The modules that start processes."""
_CONTEXT_OF = "get_mp_context"


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


def follow_logging() -> None:
    """Let vLLM's logger follow ``LOGGING`` in this process: 0.26 reads it as it is imported, which may have been before
    it said what it says now. Later versions read it as they make a configuration, and hand that to each process.
    """
    logger = sys.modules.get("vllm.logger")
    if logger is not None and not hasattr(logger, "configure_logging"):  # 0.26
        logger._configure_vllm_root_logger()


def start_processes_with(context: Any) -> None:
    """Let vLLM start the processes of this one, and of those that it starts, with a context of multiprocessing's."""
    for name in STARTERS:
        setattr(importlib.import_module(name), _CONTEXT_OF, lambda: context)


@contextmanager
def starting_with(context: Any) -> Iterator[None]:
    """The same for a while; with None nothing changes. To be entered by one thread at a time."""
    if context is None:
        yield
        return
    modules = [importlib.import_module(name) for name in STARTERS]
    before = [getattr(module, _CONTEXT_OF) for module in modules]
    start_processes_with(context)
    try:
        yield
    finally:
        for module, method in zip(modules, before, strict=True):
            setattr(module, _CONTEXT_OF, method)


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


def media_bytes(features: list[Any]) -> int:
    """What pictures and recordings of a request take, as vLLM's caches count them; what was sent before takes none."""
    try:
        from vllm.multimodal.cache.base import MultiModalCache
    except ImportError:  # 0.26
        from vllm.multimodal.cache import MultiModalCache
    return sum(MultiModalCache.get_item_size(each.data) for each in features if each.data is not None)


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
                contexts.ready()
                return super().collective_rpc(method, timeout, args, kwargs, **how)
            return contexts.relay(self.gearshift_key, method, timeout, args, kwargs or {}, **how)

        def sleep(self, level: int = 1) -> None:
            """One that sleeps may be put to sleep more deeply, which vLLM's executor leaves undone."""
            if level > 1 and self.is_sleeping:
                self.collective_rpc("sleep", kwargs={"level": level})
                self.sleeping_tags |= {WEIGHTS, KV_CACHE}
            else:
                super().sleep(level)

        def discard(self, tags: tuple[str, ...]) -> None:
            """vLLM's worker looks for memory of any model's, finds none, and the model would be taken for asleep."""
            raise NotImplementedError(
                f"{' and '.join(tags)} can't be let go of alone: sleep gives a model's KV cache back with its weights"
            )

        def shutdown(self) -> None:
            self.gearshift_live.shutdown()

    ContextView.__name__ = f"ContextView{executor_class.__name__}"
    return ContextView


def refused_executor(config: Any) -> str | None:
    """Why contexts can't be switched on the executor that a configuration asks for; None where they can.

    vLLM's RayExecutorV2 is its MultiprocExecutor with workers on several hosts, reached by the same queues. It was not
    run: vLLM's CPU platform has no ``ray_device_key``, without which vLLM places no worker.
    """
    backend = config.parallel_config.distributed_executor_backend
    if backend == "external_launcher":
        return "each process that is launched from outside would have a core of its own, which no other one switches"
    if backend != "ray":
        return None
    import vllm.envs
    from vllm.platforms import current_platform

    if not current_platform.ray_device_key:
        return "vLLM's platform for this device does not support Ray: it has no ray_device_key"
    if not vllm.envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        return (
            "vLLM's older Ray executor compiles the workers' steps into a graph that goes past whatever else they are "
            "told; set VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"
        )
    return None


def slices(executor: Any, config: Any) -> bool:
    """Whether a model can be loaded in slices, as far as vLLM is asked.

    In the core's own process nobody steps meanwhile. What several workers do together can't be cut, for each would wait
    for the others in a slice of its own: process groups of experts, and loaders that share what they read. Whether
    files that are read as "auto" can be cut is ``checkpoint.in_pieces``.
    """
    parallel = config.parallel_config
    together = parallel.world_size * parallel.data_parallel_size > 1
    apart = workers_apart(executor) and parallel.distributed_executor_backend != "ray"
    alone = config.load_config.load_format in _ONE_BY_ONE and not (together and config.model_config.is_moe)
    return apart and alone and config.kv_transfer_config is None


def workers_apart(executor: Any) -> bool:
    """Whether the workers are other processes, which a question wakes, and whose answers take time."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return isinstance(executor, MultiprocExecutor)


@contextmanager
def keeping_none_hash() -> Iterator[None]:
    """The seed of block hashes, which each core's start makes anew, stays what it is: one for all contexts.

    Requests are hashed while this thread builds a core, so it is not put back afterwards but never changed.
    """
    _KEEPING.none_hash = True
    try:
        yield
    finally:
        _KEEPING.none_hash = False


def init_none_hash(original: Callable[..., Any], hash_function: Any) -> None:
    """Replaces vLLM's own where a core is built."""
    from vllm.v1.core import kv_cache_utils

    if not (getattr(_KEEPING, "none_hash", False) and hasattr(kv_cache_utils, "NONE_HASH")):
        original(hash_function)


def update_request_as_session(original: Callable[..., Any], scheduler: Any, session: Any, part: Any) -> None:
    """Replaces the scheduler's. 0.26 forgets there that a session's next part has a limit of its own, and that the
    token which is discarded before it may have been hashed with its block.
    """
    del session.block_hashes[session.num_computed_tokens // scheduler.hash_block_size :]
    original(scheduler, session, part)
    session.max_tokens = part.max_tokens


def settled(core: Any) -> dict[str, Any]:
    """What loading a model settled of its configuration, and where it publishes what its KV cache does, by rank."""
    config = core.vllm_config
    cache = {name: getattr(config.cache_config, name) for name in SETTLED_CACHE if hasattr(config.cache_config, name)}
    publisher = getattr(core.scheduler, "get_kv_event_publisher_config", lambda: None)()  # 0.32
    events = {} if publisher is None else {config.parallel_config.data_parallel_index: asdict(publisher)}
    return {"max_model_len": config.model_config.max_model_len, "cache": cache, "kv_events": events}


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


def filled_blocks(scheduler: Any) -> tuple[list[int], list[int]]:
    """The ids of the KV cache's blocks that have content: those of unfinished requests, and those that only the prefix
    cache has, the least recently used first.
    """
    pool = scheduler.kv_cache_manager.block_pool
    in_use = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
    free = pool.free_block_queue.get_all_free_blocks()
    return in_use, [block.block_id for block in free if block.block_hash is not None]


def forget_blocks(scheduler: Any, blocks: Iterable[int]) -> None:
    """Let the prefix cache forget some blocks."""
    scheduler.kv_cache_manager.block_pool.evict_blocks(set(blocks))


def moves_blocks(scheduler: Any) -> bool:
    """Whether a KV connector reads and writes blocks at addresses that were registered with it, perhaps just now."""
    return scheduler.connector is not None
