"""What the core asks of the workers, sent with vLLM's own RPC.

These functions never raise into it: vLLM gives up on the first failed answer and leaves the other ranks' answers
unread, so a failure travels as a value.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from service.engine.system import envelope
from service.engine.system.deadline import deadline
from service.engine.system.garbage import leave_heap
from service.engine.worker.contexts import WorkerContexts

log = logging.getLogger(__name__)
_STATE = "gearshift"
_FAULTS = (LookupError, TypeError, AttributeError, NameError, AssertionError)
"""Somebody's mistake, ours or vLLM's, of which the message alone says too little."""
_WITHOUT_WEIGHTS = frozenset(
    {"list_loras", "remove_lora", "reset_mm_cache", "reset_encoder_cache", "profile", "synchronize_device"}
)
"""Methods of a worker that need nothing of a model on the device. Any other one may read or write its weights."""


@dataclass(slots=True)
class Failure:
    """What went wrong in a worker, in words: the error's class and its message."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def shutdown(original: Callable[..., Any], self: Any) -> None:
    """Replaces that of a worker's process: it ends every model, not only the seated one, and at once."""
    leave_heap()
    try:
        contexts_of(self.worker).forget_others()
    finally:
        original(self)


def contexts_of(wrapper: Any) -> WorkerContexts:
    """This process's contexts; made at the first call, with the model that the process started with as key 0."""
    state: WorkerContexts | None = vars(wrapper).get(_STATE)
    if state is None:
        state = vars(wrapper)[_STATE] = WorkerContexts(wrapper)
    return state


def _guarded(work: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(work)
    def answer(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return work(contexts_of(wrapper), *args, **kwargs)
        except Exception as error:  # a failure is an answer here
            if isinstance(error, _FAULTS):
                log.warning("%s failed", work.__name__, exc_info=True)
            return Failure(type(error).__name__, str(error))

    return answer


@_guarded
def attach(contexts: WorkerContexts) -> int:
    """Get ready for contexts; answers with this process's id."""
    return os.getpid() if contexts.by_key else 0


@_guarded
def seat(contexts: WorkerContexts, key: int) -> None:
    contexts.seat(key)


@_guarded
def load(
    contexts: WorkerContexts, key: int, config: Any, environment: dict[str, str | None], within_s: float | None
) -> dict[str, float]:
    return contexts.load(key, config, environment, within_s)


@_guarded
def begin(contexts: WorkerContexts, key: int, config: Any, environment: dict[str, str | None]) -> None:
    contexts.begin(key, config, environment)


@_guarded
def begin_call(contexts: WorkerContexts, key: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Begin to run a worker's method on a model in slices."""
    from vllm.v1.serial_utils import run_method

    contexts.begin_call(key, lambda: run_method(contexts.wrapper, method, args, kwargs))


@_guarded
def go_on(contexts: WorkerContexts, key: int, seconds: float, idle: bool, within_s: float | None) -> tuple[Any] | None:
    return contexts.go_on(key, seconds, idle=idle, within_s=within_s)


@_guarded
def forget(contexts: WorkerContexts, key: int) -> int:
    contexts.forget(key)
    return contexts.platform.memory_used()


@_guarded
def park(contexts: WorkerContexts, key: int, level: int, blocks: Sequence[int] = ()) -> dict[str, int]:
    """Answers with the model's ``sizes`` then."""
    contexts.park(key, level, blocks)
    return contexts.sizes(key)


@_guarded
def wake(contexts: WorkerContexts, key: int, tags: frozenset[str]) -> dict[str, int]:
    """Answers with the model's ``sizes`` then."""
    contexts.wake(key, tags)
    return contexts.sizes(key)


@_guarded
def give_back(contexts: WorkerContexts, key: int, blocks: Sequence[int]) -> None:
    contexts.give_back(key, blocks)


@_guarded
def wake_aside(contexts: WorkerContexts, key: int) -> bool:
    return contexts.wake_aside(key)


@_guarded
def awake(contexts: WorkerContexts, key: int) -> bool:
    return contexts.awake(key)


@_guarded
def start_over(contexts: WorkerContexts, key: int) -> set[str]:
    """After a step that failed: forget it, and answer with the requests that the model's runner still knows."""
    return contexts.start_over(key)


@_guarded
def weights_change(contexts: WorkerContexts, key: int) -> None:
    contexts.weights_change(key)


@_guarded
def call(
    contexts: WorkerContexts,
    key: int,
    method: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    within_s: float | None = None,
) -> Any:
    """Run a worker's method on a model that is perhaps not the seated one."""
    return _called(contexts, key, method, args, kwargs, within_s)


@_guarded
def run(contexts: WorkerContexts, key: int, sealed: bytes) -> Any:
    """Run the method in an envelope on a model; it may have changed the weights."""
    contexts.weights_change(key)
    method, args, kwargs = envelope.unseal(sealed, key=envelope.launch_key())
    return _called(contexts, key, method, args, kwargs, None)


def _called(contexts: WorkerContexts, key: int, method: Any, args: Any, kwargs: Any, within_s: float | None) -> Any:
    from vllm.v1.serial_utils import run_method

    if method not in _WITHOUT_WEIGHTS:
        contexts.require_weights(key)
    with contexts.seated(key), deadline(within_s):
        return run_method(contexts.wrapper, method, args, kwargs)


@_guarded
def sizes(contexts: WorkerContexts, key: int) -> dict[str, int]:
    """Bytes of a model in this process, and whether it can be parked."""
    return contexts.sizes(key)


@_guarded
def memory(contexts: WorkerContexts) -> int:
    return contexts.platform.memory_used()
