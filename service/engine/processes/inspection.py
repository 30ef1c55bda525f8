"""What vLLM asks of a model's class before it loads one, asked in a fork of the process that has vLLM imported.

What a class can do (generate, pool, see pictures) vLLM asks in a new interpreter, so that no import opens a device in
its own process. That interpreter imports vLLM first: some twelve seconds of a core for each class that vLLM's cache on
disk does not know, one after another. A new container has no such cache.
"""

import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import cloudpickle

from service.engine.processes.fork_server import server


@contextmanager
def asked_in_forks() -> Iterator[None]:
    """Inside, vLLM asks a fork of this process's fork server, where there is one that may be used as it is."""
    from vllm.model_executor.models import registry

    theirs = registry._run_in_subprocess
    registry._run_in_subprocess = partial(_ask, theirs)
    try:
        yield
    finally:
        registry._run_in_subprocess = theirs


def _ask(theirs: Callable[[Callable[[], Any]], Any], question: Callable[[], Any]) -> Any:
    with server.lent_if_there() as context:
        if context is None:
            return theirs(question)
        try:
            right, said = context.ask(_answer, cloudpickle.dumps(question), name="gearshift-inspection")
        except EOFError as error:
            raise RuntimeError(f"the process that was asked about a model's class: {error}") from None
    if not right:
        raise RuntimeError(f"Error raised in subprocess:\n{said.decode()}")  # as vLLM says it
    return pickle.loads(said)  # noqa: S301 - from a child of our own


def _answer(end: Any, question: bytes) -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # which may have registered the class
    try:
        said = True, pickle.dumps(cloudpickle.loads(question)())
    except Exception:
        said = False, traceback.format_exc().encode()
    end.send(said)
