"""MultiModelEngine: many models on one vLLM engine, each with its AsyncLLM, one of them running."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Self

import structlog

from schemas.contexts import ContextInfo, Leftover, SwitchMode, SwitchReport, Tier
from service.engine.frontend.death import Death
from service.engine.frontend.frontend import Frontend
from service.engine.frontend.performer import Performer
from service.engine.frontend.replies import Replies
from service.engine.frontend.slots import Slots
from service.engine.frontend.surface import Surface
from service.engine.models.catalog import Catalog, QuantConfig
from service.engine.models.checkpoint import in_pieces, read_ahead
from service.engine.models.residency import Residency
from service.engine.models.stat_loggers import Logging
from service.engine.processes.launch import SPARE_CLIENTS, EngineProcesses
from service.engine.versions import vllm_frontend
from service.errors import HandedBack, SwitchFailed
from service.models_file import UNSET
from service.ports import Observer

log = structlog.get_logger(__name__)

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
    (None clears it; an alias that is not in it keeps the environment's). It has the methods and parameters of
    vllm-gaudi's MultiModelAsyncLLM.

    ``device_memory_bytes`` and ``host_memory_bytes`` bound what contexts take in all workers together (None: what
    the platform says is there, and no bound); ``model_memory`` are an alias' own bytes on the device, for its weights
    and its KV cache. A load that takes longer than ``switch_timeout_s`` is given up, and the previous model goes on; a
    core that is still silent ``stuck_timeout_s`` later is dead. All operations of AsyncLLM are in ``Surface``.
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
        lend_kv: bool = True,
        model_memory: Mapping[str, int] | None = None,
        switch_timeout_s: float = 600.0,
        stuck_timeout_s: float = 120.0,
    ) -> None:
        from vllm.engine.protocol import EngineClient

        EngineClient.register(type(self))
        super().__init__(
            model_configs,
            usage_context,
            model_quant_configs,
            device_memory_bytes=device_memory_bytes,
            host_memory_bytes=host_memory_bytes,
            lend_kv=lend_kv,
            model_memory=model_memory,
        )
        self.disable_log_stats = disable_log_stats
        self.enable_log_requests = enable_log_requests
        self.switch_timeout_s = switch_timeout_s
        self.stuck_timeout_s = stuck_timeout_s
        self._logging = Logging(
            stats=not disable_log_stats,
            requests=enable_log_requests,
            aggregate=aggregate_engine_logging,
            factories=tuple(stat_loggers or ()),
        )
        self._processes: EngineProcesses | None = None
        self._slots = Slots(0)
        self._performers: Performer | None = None
        self._death: Death | None = None
        self._replies: Replies | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def initialize(self, model_name: str) -> None:
        """Start the engine with ``model_name`` loaded and active; the other models get their frontends.

        After ``shutdown`` it may be called again. Raises ValueError for an unknown name, RuntimeError where it is
        initialized or does not come up, and whatever is wrong with this model's arguments. Wrong arguments of another
        model are raised by its switch.
        """
        self._catalog.require(model_name)
        if self._processes is not None or self._death is not None:
            raise RuntimeError("Engine already initialized. Use switch_model() instead.")
        self._death = Death(self._frontends)
        try:
            order, budgets = await asyncio.to_thread(self._configure, model_name)
            self._processes = EngineProcesses(
                self._catalog.configs[model_name],
                clients=len(order) + SPARE_CLIENTS,
                log_stats=self._logging.heard,
                environment=self._catalog.environment(model_name),
            )
            await asyncio.to_thread(self._processes.start)
            residency = Residency(self._frontends, budgets)
            self._slots = Slots(self._processes.slots)
            for alias in order:
                if alias in self._catalog.configs:
                    self._open_if_usable(alias, residency, required=alias == model_name)
            self._slots.fill(partial(self._connect, self._catalog.configs[model_name]))
            self._replies = Replies(self._processes.replies, self._frontends)
            attached = await self._frontends[model_name].ask("attach", self._processes.replies)
        except BaseException:
            self.shutdown()
            raise
        self._begin(model_name, residency, attached, self._processes.pids[0])
        self._performers = Performer(
            self._frontends,
            self._catalog,
            processes=self._processes,
            death=self._death,
            timeout_s=self.switch_timeout_s,
            stuck_s=self.stuck_timeout_s,
        )
        self._death.watch(self._processes)

    @property
    def _performer(self) -> Performer:
        if self._performers is None:
            raise RuntimeError("Engine not initialized. Call initialize() first.")
        return self._performers

    def _open(self, alias: str, residency: Residency) -> None:
        assert self._processes is not None
        config, logging = self._catalog.configs[alias], self._logging.of(self.model_configs[alias])
        with self._slots.taken(alias, partial(self._connect, config)) as (key, client):
            self._frontends[alias] = Frontend(
                alias, config, key=key, processes=self._processes, logging=logging, client=client
            )
        residency.add(alias, config)

    def _connect(self, config: Any, key: int) -> Any:
        assert self._processes is not None
        return vllm_frontend.async_client(config, address=self._processes.address(key), key=key)

    def _open_if_usable(self, alias: str, residency: Residency, *, required: bool) -> None:
        """Its tokenizer is read here, and its loggers are made, which may go wrong as its arguments may."""
        try:
            self._open(alias, residency)
        except Exception as error:
            if required:
                raise
            self._catalog.set_aside(alias, error)

    async def check_model(
        self, alias: str, engine_args: Any, *, quant_config: QuantConfig = UNSET, memory: int | None = None
    ) -> None:
        """Raises ValueError or ConfigError where no model of these arguments could be added (under a free name)."""
        budgets = self._residency.budgets
        await asyncio.to_thread(self._catalog.validated, alias, engine_args, budgets, quant_config, memory)

    def require_slots(self, *, coming: int, going: Collection[str] = ()) -> None:
        """Raises RuntimeError where the core has no room for so many more models when some of the present ones go."""
        self._slots.require(coming - sum(alias in self._frontends for alias in going))

    async def add_model(
        self, alias: str, engine_args: Any, *, quant_config: QuantConfig = UNSET, memory: int | None = None
    ) -> ContextInfo:
        """Add a model to the running engine; no other context is touched, and it is loaded by the first switch to it.

        Raises ValueError where the name is taken or the arguments are wrong, ConfigError where the model can't live
        in this engine, RuntimeError before ``initialize`` and where the engine has no slot left.
        """
        residency, catalog = self._residency, self._catalog
        made = await asyncio.to_thread(catalog.validated, alias, engine_args, residency.budgets, quant_config, memory)
        catalog.add(alias, engine_args, made, quant_config)
        if memory is not None:
            catalog.memory[alias] = memory
        try:
            catalog.divide(residency.budgets, [alias])
            catalog.usable(alias)
            self._open(alias, residency)
        except BaseException:
            catalog.remove(alias)
            raise
        return self.info(alias)

    def require_removable(self, alias: str) -> None:
        """Raises ValueError for an unknown name, RuntimeError where it is active or has unfinished requests."""
        self._catalog.require(alias)
        self._changes.require_removable(alias)

    async def remove_model(self, alias: str) -> None:
        """Take a model out of the running engine and let go of all it has; no other context is touched.

        Raises as ``require_removable`` does.
        """
        self.require_removable(alias)
        if alias in self._frontends:
            await self._performer.make(partial(self._changes.remove, alias), f"remove {alias}")
            self._changes.require_removable(alias)
            self._residency.remove(alias)
            self._slots.leave(alias, self._frontends.pop(alias).retire())
        self._catalog.remove(alias)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop every process and close every frontend. May be called twice."""
        self.close()(timeout)

    def close(self) -> Callable[[float | None], None]:
        """Close every frontend, in their event loop. What is returned stops every process, in any thread."""
        processes, self._processes = self._processes, None
        performers, self._performers = self._performers, None
        if performers is not None:
            performers.cancel()
        if self._replies is not None:
            self._replies.close()
        for frontend in self._frontends.values():
            frontend.close()
        self._frontends.clear()
        self._slots.close()
        self._started = self._death = self._replies = None
        self._catalog.forget()
        return processes.stop if processes is not None else lambda _timeout: None

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
        cause: BaseException = await self._death.wait()
        return cause

    async def describe(self) -> dict[str, Any]:
        """What the core says of its contexts: which is active, and for each its key, requests and bytes."""
        answer: dict[str, Any] = await self._frontend(None).ask("describe")
        return answer

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
        begin = self._switching(alias, mode, drain_timeout, leftover, observe)
        report: SwitchReport = await self._performer.make(begin, f"switch to {alias}")
        return report

    async def preload(self, alias: str, *, stall: bool = True) -> ContextInfo:
        """Load a model, or bring it back, while another one serves. What is least needed goes for it.

        What can be done while the active model's steps run is done first: a parked model is brought back beside
        them; the weights of one that was dropped are read from the disk into memory, and it is loaded in slices
        between the steps, where the platform and the model allow it. ``stall=False`` ends there.

        Raises as ``switch`` does; SwitchFailed where there is no room beside the active model.
        """
        self._frontend(alias)
        arrived = await self._warm(alias)
        if stall or (arrived and self._residency.returns(alias)):
            await self._performer.make(partial(self._changes.preload, alias), f"preload {alias}")
        return self.info(alias)

    async def _warm(self, alias: str) -> bool:
        """Whether a model was brought in beside the active one's steps; other changes may come between."""
        if self._residency.tier(alias) is Tier.DROPPED:
            await self._read_ahead(alias)
            if not self._loads_aside(self._catalog, alias):
                return False
        arrived: bool = await self._performer.finish(self._bring_in(alias), f"{alias} is brought in")
        return arrived

    async def _bring_in(self, alias: str) -> bool:
        """To be finished also where nobody waits: of a model that does not arrive it must be known."""
        performer, residency = self._performer, self._residency
        begin = partial(self._changes.begin_return, alias)
        pending: bool = await performer.make(begin, f"bring back {alias}")
        if pending:
            try:
                await performer.arrival(alias)
            except Exception:
                residency.stays(alias)
                raise
        return pending

    @staticmethod
    def _loads_aside(catalog: Catalog, alias: str) -> bool:
        from service.platforms import current

        return current().slices and in_pieces(catalog.configs[alias])

    async def _read_ahead(self, alias: str) -> None:
        """Raises SwitchFailed where the disk takes longer than a load may. What can't be read, the load will tell."""
        limit_s = self._performer.timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                model = self._catalog.configs[alias].model_config
                await asyncio.to_thread(read_ahead, model.model, model.revision)
        except OSError as error:  # a TimeoutError is one, which a network's disk raises, too
            if limit.expired():
                message = f"Failed to preload {alias}: its weights were not read within {limit_s:g} s"
                raise SwitchFailed(message) from None
            log.warning("engine.not_read_ahead", alias=alias, reason=str(error))

    async def _put_to_sleep(self, frontend: Frontend, level: int, mode: str) -> None:
        """To its end also where nobody waits: the core goes on, and of a model that sleeps it must be known."""

        async def sleep() -> None:
            if level:
                await frontend.end_waiting_streams(HandedBack(f"{frontend.alias} went to sleep"))
            await frontend.llm.sleep(level, mode)
            self._residency.slept(frontend.alias, level)

        await self._performer.finish(sleep(), f"{frontend.alias} goes to sleep")

    async def _wake(self, frontend: Frontend, tags: list[str] | None) -> None:
        """One that is only paused goes on while a change is under way, which may wait for its requests."""
        if frontend.alias not in self._residency.asleep():
            if await frontend.wake(tags):
                self._residency.woke(frontend.alias)
            return
        change = partial(self._changes.wake, frontend.alias, None if tags is None else tuple(tags))
        await self._performer.make(change, f"wake {frontend.alias}")

    @property
    def steps(self) -> int:
        """Steps of all models that were heard of, those of which no token came among them: see ``Steps``."""
        return sum(frontend.steps.count for frontend in self._frontends.values())

    def expect(self, order: Sequence[str]) -> None:
        """Who will be switched to next, soonest first: where room is made for one, the others are spared by it."""
        self._residency.expect(order)

    async def park(self, alias: str) -> ContextInfo:
        """Give a model's memory back; its requests stay. Raises SwitchFailed for the active one."""
        self._frontend(alias)
        await self._performer.make(partial(self._changes.lower, alias, Tier.PARKED), f"park {alias}")
        return self.info(alias)

    async def drop(self, alias: str) -> ContextInfo:
        """Let go of a model. Raises SwitchFailed for the active one, and where it has unfinished requests."""
        self._frontend(alias)
        await self._performer.make(partial(self._changes.lower, alias, Tier.DROPPED), f"drop {alias}")
        return self.info(alias)

    async def pin(self, alias: str, pinned: bool = True) -> ContextInfo:
        """Keep a model resident whatever the budgets ask, or let it go again. One that is away is not fetched."""
        self._frontend(alias)
        self._residency.pin(alias, pinned)
        return self.info(alias)
