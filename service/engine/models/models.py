"""What both engines are made of, the asynchronous and the synchronous one: the models, and how each stands."""

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeVar

from schemas.contexts import ContextInfo, Leftover, SwitchMode, SwitchReport, Tier
from service.engine.models.catalog import Catalog
from service.engine.models.changes import Change, Changes
from service.engine.models.residency import ModelFrontend, Residency, workers_of
from service.ports import Observer
from service.scheduling.memory import Budgets

F = TypeVar("F", bound=ModelFrontend)
_NOT_INITIALIZED = "Engine not initialized. Call initialize() first."


class Models(Generic[F]):
    """Models by alias, each with its frontend; one of them is active.

    ``device_memory_bytes`` and ``host_memory_bytes`` bound what contexts take in all workers together (None: what
    the platform says is there, or the share of it that the models' ``gpu_memory_utilization`` asks for, and no bound);
    ``model_memory`` are an alias' own bytes on the device, for its weights and its KV cache.
    """

    def __init__(
        self,
        model_configs: Mapping[str, Any],
        usage_context: Any,
        model_quant_configs: Mapping[str, str | None] | None,
        *,
        device_memory_bytes: int | None,
        host_memory_bytes: int | None,
        lend_kv: bool,
        model_memory: Mapping[str, int] | None,
    ) -> None:
        from vllm.usage.usage_lib import UsageContext

        self._catalog = Catalog(
            model_configs,
            usage_context=usage_context or UsageContext.ENGINE_CONTEXT,
            quant_configs=model_quant_configs,
            memory=model_memory,
        )
        self._bounds = (device_memory_bytes, host_memory_bytes)
        self._lend_kv = lend_kv
        self._frontends: dict[str, F] = {}
        self._started: tuple[Residency, Changes] | None = None

    def _configure(self, first: str) -> tuple[list[str], Budgets]:
        """Validate all models, share the device among them, and say in which order they are opened: ``first`` first.

        Raises whatever is wrong with ``first``.
        """
        from service.platforms import current

        catalog = self._catalog
        order = [first, *(alias for alias in catalog.arguments if alias != first)]
        catalog.configure(order)
        catalog.require_compatible(first)
        budgets = self._measure_budgets(workers_of(catalog.configs[first]), catalog.utilization(order))
        catalog.divide(budgets, order, lend=self._lend_kv and current().lends)
        catalog.usable(first)
        return order, budgets

    def _measure_budgets(self, workers: int, utilization: float | None) -> Budgets:
        from service.platforms import current

        device, host = self._bounds
        platform = current()
        if device is not None:
            utilization = None
        elif (found := platform.device_budget(utilization)) is not None:
            device = found * workers if platform.weights_move else found
        return Budgets(device=device, host=host, shared=not platform.weights_move, utilization=utilization)

    def _begin(self, first: str, residency: Residency, attached: Mapping[str, Any], core_pid: int) -> None:
        """``first`` is loaded and active: ``attached`` is what its core said of it."""
        residency.note(first, Tier.RESIDENT, attached)
        residency.used(first)
        pids = (core_pid, *attached["pids"])
        self._started = (
            residency,
            Changes(
                self._frontends,
                residency,
                active=first,
                pids=pids,
                require=self._catalog.loadable,
                aside=partial(self._loads_aside, self._catalog),  # nothing that holds this engine in a circle
            ),
        )

    @staticmethod
    def _loads_aside(catalog: Catalog, alias: str) -> bool:  # noqa: ARG004 - none can where the caller makes the steps
        """Whether a model can be loaded between the steps of the active one, and is waited for meanwhile."""
        return False

    def _switching(
        self, alias: str, mode: SwitchMode, drain_timeout: float, leftover: Leftover, observe: Observer | None
    ) -> Callable[[], Change[SwitchReport]]:
        """The switch that is asked for now, to be begun when its turn comes. Raises ValueError, RuntimeError."""
        changes = self._changes
        self._catalog.require(alias)
        if drain_timeout < 0:
            raise ValueError(f"drain_timeout must not be negative, got {drain_timeout}")
        return partial(
            changes.switch,
            alias,
            mode=SwitchMode(mode),
            drain_timeout=drain_timeout,
            leftover=Leftover(leftover),
            observe=observe,
            asked=perf_counter(),
        )

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def model_configs(self) -> dict[str, Any]:
        """The arguments of each model, by alias, as they were given."""
        return self._catalog.arguments

    @property
    def usage_context(self) -> Any:
        """vLLM's word for what the engine is used for."""
        return self._catalog.usage_context

    @property
    def model_quant_configs(self) -> dict[str, str | None]:
        """The QUANT_CONFIG of each model that has one; None clears it."""
        return self._catalog.quant_configs

    @property
    def available_models(self) -> list[str]:
        return list(self._catalog.arguments)

    @property
    def current_model(self) -> str | None:
        """The active alias; None before the engine is initialized and after its end."""
        return self._started[1].active if self._started is not None else None

    @property
    def active(self) -> str:
        """The active alias, or the target of the switch under way. Raises RuntimeError before ``initialize``."""
        return self._changes.target or self._changes.active

    def contexts(self) -> tuple[ContextInfo, ...]:
        """Every model's context as it stands; none before the engine is initialized."""
        if self._started is None:
            return ()
        active = self._changes.active
        return tuple(info.model_copy(update={"active": info.alias == active}) for info in self._residency.infos())

    def tiers(self) -> dict[str, Tier]:
        """The tier of every model's context; none before the engine is initialized."""
        return {} if self._started is None else self._residency.tiers()

    def asleep(self) -> tuple[str, ...]:
        """The models that sleep: put to sleep, and neither woken nor dropped since."""
        return () if self._started is None else self._residency.asleep()

    @property
    def device_bytes(self) -> int | None:
        """What contexts may take of the device; None where that is not bounded, or not known yet."""
        return None if self._started is None else self._residency.budgets.device

    def info(self, alias: str) -> ContextInfo:
        """One model's context as it stands.

        Raises ValueError for an unknown name, RuntimeError before ``initialize``, and whatever was wrong with the
        model's arguments.
        """
        self._frontend(alias)
        return self._residency.info(alias).model_copy(update={"active": alias == self._changes.active})

    def get_vllm_config(self, model_name: str) -> Any:
        """The VllmConfig of a model. Raises ValueError for an unknown name, or what is wrong with its arguments."""
        return self._catalog.config(model_name)

    def replaced(self, alias: str) -> bool:
        """Whether a model's checkpoint was replaced since its configuration was read: its name means another model."""
        return self._catalog.replaced(alias)

    def get_all_vllm_configs(self) -> dict[str, Any]:
        return {alias: self.get_vllm_config(alias) for alias in self.model_configs}

    @property
    def registries(self) -> dict[str, Any]:
        """The Prometheus registry of each model's vLLM metrics; none where statistics are off."""
        return {alias: each.registry for alias, each in self._frontends.items() if each.registry is not None}

    @property
    def core_pid(self) -> int:
        """The engine core's process id; it never changes. 0 before the engine is initialized."""
        return self._changes.pids[0] if self._started is not None else 0

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The process ids of the workers; they never change either."""
        return self._changes.pids[1:] if self._started is not None else ()

    # --- for the engines themselves -------------------------------------------------------------------------------

    @property
    def _residency(self) -> Residency:
        if self._started is None:
            raise RuntimeError(_NOT_INITIALIZED)
        return self._started[0]

    @property
    def _changes(self) -> Changes:
        if self._started is None:
            raise RuntimeError(_NOT_INITIALIZED)
        return self._started[1]

    def _frontend(self, alias: str | None) -> F:
        """A model's frontend (default: the active one's).

        Raises ValueError for an unknown name, RuntimeError before ``initialize``, and whatever was wrong with the
        model's arguments.
        """
        alias = self.active if alias is None else alias
        self._catalog.usable(alias)
        if alias not in self._frontends:
            raise RuntimeError(_NOT_INITIALIZED)
        return self._frontends[alias]

    def _chosen(self, model: str | None) -> tuple[F, ...]:
        """The frontend of ``model``, or all."""
        return tuple(self._frontends.values()) if model is None else (self._frontend(model),)

    def _loaded(self, model: str | None) -> tuple[F, ...]:
        """The frontend of ``model``, or those of all models that are loaded."""
        if model is not None:
            return (self._frontend(model),)
        residency = self._residency
        return tuple(each for each in self._frontends.values() if residency.tier(each.alias) is not Tier.DROPPED)

    def _profiled(self, model: str | None) -> tuple[F, ...]:
        """The frontend of ``model``, or those of all loaded models whose arguments give them a profiler."""
        if model is not None:
            return (self._frontend(model),)
        configs = self._catalog.configs
        return tuple(each for each in self._loaded(None) if configs[each.alias].profiler_config.profiler is not None)

    def get_num_unfinished_requests(self, *, model: str | None = None) -> int:
        """Requests that have not ended (default: of all models), frozen ones included."""
        return sum(len(frontend.running) for frontend in self._chosen(model))
