"""MultiModelEngine: many models on one vLLM engine, each with its AsyncLLM, one of them running."""

import asyncio
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Self

from schemas.contexts import ContextInfo, Leftover, SwitchMode, SwitchPhase, SwitchReport, Tier
from service.engine.compatibility import require_compatible
from service.engine.frontends import Frontend, Logging
from service.engine.launch import EngineProcesses, environment_of
from service.engine.residency import Residency, give_kv_shares, read_ahead
from service.engine.surface import Surface
from service.engine.switching import SwitchProgress, mib
from service.errors import ConfigError, HandedBack, SwitchFailed, nearest
from service.ports import Observer
from service.scheduling.memory import Budgets

_DRAIN_POLL_S = 0.005
_WARM_POLL_S, _WARM_POLL_MOST_S = 0.005, 0.05
_GAUDI_FIELDS = (
    "switched",
    "drain_s",
    "reconfigure_s",
    "switch_s",
    "memory_before_mb",
    "memory_after_unload_mb",
    "freed_memory_mb",
    "stash_memory_after_mb",
)


class MultiModelEngine(Surface):
    """Many models in one engine process, switched in under a millisecond.

    ``model_configs`` maps aliases to AsyncEngineArgs; ``model_quant_configs`` maps aliases to their QUANT_CONFIG
    (None clears it; an alias that is not in it keeps the environment's). Code written for vllm-gaudi's
    MultiModelAsyncLLM runs with only the import changed.

    ``device_memory_bytes`` and ``host_memory_bytes`` bound what contexts take (None: what the platform says is
    there, and no bound); ``switch_timeout_s`` bounds a switch's wait for the core. All operations of AsyncLLM are in
    ``Surface``.
    """

    def __init__(
        self,
        model_configs: dict[str, Any],
        usage_context: Any = None,
        disable_log_stats: bool = False,
        enable_log_requests: bool = False,
        model_quant_configs: dict[str, str | None] | None = None,
        *,
        stat_loggers: list[Any] | None = None,
        aggregate_engine_logging: bool = False,
        device_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        switch_timeout_s: float = 600.0,
    ) -> None:
        from vllm.usage.usage_lib import UsageContext

        if not model_configs:
            raise ValueError("model_configs cannot be empty")
        self.model_configs = dict(model_configs)
        self.usage_context = usage_context or UsageContext.ENGINE_CONTEXT
        self.disable_log_stats = disable_log_stats
        self.enable_log_requests = enable_log_requests
        self.model_quant_configs = dict(model_quant_configs or {})
        self.switch_timeout_s = switch_timeout_s
        self._logging = Logging(
            stats=not disable_log_stats,
            requests=enable_log_requests,
            aggregate=aggregate_engine_logging,
            factories=tuple(stat_loggers or ()),
        )
        self._budgets = (device_memory_bytes, host_memory_bytes)
        self._configs: dict[str, Any] = {}
        self._broken: dict[str, Exception] = {}
        self._frontends: dict[str, Frontend] = {}
        self._residency: Residency | None = None
        self._processes: EngineProcesses | None = None
        self._worker_pids: tuple[int, ...] = ()
        self._lock = asyncio.Lock()
        self._active: str | None = None
        self._target: str | None = None
        self._death: asyncio.Future[BaseException] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: Any = None, **options: Any) -> Self:
        """An engine for AsyncEngineArgs by alias, or for one of them, under the name that it is served by.

        What AsyncLLM's method does at once, ``initialize`` does. Options are the constructor's; those of AsyncLLM
        that only concern its start are taken and mean nothing here.
        """
        named = engine_args if isinstance(engine_args, Mapping) else {_name_of(engine_args): engine_args}
        return cls(dict(named), usage_context, **{name: options[name] for name in options if name not in _IGNORED})

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, usage_context: Any = None, **options: Any) -> Self:
        """The same for finished VllmConfigs."""
        named = (
            vllm_config
            if isinstance(vllm_config, Mapping)
            else {vllm_config.model_config.served_model_name: vllm_config}
        )
        given = {alias: _Finished(config) for alias, config in named.items()}
        return cls(dict(given), usage_context, **{name: options[name] for name in options if name not in _IGNORED})

    # --- life -----------------------------------------------------------------------------------------------------

    async def initialize(self, model_name: str) -> None:
        """Start the engine with ``model_name`` loaded and active; the other models get their frontends.

        Raises ValueError for an unknown name, RuntimeError where it was initialized before or does not come up, and
        whatever is wrong with this model's arguments. Wrong arguments of another model are raised by its switch.
        """
        self._require_known(model_name)
        if self._processes is not None or self._death is not None:
            raise RuntimeError("Engine already initialized. Use switch_model() instead.")
        self._death = asyncio.get_running_loop().create_future()
        try:
            order = [model_name, *(alias for alias in self.model_configs if alias != model_name)]
            await asyncio.to_thread(self._configure, order)
            self._require_compatible(model_name)
            budgets = self._measure_budgets()
            give_kv_shares(self._configs, budgets)
            self._processes = await asyncio.to_thread(
                EngineProcesses.start,
                self._configs[model_name],
                models=len(order),
                log_stats=not self.disable_log_stats,
                environment=self._environment(model_name),
            )
            self._residency = Residency(self._frontends, budgets)
            for key, alias in enumerate(order):
                if alias in self._configs:
                    self._open(alias, key)
            attached = await self._frontends[model_name].ask("attach")
        except BaseException:
            self._death = None
            self.shutdown()
            raise
        self._worker_pids = tuple(attached["pids"])
        self._residency.note(model_name, Tier.RESIDENT, attached)
        self._residency.used(model_name)
        self._active = model_name
        self._processes.watch(self._report_death)

    def _configure(self, aliases: list[str]) -> None:
        """Validate models' arguments; one that is wrong must not keep the others from serving."""
        from service.platforms import current

        for alias in aliases:
            if alias in self._configs or alias in self._broken:
                continue
            try:
                with environment_of(self._environment(alias)):
                    config = self.model_configs[alias].create_engine_config(self.usage_context)
                current().arrange(config)
            except Exception as error:  # raised to whoever wants this model
                self._broken[alias] = error
            else:
                self._configs[alias] = config

    def _require_compatible(self, first: str) -> None:
        """Set those aside that can't live in one engine with ``first``. Raises what is wrong with that one itself."""
        pattern = self.get_vllm_config(first)
        for alias, config in tuple(self._configs.items()):
            try:
                require_compatible(pattern, config, first_alias=first, alias=alias)
            except ConfigError as error:
                if alias == first:
                    raise
                self._broken[alias] = error
                del self._configs[alias]

    def _measure_budgets(self) -> Budgets:
        from service.platforms import current

        device, host = self._budgets
        platform = current()
        return Budgets(
            device=device if device is not None else platform.device_budget(),
            host=host,
            shared=not platform.weights_move,
        )

    def _open(self, alias: str, key: int) -> None:
        assert self._processes is not None
        assert self._residency is not None
        self._frontends[alias] = Frontend(
            alias,
            self._configs[alias],
            key=key,
            processes=self._processes,
            logging=self._logging,
        )
        self._residency.add(alias, self._configs[alias])

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop every process and close every frontend. May be called twice."""
        processes, self._processes = self._processes, None
        for task in self._tasks:
            task.cancel()
        for frontend in self._frontends.values():
            frontend.close()
        self._frontends.clear()
        self._active = self._target = None
        if processes is not None:
            processes.stop(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if getattr(self, "_processes", None) is not None:
            self.shutdown()

    async def died(self) -> BaseException:
        """Wait until the engine is dead, and say why."""
        if self._death is None:
            raise RuntimeError("Engine not initialized. Call initialize() first.")
        return await asyncio.shield(self._death)

    def _report_death(self, reason: str) -> None:
        """Called from the watching thread."""
        from vllm.v1.engine.exceptions import EngineDeadError

        death = self._death
        assert death is not None

        def tell() -> None:
            error = EngineDeadError(reason)
            if not death.done():
                death.set_result(error)
            for frontend in self._frontends.values():
                frontend.fail(error)

        loop = death.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell)

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def available_models(self) -> list[str]:
        return list(self.model_configs)

    @property
    def current_model(self) -> str | None:
        return self._active

    @property
    def active(self) -> str:
        """The active alias, or the target of the switch under way. Raises RuntimeError before ``initialize``."""
        name = self._target or self._active
        if name is None:
            raise RuntimeError("Engine not initialized. Call initialize() first.")
        return name

    def context(self, alias: str | None = None) -> Any:
        """The AsyncLLM of a model (default: the active one): vLLM's EngineClient, usable at any time.

        Its requests run while the model is active and are frozen otherwise. Those of a model that is not loaded
        wait until it is; so do ``get_supported_tasks`` and with it ``generate``, ``encode`` and the making of OpenAI
        handlers. Other calls that need the model's core (LoRA, caches) fail until then.

        Raises ValueError for an unknown name, RuntimeError before ``initialize``, and whatever was wrong with the
        model's arguments.
        """
        return self._frontend(alias).llm

    @property
    def engine(self) -> Any:
        """The active model's AsyncLLM. Raises RuntimeError before ``initialize``."""
        return self.context()

    def contexts(self) -> tuple[ContextInfo, ...]:
        """Every model's context as it stands."""
        if self._residency is None:
            return ()
        return tuple(info.model_copy(update={"active": info.alias == self._active}) for info in self._residency.infos())

    @property
    def device_bytes(self) -> int | None:
        """What contexts may take of the device; None where that is not bounded, or not known yet."""
        return None if self._residency is None else self._residency.budgets.device

    def info(self, alias: str) -> ContextInfo:
        """One model's context as it stands."""
        return next(info for info in self.contexts() if info.alias == alias)

    @property
    def registries(self) -> dict[str, Any]:
        """The Prometheus registry of each model's vLLM metrics; none where statistics are off."""
        return {alias: each.registry for alias, each in self._frontends.items() if each.registry is not None}

    async def describe(self) -> dict[str, Any]:
        """What the core says of its contexts: which is active, and for each its key, requests and bytes."""
        answer: dict[str, Any] = await self._frontend(None).ask("describe")
        return answer

    def get_vllm_config(self, model_name: str) -> Any:
        """The VllmConfig of a model. Raises ValueError for an unknown name, or what is wrong with its arguments."""
        self._require_known(model_name)
        self._configure([model_name])
        if model_name in self._broken:
            raise self._broken[model_name]
        return self._configs[model_name]

    def get_all_vllm_configs(self) -> dict[str, Any]:
        return {alias: self.get_vllm_config(alias) for alias in self.model_configs}

    @property
    def core_pid(self) -> int:
        """The engine core's process id; it never changes."""
        return self._processes.pids[0] if self._processes is not None else 0

    @property
    def worker_pids(self) -> tuple[int, ...]:
        return self._worker_pids

    def _require_known(self, name: str) -> None:
        if name not in self.model_configs:
            raise ValueError(
                f"Model '{name}' not found. Available: {list(self.model_configs)}{nearest(name, self.model_configs)}"
            )

    def _frontend(self, alias: str | None) -> Frontend:
        alias = self.active if alias is None else alias
        self._require_known(alias)
        if alias in self._broken:
            raise self._broken[alias]
        if alias not in self._frontends:
            raise RuntimeError("Engine not initialized. Call initialize() first.")
        return self._frontends[alias]

    def _all_frontends(self) -> tuple[Frontend, ...]:
        return tuple(self._frontends.values())

    async def _loaded(self, model: str | None) -> list[Frontend]:
        if model is not None:
            return [self._frontend(model)]
        return [self._frontends[info.alias] for info in self.contexts() if info.tier is not Tier.DROPPED]

    # --- switching ------------------------------------------------------------------------------------------------

    async def switch_model(self, model_name: str, drain_timeout: float = 60) -> dict[str, Any]:
        """MultiModelAsyncLLM's switch: drain, abort what is left, and answer with its fields.

        Raises ValueError for an unknown name, RuntimeError("Failed to switch model from X to Y: ...").
        """
        report = await self.switch(model_name, mode=SwitchMode.DRAIN, drain_timeout=drain_timeout)
        if not report.switched:
            return {"switched": False, "drain_s": 0.0, "reconfigure_s": 0.0, "switch_s": 0.0}
        return {name: getattr(report, name) for name in _GAUDI_FIELDS}

    async def switch(
        self,
        alias: str,
        *,
        mode: SwitchMode = SwitchMode.KEEP,
        drain_timeout: float = 60.0,
        leftover: Leftover = Leftover.ABORT,
        observe: Observer | None = None,
    ) -> SwitchReport:
        """Make ``alias`` active. Switches asked at once are done one after another, each with its own report.

        Cancelling the caller ends its wait, not a switch that has begun. Raises ValueError for an unknown name or a
        negative timeout, RuntimeError before ``initialize``, SwitchFailed (a RuntimeError; the previous model is
        active and serves), EngineDeadError.
        """
        if self._active is None:
            raise RuntimeError("Engine not initialized. Call initialize() first.")
        self._require_known(alias)
        if drain_timeout < 0:
            raise ValueError(f"drain_timeout must not be negative, got {drain_timeout}")
        asked = time.perf_counter()
        return await self._exclusively(
            self._switch(alias, SwitchMode(mode), drain_timeout, Leftover(leftover), observe, asked),
            f"switch to {alias}",
        )

    async def preload(self, alias: str, *, stall: bool = True) -> ContextInfo:
        """Load a model, or bring it back, while another one serves. What is least needed goes for it.

        What can be done while the active model's steps run is done first: a parked model is brought back beside
        them, the weights of one that was dropped are read from the disk into memory. ``stall=False`` ends there.

        Raises as ``switch`` does; SwitchFailed where there is no room beside the active model.
        """
        self._frontend(alias)
        arrived = await self._warm(alias)
        if stall or arrived:
            await self._exclusively(self._preload(alias), f"preload {alias}")
        return self.info(alias)

    def expect(self, order: Sequence[str]) -> None:
        """Who will be switched to next, soonest first: where room is made for one, the others are spared by it."""
        assert self._residency is not None
        self._residency.expect(order)

    async def park(self, alias: str) -> ContextInfo:
        """Give a model's memory back; its requests stay. Raises SwitchFailed for the active one."""
        await self._exclusively(self._lower(alias, Tier.PARKED), f"park {alias}")
        return self.info(alias)

    async def drop(self, alias: str) -> ContextInfo:
        """Let go of a model. Raises SwitchFailed for the active one, and where it has unfinished requests."""
        await self._exclusively(self._lower(alias, Tier.DROPPED), f"drop {alias}")
        return self.info(alias)

    async def pin(self, alias: str, pinned: bool = True) -> ContextInfo:
        """Keep a model resident whatever the budgets ask, or let it go again. One that is away is not fetched."""
        self._frontend(alias)
        assert self._residency is not None
        self._residency.pin(alias, pinned)
        return self.info(alias)

    async def _exclusively(self, work: Any, name: str) -> Any:
        """Run ``work`` after whatever else changes contexts, to its end even if the caller does not wait for it."""

        async def locked() -> Any:
            async with self._lock:
                return await work

        task = asyncio.create_task(locked(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _switch(
        self,
        alias: str,
        mode: SwitchMode,
        drain_timeout: float,
        leftover: Leftover,
        observe: Observer | None,
        asked: float,
    ) -> SwitchReport:
        left, residency = self._active, self._residency
        assert left is not None
        assert residency is not None
        found = residency.tier(alias) if alias in self._frontends else Tier.DROPPED
        progress = SwitchProgress(
            SwitchReport(
                from_model=left,
                to_model=alias,
                mode=mode,
                tier_found=found,
                switched=False,
                core_pid=self.core_pid,
                worker_pids=self.worker_pids,
                memory_before_mb=mib(residency.memory),
            ),
            asked=asked,
            observe=observe,
        )
        progress.lap("wait")
        progress.to(SwitchPhase.ACCEPTED)
        if alias == left:
            return progress.to(SwitchPhase.NO_OP)
        self._target = alias
        try:
            aborted = await self._settle(left, mode, drain_timeout, leftover, progress)
            drain_s = progress.lap("drain")
            self._frontend(alias)
            progress.to(SwitchPhase.SWITCHING, aborted=aborted, drain_s=drain_s)
            answer = await self._activate(left, alias)
        except Exception as error:
            self._raise_if_dead(error)
            core_tried = progress.phase is SwitchPhase.SWITCHING
            progress.to(SwitchPhase.ROLLED_BACK if core_tried else SwitchPhase.FAILED)
            raise SwitchFailed(f"Failed to switch model from {left} to {alias}: {error}") from error
        finally:
            self._target = None
        self._active = alias
        residency.used(alias)
        reconfigure_s = progress.lap("core")
        progress.phases(answer["phases_ms"])
        return progress.to(SwitchPhase.COMPLETED, **self._figures(left, answer), reconfigure_s=reconfigure_s)

    def _figures(self, left: str, answer: Mapping[str, Any]) -> dict[str, Any]:
        residency = self._residency
        assert residency is not None
        after = mib(residency.memory)
        info = residency.info(left)
        return {
            "switched": True,
            "stall_ms": answer["stall_ms"],
            "tier_left": info.tier,
            "kept": info.unfinished,
            "memory_after_mb": after,
            "memory_after_unload_mb": after,
            "stash_memory_after_mb": mib(sum(each.host_bytes for each in residency.infos())),
            "freed_memory_mb": mib(info.weights_bytes + info.kv_bytes) if info.tier is Tier.PARKED else 0.0,
        }

    async def _settle(
        self, left: str, mode: SwitchMode, drain_timeout: float, leftover: Leftover, progress: SwitchProgress
    ) -> int:
        """Do what the mode asks with the requests of the model being left. Answers how many were aborted."""
        frontend = self._frontends[left]
        present = frontend.running
        if mode is SwitchMode.KEEP or not present:
            return 0
        if mode is SwitchMode.DRAIN:
            progress.to(SwitchPhase.DRAINING)
            deadline = time.perf_counter() + drain_timeout
            # Those that come meanwhile are not waited for: they are frozen when the time is up.
            while present & frontend.running and time.perf_counter() < deadline:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(_DRAIN_POLL_S)
            if leftover is Leftover.KEEP:
                return 0
        left_over = present & frontend.running
        await frontend.llm.abort(sorted(left_over), internal=True)
        return len(left_over)

    async def _activate(self, left: str, alias: str) -> dict[str, Any]:
        residency = self._residency
        assert residency is not None
        park_left = await self._make_room(alias, spare=left)
        if park_left:
            await self._frontends[left].end_waiting_streams(
                HandedBack(f"{left} went from memory while it waited for its prompt")
            )
        frontend = self._frontends[alias]
        answer = await self._patiently(frontend.ask("activate", frontend.key, await self._sealed(alias), park_left))
        residency.note(alias, Tier.RESIDENT, answer)
        if park_left:
            residency.note(left, Tier.PARKED, answer, sizes="left")
        return answer

    async def _warm(self, alias: str) -> bool:
        """Whether a parked model was brought back beside the active one's steps; other changes may come between."""
        residency = self._residency
        assert residency is not None
        frontend = self._frontends[alias]
        if residency.tier(alias) is Tier.DROPPED:
            await asyncio.to_thread(read_ahead, self._configs[alias].model_config.model)
        if residency.tier(alias) is not Tier.PARKED:
            return False
        pending = await self._exclusively(self._begin_return(alias), f"bring back {alias}")
        pause = _WARM_POLL_S
        while pending and not await frontend.ask("warmed", frontend.key):
            await asyncio.sleep(pause)
            pause = min(2 * pause, _WARM_POLL_MOST_S)
        return bool(pending)

    async def _begin_return(self, alias: str) -> bool:
        residency = self._residency
        assert residency is not None
        frontend = self._frontends[alias]
        if residency.tier(alias) is not Tier.PARKED:
            return False
        try:
            await self._make_room(alias, spare=None)
            pending: bool = await frontend.ask("warm", frontend.key)
        except Exception as error:
            self._raise_if_dead(error)
            raise SwitchFailed(f"Failed to preload {alias}: {error}") from error
        if pending:
            residency.returning(alias)
        return pending

    async def _preload(self, alias: str) -> None:
        residency = self._residency
        assert residency is not None
        assert self._active is not None
        if residency.tier(alias) is Tier.RESIDENT:
            return
        try:
            await self._make_room(alias, spare=None)
            frontend = self._frontends[alias]
            answer = await self._patiently(frontend.ask("preload", frontend.key, await self._sealed(alias)))
        except Exception as error:
            self._raise_if_dead(error)
            raise SwitchFailed(f"Failed to preload {alias}: {error}") from error
        residency.note(alias, Tier.RESIDENT, answer)

    async def _make_room(self, alias: str, *, spare: str | None) -> bool:
        """Move what has to go for ``alias``. True where the model being left, ``spare``, has to go as well.

        Without ``spare`` the active model stays where it is. Raises NoRoom.
        """
        residency = self._residency
        assert residency is not None
        spared = False
        for move in residency.room_for(alias, beside=None if spare else self._active):
            if move.alias == spare:
                spared = True
                continue
            if move.hand_back:
                await self._frontends[move.alias].hand_back(
                    HandedBack(f"{move.alias} was dropped to make room for {alias}; the request was not finished")
                )
            await self._lower(move.alias, move.tier)
        return spared

    async def _lower(self, alias: str, tier: Tier) -> None:
        frontend = self._frontend(alias)
        residency = self._residency
        assert residency is not None
        if residency.tier(alias) is Tier.DROPPED or (residency.tier(alias) is tier and not residency.returns(alias)):
            return
        await frontend.end_waiting_streams(HandedBack(f"{alias} went from memory while it waited for its prompt"))
        try:
            answer = await frontend.ask("park" if tier is Tier.PARKED else "drop", frontend.key)
        except Exception as error:
            self._raise_if_dead(error)
            raise SwitchFailed(f"{alias} can't be {tier}: {error}") from error
        residency.note(alias, tier, answer)

    async def _sealed(self, alias: str) -> bytes | None:
        assert self._residency is not None
        assert self._processes is not None
        if self._residency.tier(alias) is not Tier.DROPPED:
            return None
        return await asyncio.to_thread(self._processes.seal, (self._configs[alias], self._environment(alias)))

    async def _patiently(self, answer: Awaitable[Any]) -> Any:
        """Wait for the core, but not for ever: one that does not come back from a load is dead."""
        try:
            async with asyncio.timeout(self.switch_timeout_s):
                return await answer
        except TimeoutError:
            self._report_death(f"the engine core did not answer within {self.switch_timeout_s:g} s")
            if self._processes is not None:
                self._processes.stop(0)
            raise

    def _raise_if_dead(self, error: BaseException) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            raise error
        if self._death is not None and self._death.done():
            raise self._death.result() from error

    def _environment(self, alias: str) -> dict[str, str | None]:
        """What a model wants in the environment, wherever it is configured and loaded.

        Without a word of its own about QUANT_CONFIG it gets the caller's, never what the model before it had.
        """
        return {"QUANT_CONFIG": self.model_quant_configs.get(alias, os.environ.get("QUANT_CONFIG"))}


_IGNORED = frozenset({"start_engine_loop", "client_addresses", "client_count", "client_index"})


def _name_of(engine_args: Any) -> str:
    served = engine_args.served_model_name
    first = served[0] if isinstance(served, list) else served
    return str(first or engine_args.model)


class _Finished:
    """A configuration where engine arguments are expected."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def create_engine_config(self, _usage_context: Any) -> Any:
        return self._config
