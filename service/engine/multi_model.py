"""MultiModelEngine: many models on one vLLM engine, each with its AsyncLLM, one of them running."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from schemas.contexts import ContextInfo, Leftover, SwitchMode, SwitchPhase, SwitchReport, Tier
from service.engine.frontends import Frontend
from service.engine.launch import EngineProcesses
from service.errors import SwitchFailed, nearest
from service.ports import Observer, Transition

_DRAIN_POLL_S = 0.005


class MultiModelEngine:
    """Many models in one engine process, switched in under a millisecond.

    ``model_configs`` maps aliases to AsyncEngineArgs; ``model_quant_configs`` maps aliases to their QUANT_CONFIG
    (None clears it; an alias that is not in it keeps the environment's). Code written for vllm-gaudi's
    MultiModelAsyncLLM runs with only the import changed.
    """

    def __init__(
        self,
        model_configs: dict[str, Any],
        usage_context: Any = None,
        disable_log_stats: bool = False,
        enable_log_requests: bool = False,
        model_quant_configs: dict[str, str | None] | None = None,
    ) -> None:
        from vllm.usage.usage_lib import UsageContext

        if not model_configs:
            raise ValueError("model_configs cannot be empty")
        self.model_configs = dict(model_configs)
        self.usage_context = usage_context or UsageContext.ENGINE_CONTEXT
        self.disable_log_stats = disable_log_stats
        self.enable_log_requests = enable_log_requests
        self.model_quant_configs = dict(model_quant_configs or {})
        self._configs: dict[str, Any] = {}
        self._broken: dict[str, Exception] = {}
        self._frontends: dict[str, Frontend] = {}
        self._infos: dict[str, ContextInfo] = {}
        self._processes: EngineProcesses | None = None
        self._worker_pids: tuple[int, ...] = ()
        self._memory = 0
        self._switching = asyncio.Lock()
        self._active: str | None = None
        self._target: str | None = None
        self._death: asyncio.Future[BaseException] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def initialize(self, model_name: str) -> None:
        """Start the engine with ``model_name`` loaded and active; the other models get their frontends.

        Raises ValueError for an unknown name, RuntimeError where it was initialized before or does not come up.
        """
        self._require_known(model_name)
        if self._processes is not None:
            raise RuntimeError("Engine already initialized. Use switch_model() instead.")
        order = [model_name, *(alias for alias in self.model_configs if alias != model_name)]
        self._death = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(self._configure, model_name)
        if model_name in self._broken:
            raise self._broken[model_name]
        starting = asyncio.to_thread(
            EngineProcesses.start,
            self._configs[model_name],
            models=len(order),
            log_stats=not self.disable_log_stats,
        )
        others = [asyncio.to_thread(self._configure_all, order[1:])]
        processes, *_ = await asyncio.gather(starting, *others)
        self._processes = processes
        for key, alias in enumerate(order):
            if alias in self._configs:
                self._open(alias, key)
        attached = await self._frontends[model_name].ask("attach")
        self._worker_pids = tuple(attached["pids"])
        self._loaded(model_name, attached)
        self._active = model_name
        processes.watch(self._report_death)

    def _configure_all(self, aliases: list[str]) -> None:
        for alias in aliases:
            self._configure(alias)

    def _configure(self, alias: str) -> None:
        """Validate one model's arguments; an alias that is wrong must not keep the others from serving."""
        if alias in self._configs:
            return
        try:
            self._configs[alias] = self.model_configs[alias].create_engine_config(self.usage_context)
        except Exception as error:  # reported to whoever wants this model
            self._broken[alias] = error

    def _open(self, alias: str, key: int) -> None:
        assert self._processes is not None
        self._frontends[alias] = Frontend(
            alias,
            self._configs[alias],
            key=key,
            processes=self._processes,
            log_stats=not self.disable_log_stats,
            log_requests=self.enable_log_requests,
        )
        self._infos[alias] = ContextInfo(alias=alias, tier=Tier.DROPPED)

    def _loaded(self, alias: str, answer: dict[str, Any]) -> None:
        self._frontends[alias].adopt(answer["settled"])
        sizes = answer["sizes"]
        self._infos[alias] = self._infos[alias].model_copy(
            update={"tier": Tier.RESIDENT, "weights_bytes": sizes["weights"], "kv_bytes": sizes["kv"]}
        )

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop every process and close every frontend. May be called twice."""
        processes, self._processes = self._processes, None
        for frontend in self._frontends.values():
            frontend.close()
        self._frontends.clear()
        self._active = None
        if processes is not None:
            processes.stop(timeout)

    async def __aenter__(self) -> "MultiModelEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
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
        return tuple(
            info.model_copy(update={"active": alias == self._active, "unfinished": len(self._frontends[alias].running)})
            for alias, info in self._infos.items()
        )

    def get_vllm_config(self, model_name: str) -> Any:
        """The VllmConfig of a model. Raises ValueError for an unknown name."""
        self._require_known(model_name)
        self._configure(model_name)
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

    def tokens(self, request_id: str, model: str | None = None) -> int:
        """How many tokens a running request (by the id it was given) has generated so far, over all its samples."""
        processor = self._frontend(model).llm.output_processor
        states = [processor.request_states.get(name) for name in processor.external_req_ids.get(request_id, ())]
        return sum(len(state.detokenizer.output_token_ids) for state in states if state and state.detokenizer)

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

    # --- requests -------------------------------------------------------------------------------------------------

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, model: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """AsyncLLM.generate on ``model`` (default: the active one, decided now)."""
        return self.context(model).generate(prompt, sampling_params, request_id, **kwargs)

    def encode(
        self, prompt: Any, pooling_params: Any, request_id: str, *, model: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """AsyncLLM.encode on ``model`` (default: the active one, decided now)."""
        return self.context(model).encode(prompt, pooling_params, request_id, **kwargs)

    async def abort(self, request_id: str | list[str], internal: bool = False) -> None:
        """End requests, of whichever models they are, frozen or not. Unknown ids are ignored."""
        for frontend in tuple(self._frontends.values()):
            await frontend.llm.abort(request_id, internal=internal)

    # --- switching ------------------------------------------------------------------------------------------------

    async def switch_model(self, model_name: str, drain_timeout: float = 60) -> dict[str, Any]:
        """MultiModelAsyncLLM's switch: drain, abort what is left, and answer with its fields.

        Raises ValueError for an unknown name, RuntimeError("Failed to switch model from X to Y: ...").
        """
        report = await self.switch(model_name, mode=SwitchMode.DRAIN, drain_timeout=drain_timeout)
        if not report.switched:
            return {"switched": False, "drain_s": 0.0, "reconfigure_s": 0.0, "switch_s": 0.0}
        names = (
            "switched",
            "drain_s",
            "reconfigure_s",
            "switch_s",
            "memory_before_mb",
            "memory_after_unload_mb",
            "freed_memory_mb",
            "stash_memory_after_mb",
        )
        return {name: getattr(report, name) for name in names}

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

        Raises ValueError for an unknown name, RuntimeError before ``initialize``, SwitchFailed (a RuntimeError;
        the previous model is active and serves), EngineDeadError.
        """
        if self._active is None:
            raise RuntimeError("Engine not initialized. Call initialize() first.")
        self._require_known(alias)
        asked = time.perf_counter()
        async with self._switching:
            return await self._switch(alias, mode, drain_timeout, leftover, _teller(observe), asked)

    async def _switch(
        self,
        alias: str,
        mode: SwitchMode,
        drain_timeout: float,
        leftover: Leftover,
        tell: Callable[[SwitchPhase, SwitchReport], None],
        asked: float,
    ) -> SwitchReport:
        left = self._active
        assert left is not None
        assert self._processes is not None
        report = SwitchReport(
            from_model=left,
            to_model=alias,
            mode=mode,
            tier_found=self._infos[alias].tier if alias in self._infos else Tier.DROPPED,
            core_pid=self.core_pid,
            worker_pids=self.worker_pids,
            memory_before_mb=self._memory / (1 << 20),
        )
        tell(SwitchPhase.ACCEPTED, report)
        if alias == left:
            report = report.model_copy(update={"switched": False, "ms": _ms_since(asked)})
            tell(SwitchPhase.NO_OP, report)
            return report
        self._target = alias
        try:
            drained = time.perf_counter()
            aborted = await self._settle(
                left, mode, drain_timeout, leftover, lambda: tell(SwitchPhase.DRAINING, report)
            )
            began = time.perf_counter()
            tell(SwitchPhase.SWITCHING, report)
            loaded = await self._ensure_loaded(alias)
            answer = await self._frontends[left].ask("activate", self._frontends[alias].key)
        except Exception as error:
            failed = report.model_copy(update={"switched": False, "ms": _ms_since(asked)})
            tell(SwitchPhase.FAILED, failed)
            raise SwitchFailed(f"Failed to switch model from {left} to {alias}: {error}") from error
        finally:
            self._target = None
        self._active = alias
        self._memory = sum(answer["memory"])
        ended = time.perf_counter()
        report = report.model_copy(
            update={
                "ms": (ended - asked) * 1e3,
                "stall_ms": answer["stall_ms"] + loaded.get("stall_ms", 0.0),
                "phases_ms": {
                    "wait": (drained - asked) * 1e3,
                    "drain": (began - drained) * 1e3,
                    "load": loaded.get("stall_ms", 0.0),
                    "quiesce": answer.get("quiesce_ms", 0.0),
                    "swap": answer["stall_ms"] - answer.get("quiesce_ms", 0.0),
                },
                "kept": len(self._frontends[left].running),
                "aborted": aborted,
                "drain_s": began - drained,
                "reconfigure_s": ended - began,
                "switch_s": ended - asked,
                "memory_after_mb": self._memory / (1 << 20),
                "memory_after_unload_mb": self._memory / (1 << 20),
            }
        )
        tell(SwitchPhase.COMPLETED, report)
        return report

    async def _settle(
        self, left: str, mode: SwitchMode, drain_timeout: float, leftover: Leftover, draining: Callable[[], None]
    ) -> int:
        """Do what the mode asks with the requests of the model being left. Answers how many were aborted."""
        frontend = self._frontends[left]
        asked_for = frontend.running
        if mode is SwitchMode.KEEP or not asked_for:
            return 0
        if mode is SwitchMode.DRAIN:
            draining()
            deadline = time.perf_counter() + drain_timeout
            while asked_for & frontend.running and time.perf_counter() < deadline:
                await asyncio.sleep(_DRAIN_POLL_S)
            if leftover is Leftover.KEEP:
                return 0
        left_over = asked_for & frontend.running
        await frontend.llm.abort(sorted(left_over), internal=True)
        return len(left_over)

    async def _ensure_loaded(self, alias: str) -> dict[str, Any]:
        if alias in self._broken:
            raise self._broken[alias]
        if self._infos[alias].tier is Tier.RESIDENT:
            return {}
        assert self._processes is not None
        frontend = self._frontends[alias]
        sealed = await asyncio.to_thread(self._processes.seal, (frontend.config, self._environment(alias)))
        answer: dict[str, Any] = await frontend.ask("load", frontend.key, sealed)
        self._loaded(alias, answer)
        return answer

    def _environment(self, alias: str) -> dict[str, str | None]:
        """What loading a model wants in the workers' environment."""
        return {"QUANT_CONFIG": self.model_quant_configs[alias]} if alias in self.model_quant_configs else {}


def _teller(observe: Observer | None) -> Callable[[SwitchPhase, SwitchReport], None]:
    def tell(phase: SwitchPhase, report: SwitchReport) -> None:
        if observe is not None:
            observe(Transition(phase=phase, at=time.time(), report=report))

    return tell


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
