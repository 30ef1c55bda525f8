"""The engine as the worker sees it: ``service.ports.Engine`` on a MultiModelEngine and vLLM's own handlers."""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import structlog

from schemas.contexts import ContextInfo, Leftover, SwitchMode, SwitchReport, Tier
from schemas.control import Cache
from schemas.errors import nearest
from schemas.progress import Progress
from service.engine.answering import arguments
from service.engine.answering.adapters import Adapters, resolved
from service.engine.answering.answers import Answers, aborted, session_lost
from service.engine.answering.constraints import Constraints
from service.engine.answering.logs import import_hosting, vllm_logging
from service.engine.answering.runs import Run
from service.engine.answering.sessions import Sessions
from service.engine.frontend.multi_model import MultiModelEngine
from service.engine.processes.trial import Limits
from service.engine.versions import vllm_frontend
from service.errors import (
    ConfigError,
    EngineDied,
    EngineRefused,
    GearshiftError,
    HandedBack,
    LoraRefused,
    NotContinued,
    SessionLost,
    UnknownModel,
)
from service.models_file import UNSET, ModelsFile, ModelSpec, Scheduling
from service.platforms import current
from service.ports import Answer, Call, ChunkSink, Inquiry, Observer, Reply, Turn
from service.settings import EngineSettings, LogSettings
from service.telemetry import traces_url

log = structlog.get_logger(__name__)
OnProgress = Callable[[str], None]
_REDIRECTS = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"


