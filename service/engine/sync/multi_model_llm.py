"""MultiModelLLM: many models on one vLLM engine, for code that is not asynchronous; the caller runs the steps."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from schemas.contexts import ContextInfo, Leftover, SwitchMode, SwitchReport, Tier
from service.engine.models.catalog import by_alias, finished
from service.engine.models.changes import Abort, Ask, Change, EndStreams, Finish, HandBack, LetGo, Step, Wake
from service.engine.models.residency import Residency
from service.engine.models.stat_loggers import Logging
from service.engine.sync.cores import Core, CoreHere, SeparateCore
from service.engine.sync.frontend import SyncFrontend
from service.engine.sync.surface import SyncSurface
from service.errors import ConfigError, HandedBack
from service.ports import Observer


class MultiModelLLM(SyncSurface):
    """Many models in one engine, switched in under a millisecond, with all that LLMEngine can do.

    ``model_configs`` maps aliases to EngineArgs. The engine starts with ``default_model`` (else the first) loaded and
    active; the others are loaded by the first switch to them, or the first call that needs them. With
    ``multiprocess_mode`` the core has a process of its own, without it runs in this one (default: as vLLM's variable
    VLLM_ENABLE_V1_MULTIPROCESSING says). The other options are ``MultiModelEngine``'s. Raises ConfigError for data
    parallelism, which that class has, ValueError for an unknown name, and whatever is wrong with the first model.

    Neither ``step`` nor ``has_unfinished_requests`` waits for frozen requests. Use it as a context manager, call
    ``shutdown`` or delete it: every context is freed. Like vLLM's own class it is not for several threads.
    """

    def __init__(
        self,
        model_configs: Mapping[str, Any],
        default_model: str | None = None,
        usage_context: Any = None,
        stat_loggers: list[Any] | None = None,
        disable_log_stats: bool = False,
        model_quant_configs: Mapping[str, str | None] | None = None,
        *,
        multiprocess_mode: bool | None = None,
        aggregate_engine_logging: bool = False,
        device_memory_bytes: int | None = None,
        host_memory_bytes: int | None = None,
        lend_kv: bool = True,
        model_memory: Mapping[str, int] | None = None,
        switch_timeout_s: float = 600.0,
        stuck_timeout_s: float = 120.0,
    ) -> None:
        import vllm.envs as variables

        self._core: Core | None = None
        super().__init__(
            model_configs,
            usage_context,
            model_quant_configs,
            device_memory_bytes=device_memory_bytes,
            host_memory_bytes=host_memory_bytes,
            lend_kv=lend_kv,
            model_memory=model_memory,
        )
        self.switch_timeout_s = switch_timeout_s
        self.stuck_timeout_s = stuck_timeout_s
        self._logging = Logging(
            stats=not disable_log_stats, aggregate=aggregate_engine_logging, factories=tuple(stat_loggers or ())
        )
        self._came: list[tuple[str, Any]] = []
        """Outputs, with their model, that came while something else was waited for."""
        self._handed_back: list[HandedBack] = []
        separate = variables.VLLM_ENABLE_V1_MULTIPROCESSING if multiprocess_mode is None else multiprocess_mode
        first = next(iter(self.model_configs)) if default_model is None else default_model
        self._catalog.require(first)
        try:
            self._start(first, separate=separate)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, first: str, *, separate: bool) -> None:
        order, budgets = self._configure(first)
        if (ranks := self._catalog.configs[first].parallel_config.data_parallel_size) > 1:
            raise ConfigError(
                f"{first}: data_parallel_size is {ranks}, but a MultiModelLLM has one engine core; a MultiModelEngine "
                "has one for each rank"
            )
        config, environment = self._catalog.loading(first)
        if separate:
            self._core = SeparateCore(
                config, clients=len(order), log_stats=self._logging.stats, environment=environment
            )
        else:
            self._core = CoreHere(config, log_stats=self._logging.stats, environment=environment)
        residency = Residency(self._frontends, budgets)
        for key, alias in enumerate(order):
            if alias in self._catalog.configs:
                config = self._catalog.configs[alias]
                logging = self._logging.of(self.model_configs[alias])
                self._frontends[alias] = SyncFrontend(alias, config, key=key, core=self._core, logging=logging)
                residency.add(alias, config)
        self._frontends[first].open()
        self._begin(first, residency, self._core.ask("attach"), self._core.pid)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        usage_context: Any = None,
        stat_loggers: list[Any] | None = None,
        enable_multiprocessing: bool = False,
        **ours: Any,
    ) -> Self:
        """An engine for EngineArgs by alias, or for one of them, under the name that it is served by."""
        named = by_alias(engine_args)
        quiet = all(arguments.disable_log_stats for arguments in named.values())
        given = {"multiprocess_mode": True} if enable_multiprocessing else {}
        return cls(named, None, usage_context, stat_loggers, **{"disable_log_stats": quiet, **given, **ours})

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: Any,
        usage_context: Any = None,
        stat_loggers: list[Any] | None = None,
        disable_log_stats: bool = False,
        **ours: Any,
    ) -> Self:
        """The same for finished VllmConfigs."""
        return cls(finished(vllm_config), None, usage_context, stat_loggers, disable_log_stats, **ours)

    def shutdown(self) -> None:
        """Free every context and stop every process. May be called twice."""
        core, self._core = self._core, None
        self._frontends.clear()
        self._started = None
        if core is not None:
            core.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if getattr(self, "_core", None) is not None:
            self.shutdown()

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Any]:
        """The next outputs of any model: by a step of the active one, or what came meanwhile.

        Answers at once, with nothing, where the active model has nothing to do, though others have frozen requests.
        Raises HandedBack once where requests went back as not finished to make room, EngineDeadError.
        """
        if self._handed_back:
            raise self._handed_back.pop(0)
        came, self._came = self._came, []
        return [output for _, output in came] or [output for _, output in self._step()]

    def _step(self) -> list[tuple[str, Any]]:
        ready = [frontend for frontend in self._frontends.values() if frontend.ready] or self._runnable
        return [(frontend.alias, output) for frontend in ready for output in frontend.llm.step()]

    @property
    def _runnable(self) -> list[SyncFrontend]:
        """The active model's frontend, where a step of it has something to do."""
        active = self._frontends[self._changes.active]
        return [active] if active.running and self._residency.schedules(active.alias) else []

    def has_unfinished_requests(self, *, model: str | None = None) -> bool:
        """Whether a step can bring something: a loop of steps ends with the active model's requests.

        Frozen ones and those of a model that sleeps do not count, unless their ``model`` is named: then it is asked
        whether that one has requests that have not ended or outputs that nobody took.
        """
        if model is None:
            # What a model without requests still has to say are statistics.
            coming = any(frontend.running and frontend.ready for frontend in self._frontends.values())
            return bool(self._came or self._handed_back or self._runnable) or coming
        return any(model == alias for alias, _ in self._came) or bool(self._frontend(model).running)

    # --- whole answers --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        lora_request: Any = None,
        priority: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        model: str | None = None,
    ) -> list[Any]:
        """The final RequestOutput of each prompt (or of the only one), in their order.

        A model that is not active is so for this call, and the one that was active is again afterwards; its requests
        are frozen meanwhile. Outputs of other requests wait for ``step``. ``sampling_params``, ``lora_request`` and
        ``priority`` may be one for all or one for each.
        """
        from vllm import SamplingParams

        if sampling_params is None:
            # Of its configuration: its LLMEngine would have it loaded beside the active model, before that one is left.
            sampling_params = SamplingParams(**self._frontend(model).config.model_config.get_diff_sampling_param())
        return self._answers(prompts, sampling_params, lora_request, priority, tokenization_kwargs, model)

    def encode(
        self,
        prompts: Any,
        pooling_params: Any = None,
        *,
        pooling_task: str | None = None,
        lora_request: Any = None,
        priority: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        model: str | None = None,
    ) -> list[Any]:
        """The PoolingRequestOutput of each prompt, in their order; otherwise as ``generate``."""
        from vllm import PoolingParams

        if pooling_params is None:
            pooling_params = PoolingParams(task=pooling_task)
        return self._answers(prompts, pooling_params, lora_request, priority, tokenization_kwargs, model)

    def _answers(
        self, prompts: Any, params: Any, lora_request: Any, priority: Any, tokenization: Any, model: str | None
    ) -> list[Any]:
        from vllm.sampling_params import RequestOutputKind

        if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        each = zip(
            prompts,
            _spread(params, len(prompts), "params"),
            _spread(lora_request, len(prompts), "lora_request"),
            _spread(priority or 0, len(prompts), "priority"),
            strict=True,
        )
        wanted: dict[str, Any] = {}
        with self._seated(model):
            active = self._changes.active
            if not self._residency.schedules(active):
                raise RuntimeError(f"{active} sleeps and would never answer: call wake_up first")
            try:
                for prompt, param, lora, urgency in each:
                    wanted[name := uuid.uuid4().hex] = None
                    param = param.clone()  # noqa: PLW2901 - the caller's stays as it is
                    param.output_kind = RequestOutputKind.FINAL_ONLY
                    self.add_request(
                        name, prompt, param, lora_request=lora, tokenization_kwargs=tokenization, priority=urgency
                    )
                self._gather(wanted)
            except BaseException:
                self.abort_request(wanted)
                raise
        return list(wanted.values())

    def _gather(self, wanted: dict[str, Any]) -> None:
        """Step until all that is wanted is there; outputs of other requests wait for ``step``."""
        while None in wanted.values():
            for alias, output in self._step():
                if output.request_id not in wanted:
                    self._came.append((alias, output))
                elif output.finished:
                    wanted[output.request_id] = output

    @contextmanager
    def _seated(self, model: str | None) -> Iterator[None]:
        """``model`` is active inside, and whichever was before is again."""
        before = self._changes.active
        if model is not None:
            self.switch(model)
        try:
            yield
        finally:
            self.switch(before)

    # --- switching ------------------------------------------------------------------------------------------------

    def switch(
        self,
        alias: str,
        *,
        mode: SwitchMode = SwitchMode.KEEP,
        drain_timeout: float = 60.0,
        leftover: Leftover = Leftover.ABORT,
        observe: Observer | None = None,
    ) -> SwitchReport:
        """Make ``alias`` active. Outputs of requests that a drain finishes wait for ``step``.

        Raises ValueError for an unknown name or a negative timeout, SwitchFailed (a RuntimeError; the previous model
        is active and serves), EngineDeadError.
        """
        return self._carry_out(self._switching(alias, mode, drain_timeout, leftover, observe)())

    def preload(self, alias: str) -> ContextInfo:
        """Load a model, or bring it back, beside the active one. Raises as ``switch`` does."""
        self._frontend(alias)
        self._carry_out(self._changes.preload(alias))
        return self.info(alias)

    _load = preload

    def _wake(self, frontend: SyncFrontend, tags: list[str] | None) -> None:
        if frontend.alias not in self._residency.asleep():
            if frontend.wake(tags):
                self._residency.woke(frontend.alias)
            return
        self._carry_out(self._changes.wake(frontend.alias, None if tags is None else tuple(tags)))

    def park(self, alias: str) -> ContextInfo:
        """Give a model's memory back; its requests stay. Raises SwitchFailed for the active one."""
        self._frontend(alias)
        self._carry_out(self._changes.lower(alias, Tier.PARKED))
        return self.info(alias)

    def drop(self, alias: str) -> ContextInfo:
        """Let go of a model. Raises SwitchFailed for the active one, and where it has unfinished requests."""
        self._frontend(alias)
        self._carry_out(self._changes.lower(alias, Tier.DROPPED))
        return self.info(alias)

    def pin(self, alias: str, pinned: bool = True) -> ContextInfo:
        """Keep a model resident whatever the budgets ask, or let it go again."""
        self._frontend(alias)
        self._residency.pin(alias, pinned)
        return self.info(alias)

    def describe(self) -> dict[str, Any]:
        """What the core says of its contexts: which is active, and for each its key, requests and bytes."""
        self._frontend(None)
        assert self._core is not None
        answer: dict[str, Any] = self._core.ask("describe")
        return answer

    def _carry_out(self, change: Change[Any]) -> Any:
        """Perform a change's steps to its end, and answer with its result."""
        step, given = change.send, None
        while True:
            try:
                wanted = step(given)
            except StopIteration as done:
                return done.value
            try:
                step, given = change.send, self._perform(wanted)
            except Exception as error:
                step, given = change.throw, error

    def _perform(self, step: Step) -> Any:
        from service.platforms import current

        frontend, core = self._frontends[step.alias], self._core
        assert core is not None
        match step:
            case Ask():
                loading = core.wrap(self._catalog.loading(step.alias)) if step.load else None
                arguments = step.arguments(loading, self.switch_timeout_s)
                limit_s, warm_up_s = self.switch_timeout_s + self.stuck_timeout_s, current().warm_up_s
                longer_s = warm_up_s if step.load else 0.0
                return core.ask(step.command, frontend.key, *arguments, timeout_s=limit_s, warm_up_s=longer_s)
            case Finish(requests=requests, seconds=seconds):
                deadline = time.perf_counter() + seconds
                while requests & frontend.running and time.perf_counter() < deadline:
                    self._came += self._step()
            case Abort(requests=requests):
                frontend.abort(requests)
            case HandBack(error=error):
                frontend.abort(frontend.running)
                self._handed_back.append(error)
            case EndStreams():
                """LLMEngine takes no prompt in pieces."""
            case LetGo():
                frontend.let_go()
            case Wake(tags=tags):
                return frontend.wake(tags)
        return None


def _spread(value: Any, count: int, name: str) -> Sequence[Any]:
    """One value for each of ``count`` prompts. Raises ValueError where a list has another length."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name}: {len(value)} for {count} prompts")
    return value
