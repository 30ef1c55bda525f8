"""Contexts in the engine core: one model's config, scheduler, KV-cache manager and step function are its context.

Each context is an engine core of its own whose attributes are kept in its own ``__dict__``; the live core, whose loop
runs, *shares* the dictionary of the active one. So the switch in the core is one assignment, vLLM's methods run on any
context, and bound methods that a context keeps (its step function) stay right. What belongs to the process (queues,
sockets, the shutdown state) is carried over at the switch.

A context's key is the index of the client that its frontend is: a request carries its context by ``client_index``.
"""

import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from service.engine import envelope, versions, worker
from service.engine.worker import Failure
from service.platforms.base import KV_CACHE, WEIGHTS

_STATE = "gearshift_contexts"


class WorkerFailed(RuntimeError):
    """A worker could not do its part of a load or a switch; the message is its own."""


@dataclass(slots=True)
class Context:
    """One model in this core. ``core`` is None as long as the model is not loaded."""

    key: int
    core: Any = None
    held: list[Any] = field(default_factory=list)
    """Requests that came before their model: EngineCoreRequest, in order."""
    asked: list[Future[Any]] = field(default_factory=list)
    """Calls that wait for the model to be loaded."""
    sizes: dict[str, int] = field(default_factory=dict)
    parked: bool = False
    arriving: bool = False
    """The workers are bringing it back while another one runs; parked until that is settled."""

    @property
    def loaded(self) -> bool:
        return self.core is not None

    @property
    def unfinished(self) -> int:
        """Requests that have not ended, also while the scheduler is paused."""
        return len(self.held) + (len(self.core.scheduler.requests) if self.core is not None else 0)