class VllmEngine:
    """Many models on one vLLM engine. Make one with ``open``; it is an asynchronous context manager."""

    def __init__(
        self, engine: MultiModelEngine, models: ModelsFile, settings: EngineSettings, defaults: Mapping[str, Any]
    ) -> None:
        self.multi = engine
        self._defaults = defaults
        """Arguments of every model that does not set them itself."""
        self._models = models
        self._settings = settings
        self._answers: dict[str, asyncio.Task[Answers]] = {}
        self._runs: dict[str, tuple[Call, Run, asyncio.Future[None]]] = {}
        self._sessions = Sessions(settings.session_idle_s)
        self._constraints = Constraints(Limits(settings.constraint_cpu_s, settings.constraint_memory_bytes))
        self._adapters = Adapters(settings.lora_root)
        self._statistics: asyncio.Task[None] | None = None
        self._document: Mapping[str, Any] = {"paths": {}}
        for alias, spec in models.models.items():
            self._adapters.open(alias, spec.scheduling.loras)

    @classmethod
    async def open(
        cls,
        models: ModelsFile,
        settings: EngineSettings,
        on_progress: OnProgress = lambda _: None,
        *,
        log: LogSettings | None = None,
    ) -> Self:
        """Start the engine in the default model (half a minute), then load what is to be preloaded.

        ``on_progress`` is told each phase in words; with ``log``, vLLM's processes log as we do.

        Raises ConfigError for arguments that vLLM refuses, EngineDied where the engine does not come up; nothing is
        left running then.
        """
        _check_loras(models, settings)
        with vllm_logging(log):
            on_progress("importing vLLM")
            import_hosting()
            os.environ.setdefault(_REDIRECTS, "0")  # else an allowed domain can send us anywhere, inwards too
            defaults = _defaults(log)
            chosen = await asyncio.to_thread(arguments.model_arguments, models, defaults)
            multi = MultiModelEngine(
                {alias: each.engine for alias, each in chosen.items()},
                model_quant_configs=_quant_configs(models),
                device_memory_bytes=settings.device_memory_bytes,
                host_memory_bytes=settings.host_memory_bytes,
                lend_kv=settings.lend_kv,
                model_memory=_memory(models),
                switch_timeout_s=settings.load_timeout_s,
                stuck_timeout_s=settings.stuck_timeout_s,
            )
            engine = cls(multi, models, settings, defaults)
            try:
                await engine._start(chosen, on_progress)
            except BaseException:
                await engine.close()
                raise
        return engine

    async def _start(self, chosen: Mapping[str, arguments.Arguments], on_progress: OnProgress) -> None:
        from service.platforms import current

        default, load_s = self._models.default_model, self._settings.load_timeout_s
        limit_s = load_s + current().warm_up_s
        on_progress(f"starting the engine with {default}")
        try:
            async with asyncio.timeout(limit_s):
                await self.multi.initialize(default)
        except TimeoutError:
            raise EngineDied(f"{default} did not load within {limit_s:g} s: load_timeout_s is {load_s:g}") from None
        except (ValueError, OSError) as error:
            raise ConfigError(f"{self._models.where(default)}: {error}") from error
        except RuntimeError as error:
            raise EngineDied(f"the engine did not start: {error}") from error
        for alias, each in chosen.items():
            self._prepare(alias, each)
        self._statistics = asyncio.create_task(self._log_statistics(), name="statistics")
        on_progress(f"preparing the answers of {default}")
        await self._answers[default]
        for alias, spec in self._models.models.items():
            try:
                if spec.scheduling.preload and alias != default:
                    on_progress(f"loading {alias}")
                    await self.preload(alias)
                if spec.scheduling.pin:
                    await self.pin(alias, True)
            except EngineDied:
                raise
            except GearshiftError as error:  # the others serve, and whoever asks for it is told so
                on_progress(f"{alias} can't be loaded: {error}")
                log.warning("engine.not_preloaded", alias=alias, reason=str(error))

    async def _log_statistics(self) -> None:
        """As vLLM's server does while it serves: each model's line, and what loggers that are plugins do then."""
        while True:
            await asyncio.sleep(vllm_frontend.log_stats_interval_s())
            for alias in self._chosen(None):
                with structlog.contextvars.bound_contextvars(alias=alias):
                    try:
                        await self.multi.do_log_stats(model=alias)
                    except Exception as error:  # of a plugin, or of a model that a reload removes
                        log.warning("engine.statistics_not_logged", reason=f"{type(error).__name__}: {error}")

    def _prepare(self, alias: str, chosen: arguments.Arguments) -> None:
        """Make an alias' handlers as soon as its model is loaded for the first time."""

        async def prepare() -> Answers:
            call_workers = partial(self.multi.collective_rpc, model=alias)
            llm = self.multi.context(alias)
            constraints = self._constraints.of(alias, llm.vllm_config)
            answers = await Answers.open(llm, chosen.server, call_workers, constraints)
            await self._adapters.restore(alias, answers)
            return answers

        self._answers[alias] = task = asyncio.create_task(prepare(), name=f"answers-{alias}")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def aliases(self) -> tuple[str, ...]:
        return tuple(self._models.models)

    @property
    def active(self) -> str:
        return self.multi.active

    def registries(self) -> Mapping[str, Any]:
        """vLLM's own metrics, a Prometheus registry per alias."""
        return self.multi.registries

    def contexts(self) -> tuple[ContextInfo, ...]:
        return tuple(info.model_copy(update={"loras": self.loras(info.alias)}) for info in self.multi.contexts())

    def tiers(self) -> Mapping[str, Tier]:
        return self.multi.tiers()

    def asleep(self) -> Collection[str]:
        return self.multi.asleep()

    @property
    def steps(self) -> int:
        return self.multi.steps

    @property
    def device_bytes(self) -> int | None:
        return self.multi.device_bytes

    # --- answering ------------------------------------------------------------------------------------------------

    async def answer(self, call: Call, on_chunk: ChunkSink | None = None, progress: Progress | None = None) -> Answer:
        """Run a call to its end; one for a model that was never loaded waits until it is."""
        if call.alias not in self._answers:
            return self._unknown(call.alias)
        if call.id in self._runs:
            raise NotContinued("the run that said it has not ended yet")
        if call.turn is not None:
            return await self._answer_part(call, call.turn, on_chunk, progress)
        run = Run(call.id, priority=call.priority, tenant=call.tenant, begun=progress, live=progress is None)
        run.events = run.told = 0 if progress is None else progress.events
        return await self._run(call, run, on_chunk)

    async def _run(self, call: Call, run: Run, on_chunk: ChunkSink | None) -> Answer:
        ended = asyncio.get_running_loop().create_future()
        self._runs[call.id] = (call, run, ended)
        try:
            answers = await self._ready(call.alias, ended)
            return answers if isinstance(answers, Answer) else await answers.answer(call, run, on_chunk)
        except HandedBack as back:
            raise HandedBack(str(back), run.progress()) from back
        finally:
            del self._runs[call.id]

    async def _answer_part(
        self, call: Call, turn: Turn, on_chunk: ChunkSink | None, progress: Progress | None
    ) -> Answer:
        """A part of a session. Here it is never tried again: what the session has taken in, it can't take in twice.

        One that was handed back is: its session ends here, and goes on from where it was before that part.
        """
        completed = False
        run = Run(call.id, priority=call.priority, tenant=call.tenant, turn=turn)
        try:
            run.session = self._sessions.enter(call.alias, turn, progress)
            answer = await self._run(call, run, on_chunk)
            completed = answer.status == 200 and not answer.aborted
            left = run.session.progress(call.id) if completed and not turn.final else None
            return replace(answer, retriable=False, session=left or Progress(call=call.id, engine=""))
        except SessionLost as lost:
            return session_lost(str(lost))
        finally:
            if run.session is not None:
                await run.session.leave(turn, completed=completed, idle_s=self._sessions.idle_s)

    async def _ready(self, alias: str, ended: asyncio.Future[None]) -> Answers | Answer:
        """An alias' handlers, as soon as there are any; or the answer, if there never will be."""
        making = self._answers[alias]
        if not making.done():
            await asyncio.wait((making, ended), return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            return aborted()
        try:
            return making.result()
        except Exception as error:
            if vllm_frontend.is_engine_dead(error):
                raise EngineDied(str(error)) from error
            message = f"The model `{alias}` can't be served: {error}"
            return Answer(
                500, {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
            )

    def _unknown(self, alias: str) -> Answer:
        message = f"The model `{alias}` does not exist. Valid aliases: {', '.join(self.aliases)}."
        return Answer(404, {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}})

    async def inquire(self, alias: str, inquiry: Inquiry) -> Reply:
        """Ask a model's server of its inside."""
        making = self._answers.get(alias)  # gone while a reload removes it
        if making is None:
            raise UnknownModel(f"unknown model {alias!r}{nearest(alias, self._answers)}")
        if not making.done():
            return Reply(404, "text/plain", f"The model `{alias}` was not loaded yet".encode())
        return await (await making).inquire(inquiry)

    async def openapi(self) -> Mapping[str, Any]:
        """What all models that are loaded can be asked, as one document: they differ in which endpoints there are.

        Making it takes a second or so, and it is kept while there are the same endpoints.
        """
        from fastapi.openapi.utils import get_openapi

        made = [each.result() for each in self._answers.values() if each.done() and each.exception() is None]
        routes = {path: route for answers in reversed(made) for path, route in answers.endpoints.items()}
        if self._document["paths"].keys() != routes.keys():
            ordered = [routes[path] for path in sorted(routes)]
            self._document = await asyncio.to_thread(get_openapi, title="", version="", routes=ordered)
        return self._document

    async def abort(self, call_id: str) -> None:
        if call_id in self._runs:
            _, run, ended = self._runs[call_id]
            if not ended.done():
                ended.set_result(None)
            await run.abort()

    def progress(self, call_id: str) -> Progress | None:
        return self._runs[call_id][1].progress() if call_id in self._runs else None

    def tokens(self, call_id: str) -> int:
        return self._runs[call_id][1].tokens() if call_id in self._runs else 0

    # --- contexts -------------------------------------------------------------------------------------------------

    async def switch(
        self,
        alias: str,
        *,
        mode: SwitchMode = SwitchMode.KEEP,
        drain_timeout: float = 60.0,
        leftover: Leftover = Leftover.ABORT,
        observe: Observer | None = None,
    ) -> SwitchReport:
        self._require_known(alias)
        report: SwitchReport = await self._asked(
            self.multi.switch(alias, mode=mode, drain_timeout=drain_timeout, leftover=leftover, observe=observe)
        )
        if report.tier_found is Tier.DROPPED or self._adapters.behind(alias):
            await self._load_adapters(alias)
        return report

    @property
    def brings_beside(self) -> frozenset[Tier]:
        return frozenset({Tier.PARKED, Tier.DROPPED} if current().slices else {Tier.PARKED})

    def expect(self, order: Sequence[str]) -> None:
        self.multi.expect(order)

    async def preload(self, alias: str, *, stall: bool = True) -> ContextInfo:
        self._require_known(alias)
        away = {info.alias for info in self.multi.contexts() if info.tier is Tier.DROPPED}
        info: ContextInfo = await self._asked(self.multi.preload(alias, stall=stall))
        if alias in away or self._adapters.behind(alias):
            await self._load_adapters(alias)
        return info

    async def _load_adapters(self, alias: str) -> None:
        """Give a model that is back its adapters. At its first load that is part of its handlers."""
        await self._asked(self._adapters.restore(alias, self._there(alias)))

    async def park(self, alias: str) -> ContextInfo:
        self._require_known(alias)
        return await self._asked(self.multi.park(alias))

    async def drop(self, alias: str) -> ContextInfo:
        self._require_known(alias)
        return await self._asked(self.multi.drop(alias))

    async def pin(self, alias: str, pinned: bool) -> ContextInfo:
        self._require_known(alias)
        return await self._asked(self.multi.pin(alias, pinned))

    async def sleep(self, level: int, alias: str | None = None) -> tuple[ContextInfo, ...]:
        """Level 1 keeps unfinished requests for ``wake``; level 2 ends them, for their model is gone."""
        mode = "keep" if level == 1 else "abort"
        await self._asked(self.multi.sleep(level, mode, model=self._known(alias)))
        return self.contexts()

    async def wake(self, alias: str | None = None) -> tuple[ContextInfo, ...]:
        await self._asked(self.multi.wake_up(model=self._known(alias)))
        for each in self._chosen(alias):
            if self._adapters.behind(each):
                await self._load_adapters(each)
        return self.contexts()

    async def reload(self, models: ModelsFile) -> Mapping[str, str]:
        """Take a new models.yaml: add, remove and change models of the running engine, and how contexts are held.

        A changed model, or one whose checkpoint was replaced, is removed and added: it is loaded anew by the first
        switch to it. Raises ConfigError and
        changes nothing where the active model, or one with unfinished requests, would have to go, or an alias can't
        live in this engine.
        """
        _check_loras(models, self._settings)
        before, after = self._models.models, models.models
        words = {alias: _change(before.get(alias), after.get(alias)) for alias in {**before, **after}}
        try:
            words |= {alias: "changed" for alias in before.keys() & after.keys() if self.multi.replaced(alias)}
        except OSError as error:
            raise ConfigError(f"{models.path}: a checkpoint can't be looked at: {error}") from error
        going = [alias for alias, word in words.items() if word in {"removed", "changed"}]
        coming = {alias: after[alias] for alias, word in words.items() if word in {"added", "changed"}}
        chosen = await asyncio.to_thread(arguments.model_arguments, replace(models, models=coming), self._defaults)
        quant_configs = _quant_configs(models)
        for alias in going:
            self._require_removable(models, alias)
        for alias, each in chosen.items():
            quant_config, memory = quant_configs.get(alias, UNSET), after[alias].scheduling.memory
            try:
                await self.multi.check_model(alias, each.engine, quant_config=quant_config, memory=memory)
            except Exception as error:  # of whatever kind: vLLM's checks import what a model asks for
                raise ConfigError(f"{models.where(alias)}: {error}") from error
        try:
            self.multi.require_slots(coming=len(coming), going=going)
        except RuntimeError as error:
            raise ConfigError(f"{models.path}: {error}") from error
        for alias in going:
            await self._remove(models, alias)
        for alias, each in chosen.items():
            await self._add(models, alias, each)
        self._models = models
        for alias, word in words.items():
            if word in {"kept", "reheld"}:
                await self._rehold(alias, before[alias].scheduling, after[alias].scheduling)
        return {alias: "changed" if word == "reheld" else word for alias, word in words.items()}

    def _require_removable(self, models: ModelsFile, alias: str) -> None:
        calls = sum(call.alias == alias for call, _, _ in self._runs.values())
        if calls:
            raise ConfigError(f"{models.where(alias)}: can't be removed or changed: {calls} calls are unfinished")
        try:
            self.multi.require_removable(alias)
        except RuntimeError as error:
            raise ConfigError(f"{models.where(alias)}: {error}") from error

    async def _remove(self, models: ModelsFile, alias: str) -> None:
        self._require_removable(models, alias)
        making = self._answers.pop(alias)
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await self._asked(self.multi.remove_model(alias))
        self._adapters.close(alias)
        self._constraints.remove(alias)
        left = {name: spec for name, spec in self._models.models.items() if name != alias}
        self._models = replace(self._models, models=left)

    async def _add(self, models: ModelsFile, alias: str, chosen: arguments.Arguments) -> None:
        spec = models.models[alias]
        quant_config, memory = _quant_configs(models).get(alias, UNSET), spec.scheduling.memory
        await self._asked(self.multi.add_model(alias, chosen.engine, quant_config=quant_config, memory=memory))
        self._adapters.open(alias, spec.scheduling.loras)
        self._prepare(alias, chosen)
        self._models = replace(self._models, models={**self._models.models, alias: spec})
        if spec.scheduling.pin:
            await self.pin(alias, True)

    async def _rehold(self, alias: str, before: Scheduling, after: Scheduling) -> None:
        if before.pin != after.pin:
            await self.pin(alias, after.pin)
        for name in {**before.loras, **after.loras}:
            if before.loras.get(name) == after.loras.get(name):
                continue  # what events have done since then stays
            if name in self.loras(alias):
                await self.remove_lora(alias, name)
            if name in after.loras:
                await self.add_lora(alias, name, after.loras[name])

    async def _asked(self, request: Any) -> Any:
        """Await something asked of the engine. Raises EngineDied, and EngineRefused for what else vLLM raises."""
        try:
            return await request
        except GearshiftError as error:
            if error.__cause__ is not None and vllm_frontend.is_engine_dead(error.__cause__):
                raise EngineDied(str(error.__cause__)) from error
            raise
        except Exception as error:
            if vllm_frontend.is_engine_dead(error):
                raise EngineDied(str(error)) from error
            raise EngineRefused(f"the engine: {error}" if str(error) else f"the engine: {error!r}") from error

    def _known(self, alias: str | None) -> str | None:
        if alias is not None:
            self._require_known(alias)
        return alias

    def _require_known(self, alias: str) -> None:
        if alias not in self._models.models:
            raise UnknownModel(f"unknown model {alias!r}{nearest(alias, self._models.models)}")

    # --- adapters -------------------------------------------------------------------------------------------------

    async def add_lora(self, alias: str, name: str, path: str) -> None:
        """Load an adapter; for a model that is away, as soon as it is back.

        Raises UnknownModel, LoraRefused (no adapter there, not below ``lora_root``, the model takes none).
        """
        self._require_known(alias)

        async def add() -> None:
            if not any(vllm_frontend.lora_room(self.multi.context(alias).vllm_config)):
                raise LoraRefused(f"{alias} takes no adapters: set enable_lora among its arguments")
            await self._adapters.add(alias, name, path, self._there(alias))

        await self._asked(add())

    async def remove_lora(self, alias: str, name: str) -> None:
        self._require_known(alias)
        await self._asked(self._adapters.remove(alias, name, self._there(alias)))

    async def pin_lora(self, alias: str, name: str) -> None:
        """Never drop an adapter from the workers' memory, whatever others are used; raises LoraRefused without room."""
        self._require_known(alias)

        async def pin() -> None:
            room = vllm_frontend.lora_room(self.multi.context(alias).vllm_config)
            await self._adapters.pin(alias, name, self._there(alias), room)

        await self._asked(pin())

    def loras(self, alias: str) -> tuple[str, ...]:
        self._require_known(alias)
        return self._adapters.of(alias)

    def _there(self, alias: str) -> Answers | None:
        """Its handlers; None where they failed or its weights are away: what it is to have, it gets once it is back."""
        making = self._answers.get(alias)  # gone while a reload removes it
        if making is None or not making.done() or making.cancelled() or making.exception() is not None:
            return None
        there = self.tiers().get(alias) is Tier.RESIDENT and alias not in self.asleep()
        return making.result() if there else None

    def _is_loaded(self, alias: str) -> bool:
        return alias in self._chosen(alias)

    # --- the rest -------------------------------------------------------------------------------------------------

    async def reset_caches(
        self,
        alias: str | None = None,
        cache: Cache | None = None,
        *,
        running: bool = False,
        external: bool = False,
    ) -> bool:
        self._known(alias)
        done = True
        for each in self._chosen(alias):
            if not self._is_loaded(each):
                continue  # removed or dropped while the others' were forgotten
            llm = self.multi.context(each)
            if cache in {None, "prefix"}:
                done &= await self._reset_prefix_cache(llm, running, external)
            if cache in {None, "mm"}:
                await self._asked(llm.reset_mm_cache())
            if cache in {None, "encoder"}:
                await self._asked(llm.reset_encoder_cache())
        return done

    async def _reset_prefix_cache(self, llm: Any, running: bool, external: bool) -> bool:
        """vLLM raises where what runs was preempted and something still holds blocks, as a session that waits does."""
        try:
            return bool(await self._asked(llm.reset_prefix_cache(running, external)))
        except EngineRefused as refused:
            if not running:
                raise
            log.warning("prefix_cache.held", reason=str(refused.__cause__))
            return False

    async def profile(self, alias: str | None = None, *, start: bool) -> None:
        model = self._known(alias)
        if model is not None and not self._is_loaded(model):
            raise UnknownModel(f"{model} is not loaded, and has nothing to profile: switch to it first, or preload it")
        await self._asked(self.multi.start_profile(model=model) if start else self.multi.stop_profile(model=model))

    def _chosen(self, alias: str | None) -> tuple[str, ...]:
        """The aliases that are loaded: ``alias`` if it is, or all of them."""
        loaded = {each for each, tier in self.tiers().items() if tier is not Tier.DROPPED}
        return tuple(each for each in self.aliases if alias in {None, each} and each in loaded)

    async def died(self) -> BaseException:
        cause = await self.multi.died()
        error = EngineDied(str(cause))
        error.__cause__ = cause
        return error

    async def close(self) -> None:
        await self._sessions.close()
        tasks = [*self._answers.values(), *filter(None, (self._statistics,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._constraints.close()
        await asyncio.to_thread(self.multi.close(), None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _quant_configs(models: ModelsFile) -> dict[str, str | None]:
    """Per alias that says something of QUANT_CONFIG: its value, None to clear it."""
    chosen = ((alias, spec.quant_config) for alias, spec in models.models.items())
    return {alias: None if path is None else str(path) for alias, path in chosen if path is not UNSET}


def _defaults(log: LogSettings | None) -> dict[str, str]:
    """Where vLLM sends its spans, the same as we; it knows the protocol from OpenTelemetry's own variable."""
    url = None if log is None else traces_url(log)
    if url is None:
        return {}
    os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    return {"otlp_traces_endpoint": url}


def _check_loras(models: ModelsFile, settings: EngineSettings) -> None:
    """Raises ConfigError for an adapter of models.yaml that is not there, or not where adapters may be."""
    for alias, spec in models.models.items():
        for name, path in spec.scheduling.loras.items():
            try:
                resolved(settings.lora_root, path)
            except LoraRefused as refused:
                raise ConfigError(f"{models.where(alias)}.loras.{name}: {refused}") from None


def _change(before: ModelSpec | None, after: ModelSpec | None) -> str:
    """What a new models.yaml does to an alias; ``reheld`` where only our own keys differ."""
    if before is None or after is None:
        return "added" if before is None else "removed"
    if before == after:
        return "kept"
    same = replace(after, scheduling=before.scheduling) == before
    return "reheld" if same and after.scheduling.memory == before.scheduling.memory else "changed"


def _memory(models: ModelsFile) -> dict[str, int]:
    """The bytes of the device that aliases say are theirs."""
    said = {alias: spec.scheduling.memory for alias, spec in models.models.items()}
    return {alias: size for alias, size in said.items() if size is not None}
