"""The worker as HTTP routes see it, and what they ask it to do."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.control import Control
from schemas.objectives import Objective
from schemas.status import TERMINAL, Presence, Status
from service.errors import Unavailable
from service.models_file import ModelsFile
from service.ports import Inquiry, Reply, SourceState, Watcher


@dataclass(frozen=True)
class WorkerView:
    """What routes read from a worker; one whose engine is not up yet has little more than a presence."""

    presence: Callable[[], Presence]
    models: Callable[[], ModelsFile]
    """models.yaml as the engine took it last."""
    command: Callable[[Control], None] | None = None
    """Do what a control event asks; the answer is a status. None before the engine is up."""
    requests: Callable[[int], Sequence[Mapping[str, Any]]] = lambda _most: ()
    """What runs and waits, without what it says; at most so many."""
    tokens: Callable[[], int] = lambda: 0
    """Tokens that the running requests have generated so far."""
    ends_s: Callable[[str | None], float | None] = lambda _request: None
    """Seconds until a request here ends, or until any does, where that can be said."""
    objectives: Callable[[], Mapping[str, Mapping[str, Objective]]] = dict
    """What requests are to get, by model and class."""
    source: Callable[[], SourceState] = SourceState
    others: Callable[[], Awaitable[Sequence[Presence]]] | None = None
    """The pool, as last heard."""
    metrics: Callable[[], bytes] = bytes
    inquire: Callable[[str, Inquiry], Awaitable[Reply]] | None = None
    """Ask a model's server of its inside."""
    openapi: Callable[[], Awaitable[Mapping[str, Any]]] | None = None
    """OpenAPI's document of what the models' endpoints take, as far as models are loaded."""


class Commands(Watcher):
    """Control events asked over HTTP, each with its answer."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[Status]] = {}

    def status(self, status: Status) -> None:
        """A worker said something; if it ends what somebody waits for, they have it."""
        waiting = self._waiting.get(status.control_id or "")
        if waiting is not None and status.state in TERMINAL and not waiting.done():
            waiting.set_result(status)

    async def ask(self, worker: WorkerView, event: Control) -> Status:
        """Do it, and wait for the status that ends it. Raises Unavailable where it is not up, or ends first."""
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._waiting[event.id] = answer
        try:
            if worker.command is None:
                raise Unavailable("the worker is not up yet")
            worker.command(event)
            return await answer
        finally:
            del self._waiting[event.id]

    def close(self) -> None:
        """The worker has ended: nobody will answer."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Unavailable("the worker has stopped"))