class Contexts:
    """All contexts of an engine core, and the ways between them."""

    def __init__(self, live: Any) -> None:
        self.live = live
        self.executor = live.model_executor
        """vLLM's own executor; every context has a view of it."""
        live.model_executor = versions.view_of(self.executor, live.vllm_config, self, 0)
        self.active = Context(key=0, core=_twin(live))
        self.by_key: dict[int, Context] = {0: self.active}
        self.process_names: frozenset[str] = frozenset()
        """Attributes of the live core that belong to the process; known once a second model is there."""
        self.commands: dict[str, Callable[..., Any]] = {
            "attach": self.attach,
            "activate": self.activate,
            "preload": self.preload,
            "warm": self.warm,
            "warmed": self.warmed,
            "park": self.park,
            "drop": self.drop,
            "rpc": self.rpc,
            "describe": self.describe,
        }

    def of(self, key: int) -> Context:
        """The context of a client, loaded or not."""
        return self.by_key.setdefault(key, Context(key))

    # --- what the frontends ask -----------------------------------------------------------------------------------

    def attach(self) -> dict[str, Any]:
        """The workers' process ids, and what the first model's loading settled."""
        _end_with(os.getppid())
        pids = self._workers(worker.attach)
        self._measure(self.active)
        return {"pids": pids, "settled": versions.settled(self.live.vllm_config), "sizes": self.active.sizes}

    def activate(self, key: int, sealed: bytes | None, park_left: bool) -> dict[str, Any]:
        """Make a context the one whose steps are run; the others' requests stay where they are.

        One that is not loaded is loaded from ``sealed``, an envelope with its config and the environment that its
        loading wants; a parked one is brought back. ``park_left`` makes room first by parking the active one. When
        anything fails the active one goes on as if nothing had been asked.
        """
        laps = _Laps()
        target, left = self.of(key), self.active
        if target is left:
            return laps.answer(memory=self._workers(worker.memory))
        self._quiesce()
        laps.lap("quiesce")
        try:
            if park_left:
                self._park(left)
                laps.lap("park")
            self._bring(target, sealed, laps)
            memory = self._workers(worker.seat, key)
        except BaseException:
            self._go_on(left)
            raise
        self._become(target)
        laps.lap("swap")
        answer = laps.answer(memory=memory, sizes=target.sizes, left=left.sizes)
        if sealed is not None:
            answer["settled"] = versions.settled(target.core.vllm_config)
            self._release_held(target)
        return answer

    def preload(self, key: int, sealed: bytes | None) -> dict[str, Any]:
        """Load a context, or bring it back, while another one is active; the active one waits meanwhile."""
        laps = _Laps()
        target = self.of(key)
        self._quiesce()
        try:
            self._bring(target, sealed, laps)
        finally:
            self._go_on(self.active)
        answer = laps.answer(memory=self._workers(worker.memory), sizes=target.sizes)
        if sealed is not None:
            answer["settled"] = versions.settled(target.core.vllm_config)
            self._release_held(target)
        return answer

    def warm(self, key: int) -> bool:
        """Begin to bring a parked context back while the active one runs; False where there is nothing to wait for.

        It counts as parked until ``activate`` or ``preload`` settles it, which takes no time once it is ``warmed``.
        """
        target = self.of(key)
        if target.parked and target is not self.active:
            target.arriving = all(self._workers(worker.wake_aside, key))
        return target.arriving

    def warmed(self, key: int) -> bool:
        """Whether the workers have done what ``warm`` began."""
        return not self.of(key).arriving or all(self._workers(worker.awake, key))

    def park(self, key: int) -> dict[str, Any]:
        """Give a context's KV cache back and its weights to the host. Its requests stay, and are prefilled again.

        Raises ValueError where it is active or not loaded.
        """
        laps = _Laps()
        target = self.of(key)
        if target is self.active or not target.loaded:
            raise ValueError("the active context can't be parked" if target.loaded else "the model is not loaded")
        self._park(target)
        laps.lap("park")
        return laps.answer(memory=self._workers(worker.memory), sizes=target.sizes)

    def drop(self, key: int) -> dict[str, Any]:
        """Let go of everything a context has. Raises ValueError where it is active or has unfinished requests."""
        laps = _Laps()
        target = self.of(key)
        if target is self.active:
            raise ValueError("the active context can't be dropped")
        if target.unfinished:
            raise ValueError(f"the context has {target.unfinished} unfinished requests")
        if target.loaded:
            self._workers(worker.forget, key)
            self._bury(target)
        laps.lap("drop")
        return laps.answer(memory=self._workers(worker.memory), sizes={})

    def rpc(self, key: int, sealed: bytes) -> bytes:
        """Run what an envelope holds in each worker, on one model; only the workers open it."""
        if not self.of(key).loaded:
            raise LookupError("the model is not loaded")
        return envelope.seal(self._workers(worker.run, key, sealed), key=envelope.launch_key())

    def describe(self) -> dict[str, Any]:
        """Which contexts are there, how big they are, how many requests they hold."""
        return {
            "active": self.active.key,
            "contexts": [
                {"key": context.key, "loaded": context.loaded, "unfinished": context.unfinished, **context.sizes}
                for context in self.by_key.values()
            ],
        }

    # --- what the contexts' executors ask -------------------------------------------------------------------------

    def relay(self, key: int, method: Any, timeout: float | None, args: Any, kwargs: dict[str, Any], **how: Any) -> Any:
        """Call the workers on a model that is not the active one. Raises WorkerFailed."""
        if callable(method):
            method = cloudpickle.dumps(method)
        rank = how.get("unique_reply_rank")
        one = how.get("single_value", False) or rank is not None
        reply = {} if rank is None else {"unique_reply_rank": rank}
        answers = self.executor.collective_rpc(worker.call, timeout, (key, method, args, kwargs), None, **reply)
        values = _checked([answers] if reply else answers)
        return values[0] if one else values

    def nap(self, key: int, method: str, *, level: int = 1, tags: list[str] | None = None) -> list[Any]:
        """What ``sleep`` and ``wake_up`` do to a context's memory; pausing and resuming is vLLM's."""
        if method == "wake_up":
            return self._workers(worker.wake, key, frozenset(tags or (WEIGHTS, KV_CACHE)))
        scheduler = self.of(key).core.scheduler
        if level > 1 and scheduler.requests:
            self.of(key).core.resume_scheduler()
            raise ValueError(
                f"{len(scheduler.requests)} requests are unfinished: their state can't outlive the weights"
            )
        return self._workers(worker.park, key, level)

    # --- how it is done -------------------------------------------------------------------------------------------

    def _quiesce(self) -> None:
        """Finish what is on the device and hand its tokens out; afterwards no step is under way.

        Without the pause a core that schedules ahead would go on until all requests end.
        """
        core = self.live
        if not core.batch_queue:
            return
        from vllm.v1.core.sched.interface import PauseState

        paused = core.scheduler.pause_state
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                outputs, executed = core.step_fn()
                for output in (outputs or {}).items():
                    core.output_queue.put_nowait(output)
                core.post_step(executed)
        finally:
            core.scheduler.set_pause_state(paused)

    def _become(self, target: Context) -> None:
        live, left = self.live, self.active
        attributes = vars(target.core)
        attributes.update({name: vars(live)[name] for name in self.process_names})
        self.active = target
        live.__dict__ = attributes
        # A signal may have asked for shutdown between the copy and the assignment.
        if hasattr(live, "shutdown_state"):
            live.shutdown_state = max(live.shutdown_state, vars(left.core)["shutdown_state"])

    def _build(self, key: int, config: Any) -> Any:
        from vllm.v1.engine.core import EngineCore

        live = self.live
        built = object.__new__(type(live))
        view = versions.view_of(self.executor, config, self, key)
        with versions.keeping_none_hash():
            EngineCore.__init__(built, config, lambda _: view, live.log_stats, None, False)
        assert view.supported_tasks  # asked while the workers hold this model, and kept
        del built.aborts_queue
        self.process_names = frozenset(vars(live)) - frozenset(vars(built))
        vars(built).update({name: vars(live)[name] for name in self.process_names})
        return built

    def _workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return _checked(self.executor.collective_rpc(function, args=args))

    def _bring(self, target: Context, sealed: bytes | None, laps: "_Laps") -> None:
        """Make a context resident, however far away it is."""
        if target.loaded:
            if target.parked:
                self._wake(target)
                laps.lap("wake")
            return
        if sealed is None:
            raise LookupError("the model is not loaded, and no configuration came along")
        config, environment = envelope.unseal(sealed, key=envelope.launch_key())
        try:
            self._workers(worker.load, target.key, config, environment)
            laps.lap("weights")
            target.core = self._build(target.key, config)
            laps.lap("build")
        except BaseException:
            self._abandon(target)
            raise
        self._measure(target)

    def _go_on(self, context: Context) -> None:
        """The active context serves again, whatever was tried meanwhile."""
        if context.parked:
            self._wake(context)
        self._workers(worker.seat, context.key)

    def _park(self, context: Context) -> None:
        if context.parked and not context.arriving:
            return
        context.core.scheduler.reset_prefix_cache(reset_running_requests=True)
        context.parked, context.arriving = True, False
        self._workers(worker.park, context.key, 1)
        self._measure(context)

    def _wake(self, context: Context) -> None:
        self._workers(worker.wake, context.key, frozenset({WEIGHTS, KV_CACHE}))
        context.parked = context.arriving = False
        self._measure(context)

    def _measure(self, context: Context) -> dict[str, int]:
        per_worker = self._workers(worker.sizes, context.key)
        context.sizes = {name: sum(sizes[name] for sizes in per_worker) for name in ("weights", "kv", "host")}
        return context.sizes

    def _release_held(self, context: Context) -> None:
        held, context.held = context.held, []
        for request in held:
            self.live.add_request(request, request.current_wave)
        asked, context.asked = context.asked, []
        for future in asked:
            future.set_result(context.core.get_supported_tasks())

    def _abandon(self, context: Context) -> None:
        """Undo a load that failed half way, in the workers and here."""
        self.executor.collective_rpc(worker.seat, args=(self.active.key,))
        self.executor.collective_rpc(worker.forget, args=(context.key,))
        self._bury(context)

    def _bury(self, context: Context) -> None:
        core, context.core, context.sizes = context.core, None, {}
        context.parked = context.arriving = False
        if core is not None:
            core.structured_output_manager.clear_backend()
            core.scheduler.shutdown()
            vars(core).clear()
        _freeze_garbage()


