"""The whole surface of vLLM's AsyncLLM, per model: every operation takes ``model=``.

Without it an operation means the model that is active when it is called, or, where a docstring says so, all of them.
The operations themselves are AsyncLLM's own, on that model's AsyncLLM; on a model that is not active they reach its
frozen context, and its frozen requests are treated as AsyncLLM treats waiting ones.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from service.engine.frontends import Frontend
from service.errors import HandedBack


def _asks(name: str, meaning: str) -> Callable[..., Any]:
    """An asynchronous operation of AsyncLLM on one model."""

    async def operation(self: "Surface", *args: Any, model: str | None = None, **kwargs: Any) -> Any:
        return await getattr(self.context(model), name)(*args, **kwargs)

    operation.__name__, operation.__doc__ = name, meaning
    return operation


def _tells(name: str, meaning: str) -> Callable[..., Any]:
    """A synchronous one."""

    def operation(self: "Surface", *args: Any, model: str | None = None, **kwargs: Any) -> Any:
        return getattr(self.context(model), name)(*args, **kwargs)

    operation.__name__, operation.__doc__ = name, meaning
    return operation


def _shows(name: str, meaning: str) -> property:
    """A property of the active model's AsyncLLM."""
    return property(lambda self: getattr(self.context(), name), doc=meaning)


