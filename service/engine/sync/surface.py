"""The whole surface of vLLM's LLMEngine, per model: every operation takes ``model=``.

Without it an operation means the active model, or, where a docstring says so, all of them. The operations are
LLMEngine's own, on that model's LLMEngine; on a model that is not active they reach its frozen context. A model that
is not loaded is loaded first, beside the active one: nobody else could load it while the caller waits.
"""

from collections.abc import Callable, Iterable
from typing import Any

from schemas.contexts import Tier
from service.engine.models.models import Models
from service.engine.models.operations import Operation, RequestOperation, Shown
from service.engine.sync.frontend import SyncFrontend
from service.engine.versions import vllm_frontend


def _llm_engine() -> type:
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine


def _theirs(meaning: str) -> Any:
    return Operation(meaning, source=_llm_engine)


class SyncSurface(Models[SyncFrontend]):
    """What LLMEngine can do, for many models; how they are switched and stepped is ``MultiModelLLM``'s."""

    _load: Callable[[str], Any]
    _wake: Callable[[SyncFrontend, list[str] | None], None]

    def context(self, alias: str | None = None) -> Any:
        """The LLMEngine of a model (default: the active one), which is loaded where it is not.

        Its requests run while the model is active and are frozen otherwise; ``MultiModelLLM.step`` steps it.

        Raises ValueError for an unknown name, SwitchFailed where it can't be loaded, and whatever was wrong with the
        model's arguments.
        """
        frontend = self._frontend(alias)
        if self._residency.tier(frontend.alias) is Tier.DROPPED:
            self._load(frontend.alias)
        return frontend.llm

    # --- requests -------------------------------------------------------------------------------------------------

    add_request = RequestOperation(
        "Add a request; ``step`` gives its outputs while its model is active. Answers with its id.", source=_llm_engine
    )

    def abort_request(self, request_ids: Iterable[str], internal: bool = False, *, model: str | None = None) -> None:
        """End requests (of ``model``, default: wherever they are), frozen ones too; unknown ids are ignored."""
        ids = list(request_ids)
        for frontend in self._opened(model):
            frontend.llm.abort_request(ids, internal)

    has_unfinished_requests_dp = _theirs("Whether any data-parallel rank of a model has unfinished requests.")

    # --- sleeping -------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1, mode: str = "abort", *, model: str | None = None) -> None:
        """Give memory back (default: of all models that are loaded). Level 1 parks, level 2 lets go of the weights too.

        Level 0 only pauses: nothing is scheduled, and all that is in memory stays there. ``mode`` says what becomes
        of unfinished requests (abort, keep; wait, for the active model of a core in a process of its own); level 2
        can't keep any.
        """
        for frontend in self._loaded(model):
            if mode == "wait" and frontend.running and frontend.alias != self.active:
                raise ValueError(f"mode 'wait' would wait for ever: {frontend.alias} is not active")
            frontend.llm.sleep(level, mode)
            self._residency.slept(frontend.alias, level)

    def wake_up(self, tags: list[str] | None = None, *, model: str | None = None) -> bool:
        """Bring back what slept (default: all), or the parts of it in ``tags``; True when all of it is back.

        What is least needed goes for it, as for a preloaded model. Nothing is scheduled before both weights and KV
        cache are there. A model that was parked when it went to sleep is parked again. Raises SwitchFailed where there
        is no room.
        """
        for frontend in self._loaded(model):
            self._wake(frontend, tags)
        return not self.is_sleeping(model=model)

    def is_sleeping(self, *, model: str | None = None) -> bool:
        """Whether a model sleeps (default: any)."""
        return any(frontend.llm.is_sleeping() for frontend in self._loaded(model))

    release_kv_cache_memory = _theirs("Refused, since a model's weights go with its KV cache: ``sleep`` (0.32).")

    # --- caches, adapters, weights --------------------------------------------------------------------------------

    reset_prefix_cache = _theirs("Forget a model's prefix cache.")
    reset_mm_cache = _theirs("Forget a model's multimodal cache.")
    reset_encoder_cache = _theirs("Forget a model's encoder outputs.")
    add_lora = _theirs("Load a LoRA adapter into a model.")
    remove_lora = _theirs("Unload a LoRA adapter.")
    list_loras = _theirs("The ids of a model's adapters.")
    pin_lora = _theirs("Keep an adapter in one of the max_loras places on the device; leave one to the others.")
    set_weight_version = _theirs("Name the weights' version (0.32).")
    get_weight_version = _theirs("The weights' version (0.32).")

    # --- the engine -----------------------------------------------------------------------------------------------

    collective_rpc = _theirs("Call a method of the workers, by name or as a callable that gets the worker.")
    apply_model = _theirs("Apply a function to the model's module in each worker.")
    start_profile = _theirs("Start vLLM's profiler on a model; it sees all that its processes do meanwhile.")

    def stop_profile(self, *, model: str | None = None) -> None:
        """Stop vLLM's profiler (default: of all models that are loaded and have one)."""
        for frontend in self._profiled(model):
            frontend.llm.stop_profile()

    get_supported_tasks = _theirs("What a model can do.")
    get_tokenizer = _theirs("A model's tokenizer.")

    def get_metrics(self, *, model: str | None = None) -> list[Any]:
        """A snapshot of a model's vLLM metrics. Raises AssertionError where statistics are off, as LLMEngine does."""
        registry = self._frontend(model).registry
        assert registry is not None, "Stat logging disabled"
        return vllm_frontend.metrics_snapshot(registry)

    def do_log_stats(self, *, model: str | None = None) -> None:
        """Log the statistics of a model (default: of every one)."""
        for frontend in self._opened(model):
            frontend.llm.do_log_stats()

    def do_log_stats_with_interval(self) -> None:
        """The same, when the time interval has passed."""
        for frontend in self._opened(None):
            frontend.llm.do_log_stats_with_interval()

    def _opened(self, model: str | None) -> tuple[SyncFrontend, ...]:
        """The frontend of ``model``, or all, as far as they have their LLMEngine."""
        return tuple(frontend for frontend in self._chosen(model) if frontend.opened)

    # --- the active model, where LLMEngine has attributes ---------------------------------------------------------

    vllm_config = Shown("The active model's configuration.")
    model_config = Shown("The active model's model configuration.")
    renderer = Shown("The active model's renderer.")
    input_processor = Shown("The active model's input processor.")
    output_processor = Shown("The active model's output processor.")
    tokenizer = Shown("The active model's tokenizer.")
    observability_config = Shown("The active model's observability configuration.")
    engine_core = Shown("The active model's client of the engine core.")
    logger_manager = Shown("The active model's stat loggers; None where statistics are off.")
    dp_group = Shown("None: there is one engine core.")
    external_launcher_dp = Shown("False: the engine starts its workers itself.")
    should_execute_dummy_batch = Shown("False: there is no other rank to wait for.")
    log_stats = Shown("Whether statistics are kept.")

    @property
    def model_executor(self) -> Any:
        """The active model's executor. AttributeError where the core is another process, as in LLMEngine."""
        return self.context().engine_core.engine_core.model_executor