class _Laps:
    """Where the time of a command went, in milliseconds; all of it no step was run."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._phases: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._phases[name] = (now - self._last) * 1e3
        self._last = now

    def answer(self, **values: Any) -> dict[str, Any]:
        stall_ms = (time.perf_counter() - self._started) * 1e3
        return {"stall_ms": stall_ms, "phases_ms": self._phases, **values}


def _twin(live: Any) -> Any:
    """A core that shares the live one's attributes."""
    twin = object.__new__(type(live))
    twin.__dict__ = live.__dict__
    return twin


def _end_with(parent: int) -> None:
    """Stop this process when its parent is gone, however it went: nothing else would, and workers end with this one."""

    def wait() -> None:
        descriptor = os.pidfd_open(parent)
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="gearshift-parent-watch", daemon=True).start()


def _freeze_garbage() -> None:
    """vLLM freezes the heap for each core it builds; what was dropped is in there: thaw, collect, freeze the rest."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _checked(answers: list[Any]) -> list[Any]:
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    if failures:
        raise WorkerFailed("; ".join(sorted({str(failure) for failure in failures})))
    return answers


def contexts_of(core: Any) -> Contexts | None:
    """The contexts of a core, or None as long as nobody asked for any."""
    return vars(core).get(_STATE)


# --- what replaces vLLM's methods; each gets the method that it replaces ------------------------------------------


def gearshift(self: Any, command: str, arguments: list[Any]) -> Any:
    """A utility call of vLLM's protocol: every command on contexts goes through here."""
    contexts = contexts_of(self)
    if contexts is None:
        contexts = Contexts(self)
        vars(self)[_STATE] = contexts
    return contexts.commands[command](*arguments)


