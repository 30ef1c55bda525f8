"""What replaces the engine core's methods that must ask *whose* request or call this is.

Each gets the method that it replaces and lets it run on the context that is meant, active or not.
"""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from inspect import signature
from typing import Any

from service.engine.core import continuing
from service.engine.core.context import Context, end, ending_by_failed_steps, in_own_process
from service.engine.core.contexts import Contexts
from service.engine.core.seating import WorkerFailed
from service.engine.system import envelope
from service.engine.system.garbage import leave_heap

_STATE = "gearshift_contexts"
_CAME_AS, _PREPARED_FOR = "gearshift_came_as", "gearshift_prepared_for"


def contexts_of(core: Any) -> Contexts | None:
    """The contexts of a core, or None as long as nobody asked for any."""
    return vars(core).get(_STATE)


def open_contexts(core: Any) -> Contexts:
    """The contexts of a core, made where nobody asked for any before."""
    contexts = contexts_of(core)
    if contexts is None:
        contexts = vars(core)[_STATE] = Contexts(core)
    return contexts


def gearshift(self: Any, command: str, arguments: list[Any]) -> Any:
    """A utility call of vLLM's protocol: every command on contexts goes through here; what it brings must be signed."""
    if command in {"activate", "preload", "warm"} and arguments[1] is not None:
        arguments = [arguments[0], envelope.unseal(arguments[1], key=envelope.launch_key()), *arguments[2:]]
    return open_contexts(self).commands[command](*arguments)


gearshift.__signature__ = signature(gearshift)  # type: ignore[attr-defined] # vLLM asks for it with every call


def preprocess_add_request(original: Callable[..., Any], self: Any, request: Any) -> tuple[Any, int]:
    """Called by the input thread: hash and prepare a request as its own model wants it, or leave it as it is."""
    core = _core_of(self, request.client_index)
    if core is None:
        return request, request.current_wave
    try:
        prepared, wave = original(core, request)
        continuing.begin(prepared)
        setattr(prepared, _CAME_AS, request)
        setattr(prepared, _PREPARED_FOR, core.scheduler)
    except Exception:
        if _core_of(self, request.client_index) is core:
            raise
        return request, request.current_wave  # the model was dropped while this thread looked at it
    return prepared, wave


def add_request(original: Callable[..., Any], self: Any, request: Any, request_wave: int = 0) -> None:
    """Add a request to its own context, active or not; one whose model is not loaded is held for it."""
    if contexts_of(self) is None and request.client_index == 0:
        return original(self, request, request_wave)
    context = open_contexts(self).of(request.client_index)
    if context.core is None:
        return context.held.append(getattr(request, _CAME_AS, request))
    if getattr(request, _PREPARED_FOR, None) is not context.core.scheduler:
        # It came before its model, or its model was dropped and loaded again since.
        request = getattr(request, _CAME_AS, request)
        try:
            request, request_wave = _unrouted("preprocess_add_request")(context.core, request)
            continuing.begin(request)
        except Exception:
            if not hasattr(self, "_handle_request_preproc_error"):  # in the caller's process, the caller is told
                raise
            return self._handle_request_preproc_error(request)
    return original(context.core, request, request_wave)


def abort_requests(original: Callable[..., Any], self: Any, request_ids: list[str]) -> None:
    """End requests wherever they are; ids that a context does not know are nothing to it."""
    contexts = contexts_of(self)
    if contexts is None:
        return original(self, request_ids)
    ids = set(request_ids)
    for context in contexts.by_key.values():
        context.cancel_held(ids)
        if context.core is not None:
            original(context.core, request_ids)
            if context is not contexts.active:
                context.complete_pauses()
    return None


def handle_client_request(original: Callable[..., Any], self: Any, request_type: Any, request: Any) -> None:
    """Run a utility call on its caller's context; what the loop itself must do stays with the live core."""
    from vllm.v1.engine import EngineCoreRequestType

    if request_type == EngineCoreRequestType.WAKEUP and (contexts := contexts_of(self)) is not None:
        return contexts.woken()
    if request_type != EngineCoreRequestType.UTILITY:
        return original(self, request_type, request)
    if request[2] == "gearshift":
        with ending_by_failed_steps():
            if not _switched(self, *request):
                original(self, request_type, request)
        return None
    if contexts_of(self) is None and request[0] == 0:
        return original(self, request_type, request)
    contexts = open_contexts(self)
    context = contexts.of(request[0])
    if context is contexts.active:
        return original(self, request_type, request)
    return original(context.core or _Unloaded(self, context), request_type, request)


def _switched(core: Any, client: int, call_id: int, name: str, given: tuple[str, list[Any]]) -> bool:
    """Run a switch as vLLM runs a call, but answer it by the short way. False where vLLM is to run it."""
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput

    contexts = contexts_of(core)
    if given[0] != "activate" or contexts is None or (replies := contexts.replies) is None:
        return False
    if core._reject_utility_in_shutdown(client, call_id, name):
        return True

    def answer(output: Any) -> None:
        if not replies.send(client, output):
            core.output_queue.put_nowait((client, EngineCoreOutputs(utility_output=output)))

    core._invoke_utility_method(name, partial(gearshift, core, *given), UtilityOutput(call_id), answer)
    return True


def step(original: Callable[..., Any], self: Any) -> tuple[Any, bool]:
    """Run a step of a model that all workers have seated; where they can't, its requests end with an error.

    So they do where the step raises. Raises what it does where the workers can't go on. What is loaded beside it gets
    a slice before.
    """
    contexts = contexts_of(self)
    if contexts is None:
        return original(self)
    contexts.go_on()
    if self.scheduler.has_requests():
        try:
            contexts.ready()
        except WorkerFailed as error:
            return contexts.fail(error), False
    try:
        outputs, executed = original(self)
    except Exception as error:
        return contexts.start_over(error), False
    key = contexts.active.key
    if outputs and 0 in outputs and key not in outputs:  # where no token came, a step's statistics go to client 0
        outputs[key] = outputs.pop(0)
    return outputs, executed


def pause_complete(original: Callable[..., Any], self: Any) -> bool:
    """Whether a pause has nothing to wait for: of a frozen context, requests that may go on until they end.

    Those that have ended, of which its workers hear with its next step, are not waited for.
    """
    contexts = contexts_of(self)
    if contexts is None or vars(self) is vars(contexts.live.core):
        return bool(original(self))
    return not self.scheduler.has_unfinished_requests()


def shutdown(original: Callable[..., Any], self: Any) -> None:
    """Free every context, not only the active one. A process that ends with its core ends at once."""
    contexts = contexts_of(self)
    if contexts is not None:
        for context in contexts.by_key.values():
            if context.core is not None and context is not contexts.active:
                end(context.core)
    if in_own_process(self):
        leave_heap()
    original(self)


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


def _core_of(live: Any, key: int) -> Any:
    """The core that prepares a client's requests; None where its model is not loaded. Any thread may ask."""
    contexts = contexts_of(live)
    if contexts is None:
        return live if key == 0 else None
    context = contexts.by_key.get(key)
    return context.core if context is not None else None


def _unrouted(name: str) -> Callable[..., Any]:
    """vLLM's own method under one that routes."""
    from vllm.v1.engine.core import EngineCore

    return getattr(EngineCore, name).__wrapped__