class Surface:
    """What AsyncLLM can do, for many models. ``MultiModelEngine`` is one; nothing here knows how switching works."""

    def context(self, alias: str | None = None) -> Any:
        raise NotImplementedError

    def _frontend(self, alias: str | None) -> Frontend:
        raise NotImplementedError

    def _all_frontends(self) -> tuple[Frontend, ...]:
        raise NotImplementedError

    # --- requests -------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, model: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """AsyncLLM.generate on ``model`` (default: the active one, decided now, not when iteration begins).

        Dropping or cancelling the generator aborts the request.
        """
        return self.context(model).generate(prompt, sampling_params, request_id, **kwargs)

    def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, *args: Any, model: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """AsyncLLM.encode on ``model`` (default: the active one, decided now)."""
        return self.context(model).encode(prompt, pooling_params, request_id, *args, **kwargs)

    add_request = _asks("add_request", "Add a request; its outputs come through the collector that is returned.")

    async def abort(self, request_id: Any, internal: bool = False, *, model: str | None = None) -> None:
        """End one request or many (of ``model``, default: wherever they are), frozen ones too; unknown ids are ignored.

        An id that was given to several requests, or to a parent of ``n > 1``, ends all of them.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for frontend in self._all_frontends() if model is None else (self._frontend(model),):
            await frontend.llm.abort(ids, internal=internal)

    def tokens(self, request_id: str, model: str | None = None) -> int:
        """How many tokens a running request (by the id it was given) has generated so far, over all its samples."""
        frontends = self._all_frontends() if model is None else (self._frontend(model),)
        return sum(frontend.tokens(request_id) for frontend in frontends)

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

    pause_generation = _asks("pause_generation", "Schedule nothing more; ``mode`` says what becomes of what runs.")
    resume_generation = _asks("resume_generation", "Schedule again.")
    is_paused = _asks("is_paused", "Whether generation is paused.")

    async def sleep(self, level: int = 1, mode: str = "abort", *, model: str | None = None) -> None:
        """Give memory back (default: of all models that are loaded). Level 1 parks, level 2 lets go of the weights too.

        ``mode`` says what becomes of unfinished requests (abort, wait, keep); level 2 can't keep any.
        """
        for frontend in await self._loaded(model):
            await frontend.end_waiting_streams(HandedBack(f"{frontend.alias} went to sleep"))
            await frontend.llm.sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None, *, model: str | None = None) -> bool:
        """Bring back what slept (default: all), or the parts of it in ``tags``; True when all of it is back.

        Nothing is scheduled before both weights and KV cache are there.
        """
        for frontend in await self._loaded(model):
            await frontend.llm.wake_up(tags)
        return not await self.is_sleeping(model=model)

    async def is_sleeping(self, *, model: str | None = None) -> bool:
        """Whether a model sleeps (default: any)."""
        return any([await frontend.llm.is_sleeping() for frontend in await self._loaded(model)])

    async def _loaded(self, model: str | None) -> list[Frontend]:
        """The frontends of all models that are loaded, or the one of ``model``."""
        raise NotImplementedError

    release_kv_cache_memory = _asks("release_kv_cache_memory", "Discard a paused model's KV cache (0.32).")

    # --- caches, adapters, weights --------------------------------------------------------------------------------

    reset_prefix_cache = _asks("reset_prefix_cache", "Forget a model's prefix cache.")
    reset_mm_cache = _asks("reset_mm_cache", "Forget a model's multimodal cache.")
    reset_encoder_cache = _asks("reset_encoder_cache", "Forget a model's encoder outputs.")
    add_lora = _asks("add_lora", "Load a LoRA adapter into a model.")
    remove_lora = _asks("remove_lora", "Unload a LoRA adapter.")
    list_loras = _asks("list_loras", "The ids of a model's adapters.")
    pin_lora = _asks("pin_lora", "Keep an adapter in memory.")
    init_weight_transfer_engine = _asks("init_weight_transfer_engine", "Prepare to take weights from a trainer.")
    shutdown_weight_transfer_engine = _asks("shutdown_weight_transfer_engine", "Let go of the trainer (0.32).")
    start_weight_update = _asks("start_weight_update", "Begin an update of a model's weights.")
    start_draft_weight_update = _asks("start_draft_weight_update", "Begin an update of its draft model's weights.")
    update_weights = _asks("update_weights", "Write weights.")
    finish_weight_update = _asks("finish_weight_update", "End an update of weights.")
    update_weight_version = _asks("update_weight_version", "Name the weights' version (0.32).")
    get_weight_version = _asks("get_weight_version", "The weights' version (0.32).")
    compute_weight_checksums = _asks("compute_weight_checksums", "Digests of a model's weights (0.32).")
    checkpoint_prepare = _asks("checkpoint_prepare", "Get ready for a process checkpoint (0.32).")
    checkpoint_restore = _asks("checkpoint_restore", "Come back from a process checkpoint (0.32).")

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

    async def apply_model(self, function: Callable[[Any], Any], *, model: str | None = None) -> list[Any]:
        """Apply a function to the model's module in each worker."""
        return await self.collective_rpc("apply_model", args=(function,), model=model)

    async def start_profile(self, *args: Any, **kwargs: Any) -> None:
        """Start vLLM's profiler. It profiles the process, whichever model runs."""
        await self.context().start_profile(*args, **kwargs)

    async def stop_profile(self) -> None:
        await self.context().stop_profile()

    async def check_health(self) -> None:
        """Raises EngineDeadError where the engine is dead."""
        for frontend in self._all_frontends():
            await frontend.llm.check_health()

    async def do_log_stats(self) -> None:
        """Log the statistics of every model."""
        for frontend in self._all_frontends():
            await frontend.llm.do_log_stats()

    get_supported_tasks = _asks("get_supported_tasks", "What a model can do; waits until it is loaded.")
    is_tracing_enabled = _asks("is_tracing_enabled", "Whether requests are traced.")
    scale_elastic_ep = _asks("scale_elastic_ep", "Change the number of data-parallel engines.")
    notify_kv_transfer_request_rejected = _asks("notify_kv_transfer_request_rejected", "Free a rejected transfer.")
    handle_fault = _asks("handle_fault", "vLLM's fault-tolerance instruction (0.32).")
    get_status = _asks("get_status", "vLLM's fault-tolerance status (0.32).")
    get_tokenizer = _tells("get_tokenizer", "A model's tokenizer.")
    check_admission = _tells("check_admission", "Raises where a model takes no further request (0.32).")
    get_num_queued_tokens = _tells("get_num_queued_tokens", "Prompt tokens that wait for prefill (0.32).")
    get_kv_event_sources = _tells("get_kv_event_sources", "Where KV cache events come from (0.32).")

    def get_num_unfinished_requests(self, *, model: str | None = None) -> int:
        """Requests that have not ended (default: of all models), frozen ones included."""
        frontends = self._all_frontends() if model is None else (self._frontend(model),)
        return sum(len(frontend.running) for frontend in frontends)

    # --- the active model, where EngineClient has attributes ------------------------------------------------------

    vllm_config = _shows("vllm_config", "The active model's configuration.")
    model_config = _shows("model_config", "The active model's model configuration.")
    renderer = _shows("renderer", "The active model's renderer.")
    input_processor = _shows("input_processor", "The active model's input processor.")
    output_processor = _shows("output_processor", "The active model's output processor.")
    tokenizer = _shows("tokenizer", "The active model's tokenizer.")
    log_requests = _shows("log_requests", "Whether requests are logged.")
    log_stats = _shows("log_stats", "Whether statistics are kept.")
    dead_error = _shows("dead_error", "The error of a dead engine.")

    @property
    def is_running(self) -> bool:
        """Whether every frontend runs."""
        frontends = self._all_frontends()
        return bool(frontends) and all(frontend.llm.is_running for frontend in frontends)

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has stopped."""
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine is dead, for every model at once."""
        return any(frontend.llm.errored for frontend in self._all_frontends())