def preprocess_add_request(original: Callable[..., Any], self: Any, request: Any) -> tuple[Any, int]:
    """Called by the input thread: hash and prepare a request as its own model wants it, or leave it as it is."""
    contexts = contexts_of(self)
    if contexts is None:
        return original(self, request) if request.client_index == 0 else (request, request.current_wave)
    core = contexts.of(request.client_index).core
    return original(core, request) if core is not None else (request, request.current_wave)


def add_request(original: Callable[..., Any], self: Any, request: Any, request_wave: int = 0) -> None:
    """Add a request to its own context, active or not; one whose model is not loaded is held for it."""
    contexts = contexts_of(self)
    if contexts is None:
        if request.client_index == 0:
            return original(self, request, request_wave)
        contexts = vars(self)[_STATE] = Contexts(self)
    context = contexts.of(request.client_index)
    if context.core is None:
        return context.held.append(request)
    if not hasattr(request, "status"):  # it came before its model, and was left as it was
        request, request_wave = preprocess_add_request(_unrouted("preprocess_add_request"), self, request)
    return original(context.core, request, request_wave)


def abort_requests(original: Callable[..., Any], self: Any, request_ids: list[str]) -> None:
    """End requests wherever they are; ids that a context does not know are nothing to it."""
    contexts = contexts_of(self)
    if contexts is None:
        return original(self, request_ids)
    ids = set(request_ids)
    for context in contexts.by_key.values():
        context.held = [request for request in context.held if request.request_id not in ids]
        if context.core is not None:
            original(context.core, request_ids)
    return None


def handle_client_request(original: Callable[..., Any], self: Any, request_type: Any, request: Any) -> None:
    """Run a utility call on its caller's context; what the loop itself must do stays with the live core."""
    from vllm.v1.engine import EngineCoreRequestType

    contexts = contexts_of(self)
    if request_type != EngineCoreRequestType.UTILITY or request[2] == "gearshift":
        return original(self, request_type, request)
    if contexts is None:
        if request[0] == 0:
            return original(self, request_type, request)
        contexts = vars(self)[_STATE] = Contexts(self)
    context = contexts.of(request[0])
    if context is contexts.active:
        return original(self, request_type, request)
    return original(context.core or _Unloaded(self, context), request_type, request)


def shutdown(original: Callable[..., Any], self: Any) -> None:
    """Free every context, not only the active one."""
    contexts = contexts_of(self)
    if contexts is not None:
        for context in contexts.by_key.values():
            if context.core is not None and context is not contexts.active:
                context.core.structured_output_manager.clear_backend()
                context.core.scheduler.shutdown()
    return original(self)


class _Unloaded:
    """Answers calls for a model that is not loaded: its tasks are known when it is, anything else is refused."""

    def __init__(self, live: Any, context: Context) -> None:
        self._live = live
        self._context = context

    def get_supported_tasks(self) -> Future[Any]:
        future: Future[Any] = Future()
        self._context.asked.append(future)
        return future

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in {"output_queue", "shutdown_state"}:
            return getattr(self._live, name)
        raise LookupError("the model is not loaded")


def _unrouted(name: str) -> Callable[..., Any]:
    """vLLM's own method under one that routes."""
    from vllm.v1.engine.core import EngineCore

    return getattr(EngineCore, name).__wrapped__
