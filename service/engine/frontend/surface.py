"""The whole surface of vLLM's AsyncLLM, per model: every operation takes ``model=``.

Without it an operation means the model that is active when it is called, or, where a docstring says so, all of them.
The operations themselves are AsyncLLM's own, on that model's AsyncLLM; on a model that is not active they reach its
frozen context, and its frozen requests are treated as AsyncLLM treats waiting ones.
"""

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Self

from service.engine.frontend.frontend import Frontend
from service.engine.models.catalog import by_alias, finished
from service.engine.models.models import Models
from service.engine.models.operations import Operation, RequestOperation, Shown


def _async_llm() -> type:
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM


def _theirs(meaning: str) -> Any:
    return Operation(meaning, source=_async_llm)


def _request(meaning: str) -> Any:
    return RequestOperation(meaning, source=_async_llm)


class Surface(Models[Frontend]):
    """What AsyncLLM can do, for many models; how they are switched is ``MultiModelEngine``'s."""

    _put_to_sleep: Callable[[Frontend, int, str], Awaitable[None]]
    _wake: Callable[[Frontend, list[str] | None], Awaitable[None]]

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        start_engine_loop: bool = True,  # noqa: ARG003 - AsyncLLM takes it, and does nothing with it either
        usage_context: Any = None,
        stat_loggers: list[Any] | None = None,
        **ours: Any,
    ) -> Self:
        """An engine for AsyncEngineArgs by alias, or for one of them, under the name that it is served by.

        What AsyncLLM's method does at once, ``initialize`` does. ``ours`` are the constructor's other options.
        """
        named = by_alias(engine_args)
        quiet = all(args.disable_log_stats for args in named.values())
        make: Any = cls
        made: Self = make(named, usage_context, stat_loggers=stat_loggers, **{"disable_log_stats": quiet, **ours})
        return made

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: Any,
        start_engine_loop: bool = True,  # noqa: ARG003 - AsyncLLM takes it, and does nothing with it either
        usage_context: Any = None,
        stat_loggers: list[Any] | None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool = False,
        client_addresses: dict[str, Any] | None = None,
        client_count: int = 1,
        client_index: int = 0,
        **ours: Any,
    ) -> Self:
        """The same for finished VllmConfigs. Raises ValueError for a client of an engine that runs elsewhere."""
        if client_addresses is not None or client_count != 1 or client_index:
            raise ValueError(
                "client_addresses, client_count, client_index: a MultiModelEngine starts an engine core of its own; "
                "it can't be a client of another one"
            )
        make: Any = cls
        made: Self = make(
            finished(vllm_config),
            usage_context,
            disable_log_stats,
            enable_log_requests,
            stat_loggers=stat_loggers,
            aggregate_engine_logging=aggregate_engine_logging,
            **ours,
        )
        return made

    def context(self, alias: str | None = None) -> Any:
        """The AsyncLLM of a model (default: the active one): vLLM's EngineClient, usable at any time.

        Its requests run while the model is active and are frozen otherwise. Those of a model that is not loaded
        wait until it is; so do ``get_supported_tasks`` and with it ``generate``, ``encode`` and the making of OpenAI
        handlers. Other calls that need the model's core (LoRA, caches) fail until then.

        Raises ValueError for an unknown name, RuntimeError before ``initialize``, and whatever was wrong with the
        model's arguments.
        """
        return self._frontend(alias).llm

    # --- requests -------------------------------------------------------------------------------------------------

    generate = _request("AsyncLLM.generate. Dropping or cancelling the generator aborts the request.")
    encode = _theirs("AsyncLLM.encode. Dropping or cancelling the generator aborts the request.")
    add_request = _request("Add a request; its outputs come through the collector that is returned.")

    async def abort(self, request_id: Any, internal: bool = False, *, model: str | None = None) -> None:
        """End one request or many (of ``model``, default: wherever they are), frozen ones too; unknown ids are ignored.

        An id that was given to several requests, or to a parent of ``n > 1``, ends all of them. A request that waits
        for its model's first load ends as every aborted one does: its last output, here its only one, has
        ``finish_reason`` "abort".
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for frontend in self._chosen(model):
            await frontend.llm.abort(ids, internal=internal)

    def tokens(self, request_id: str, model: str | None = None) -> int:
        """How many tokens a running request (by the id it was given) has generated so far, over all its samples."""
        return sum(frontend.tokens(request_id) for frontend in self._chosen(model))

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300, *, model: str | None = None) -> None:
        """Wait until a model has no unfinished requests. Raises TimeoutError."""
        frontend = self._frontend(model)
        try:
            async with asyncio.timeout(drain_timeout):
                while frontend.running:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise TimeoutError(
                f"Timeout reached after {drain_timeout} seconds waiting for requests to drain."
            ) from None

    # --- pausing, sleeping ----------------------------------------------------------------------------------------

    async def pause_generation(
        self,
        *,
        mode: Literal["abort", "wait", "keep"] = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
        model: str | None = None,
    ) -> None:
        """Schedule nothing more; ``mode`` says what becomes of what runs.

        ``wait`` waits for a frozen model's requests until it is active again and they have ended.
        ``wait_for_inflight_requests`` is vLLM's older word for it, which 0.32 does not know any more.
        """
        if wait_for_inflight_requests:
            warnings.warn('pause_generation: say mode="wait"', DeprecationWarning, stacklevel=2)
            mode = "wait"
        await self.context(model).pause_generation(mode=mode, clear_cache=clear_cache)

    resume_generation = _theirs("Schedule again.")
    is_paused = _theirs("Whether generation is paused.")

    async def sleep(self, level: int = 1, mode: str = "abort", *, model: str | None = None) -> None:
        """Give memory back (default: of all models that are loaded). Level 1 parks, level 2 lets go of the weights too.

        Level 0 only pauses: nothing is scheduled, and all that is in memory stays there. ``mode`` says what becomes
        of unfinished requests (abort, wait, keep); level 2 can't keep any.
        """
        for frontend in self._loaded(model):
            await self._put_to_sleep(frontend, level, mode)

    async def wake_up(self, tags: list[str] | None = None, *, model: str | None = None) -> bool:
        """Bring back what slept (default: all), or the parts of it in ``tags``; True when all of it is back.

        What is least needed goes for it, as for a preloaded model. Nothing is scheduled before both weights and KV
        cache are there. A model that was parked when it went to sleep is parked again. Raises SwitchFailed where there
        is no room.
        """
        for frontend in self._loaded(model):
            await self._wake(frontend, tags)
        return not await self.is_sleeping(model=model)

    async def is_sleeping(self, *, model: str | None = None) -> bool:
        """Whether a model sleeps (default: any)."""
        return any([await frontend.llm.is_sleeping() for frontend in self._loaded(model)])

    release_kv_cache_memory = _theirs("Refused, since a model's weights go with its KV cache: ``sleep`` (0.32).")

    # --- caches, adapters, weights --------------------------------------------------------------------------------

    reset_prefix_cache = _theirs("Forget a model's prefix cache.")
    reset_mm_cache = _theirs("Forget a model's multimodal cache.")
    reset_encoder_cache = _theirs("Forget a model's encoder outputs.")
    add_lora = _theirs("Load a LoRA adapter into a model.")
    remove_lora = _theirs("Unload a LoRA adapter.")
    list_loras = _theirs("The ids of a model's adapters.")
    pin_lora = _theirs("Keep an adapter in one of the max_loras places on the device; leave one to the others.")
    init_weight_transfer_engine = _theirs("Prepare to take weights from a trainer.")
    shutdown_weight_transfer_engine = _theirs("Let go of the trainer (0.32).")
    start_weight_update = _theirs("Begin an update of a model's weights.")
    start_draft_weight_update = _theirs("Begin an update of its draft model's weights.")
    update_weights = _theirs("Write weights.")
    finish_weight_update = _theirs("End an update of weights.")
    update_weight_version = _theirs("Name the weights' version (0.32).")
    get_weight_version = _theirs("The weights' version (0.32).")
    compute_weight_checksums = _theirs("Digests of a model's weights (0.32).")
    checkpoint_prepare = _theirs("Get ready for a process checkpoint (0.32).")
    checkpoint_restore = _theirs("Come back from a process checkpoint (0.32).")

    # --- the engine -----------------------------------------------------------------------------------------------

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,  # noqa: ASYNC109 - vLLM's own parameter
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        model: str | None = None,
    ) -> list[Any]:
        """Call a method of the workers, by name or as a callable that gets the worker, on one model.

        It travels in a signed envelope: arguments may be anything that can be pickled. Raises TimeoutError.
        """
        frontend = self._frontend(model)
        async with asyncio.timeout(timeout):
            return await frontend.call_workers(method, args, kwargs or {})

    async def apply_model(self, func: Callable[[Any], Any], *, model: str | None = None) -> list[Any]:
        """Apply a function to the model's module in each worker."""
        return await self.collective_rpc("apply_model", args=(func,), model=model)

    start_profile = _theirs("Start vLLM's profiler on a model; it sees all that its processes do meanwhile.")

    async def stop_profile(self, *, model: str | None = None) -> None:
        """Stop vLLM's profiler (default: of all models that are loaded and have one)."""
        for frontend in self._profiled(model):
            await frontend.llm.stop_profile()

    async def check_health(self) -> None:
        """Raises EngineDeadError where the engine is dead."""
        for frontend in self._chosen(None):
            await frontend.llm.check_health()

    async def do_log_stats(self, *, model: str | None = None) -> None:
        """Log the statistics of a model (default: of every one)."""
        for frontend in self._chosen(model):
            await frontend.llm.do_log_stats()

    get_supported_tasks = _theirs("What a model can do; waits until it is loaded.")
    is_tracing_enabled = _theirs("Whether requests are traced.")

    async def scale_elastic_ep(
        self,
        new_data_parallel_size: int,
        drain_timeout: int = 300,  # noqa: ARG002 - vLLM's own parameter
        *,
        model: str | None = None,
    ) -> None:
        """The number of data-parallel engines stays as it is. Raises NotImplementedError for another one."""
        there = self._frontend(model).llm.vllm_config.parallel_config.data_parallel_size
        if new_data_parallel_size != there:
            raise NotImplementedError(
                f"scale_elastic_ep: data_parallel_size is {there} and can't become {new_data_parallel_size}: its ranks "
                "are started once, for all models, and each model is only one of their clients; start the engine anew"
            )

    notify_kv_transfer_request_rejected = _theirs("Free a rejected transfer.")
    handle_fault = _theirs("vLLM's fault-tolerance instruction (0.32).")
    get_status = _theirs("vLLM's fault-tolerance status (0.32).")
    get_tokenizer = _theirs("A model's tokenizer.")
    check_admission = _theirs("Raises where a model takes no further request (0.32).")
    get_num_queued_tokens = _theirs("Prompt tokens that wait for prefill (0.32).")
    get_kv_event_sources = _theirs("Where KV cache events come from (0.32).")

    # --- the active model, where an AsyncLLM has attributes -------------------------------------------------------

    vllm_config = Shown("The active model's configuration.")
    model_config = Shown("The active model's model configuration.")
    scheduler_config = Shown("The active model's scheduler configuration (0.32).")
    observability_config = Shown("The active model's observability configuration.")
    renderer = Shown("The active model's renderer.")
    input_processor = Shown("The active model's input processor.")
    output_processor = Shown("The active model's output processor.")
    tokenizer = Shown("The active model's tokenizer.")
    engine_core = Shown("The active model's client of the engine core.")
    output_handler = Shown("The task that hands the active model's outputs on; None before its first request.")
    logger_manager = Shown("The active model's stat loggers; None where statistics are off.")
    admission_stats = Shown("What the active model has admitted (0.32).")
    profiler = Shown("The active model's profiler of this process, where it has one.")
    log_requests = Shown("Whether requests are logged.")
    log_stats = Shown("Whether statistics are kept.")
    dead_error = Shown("The error of a dead engine.")

    @property
    def engine(self) -> Self:
        """Itself: all of AsyncLLM for the model that is active, through every switch; ``context`` has a model's own.

        Raises RuntimeError before ``initialize``.
        """
        self._frontend(None)
        return self

    @property
    def is_running(self) -> bool:
        """Whether every frontend runs."""
        frontends = self._chosen(None)
        return bool(frontends) and all(frontend.llm.is_running for frontend in frontends)

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has stopped."""
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine is dead, for every model at once."""
        return any(frontend.llm.errored for frontend in self._chosen(None))
