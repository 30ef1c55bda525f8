"""The tasks of a worker: the first that fails ends it, and none keeps it from ending."""

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import structlog

from service.errors import Stalled

log = structlog.get_logger(__name__)
LEAVE_WITHIN_S = 5.0
"""How long a task may take to end after it is cancelled; then the worker ends without it."""


class Tasks:
    """Loops, which go on for as long as the worker lives, and work, which comes to an end."""

    def __init__(self) -> None:
        self._loops: set[asyncio.Task[None]] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []
        self._failed = asyncio.Event()

    def loop(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` until the worker ends."""
        return self._start(work, name, self._loops)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` to its end; if it fails, the worker ends."""
        return self._start(work, name, self._work)

    async def idle(self) -> None:
        """Return when no work is left."""
        while self._work:
            await asyncio.wait(set(self._work), return_when=asyncio.FIRST_COMPLETED)

    async def until(self, main: Coroutine[Any, Any, None]) -> None:
        """Run ``main`` until it ends or a task fails, then end all the others, within LEAVE_WITHIN_S seconds.

        Raises an ExceptionGroup of what failed.
        """
        ended = self._start(main, "worker", self._loops)
        failed = asyncio.create_task(self._failed.wait(), name="failure")
        try:
            await asyncio.wait({ended, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
            await self._leave()
        if self._errors:
            raise BaseExceptionGroup("the worker failed", self._errors)

    async def _leave(self) -> None:
        left = self._loops | self._work
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=LEAVE_WITHIN_S)
        if left:
            log.error("worker.tasks_left", tasks=sorted(task.get_name() for task in left))

    def _start(self, work: Coroutine[Any, Any, None], name: str, among: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        among.add(task)
        task.add_done_callback(partial(self._ended, among))
        return task

    def _ended(self, among: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        """A client library that lets the cancellation of one of its own tasks out ends ours: that is a failure, too."""
        among.discard(task)
        error: BaseException | None
        if task.cancelled():
            error = None if task.cancelling() else Stalled(f"{task.get_name()} was cancelled from inside")
        else:
            error = task.exception()
        if error is not None:
            self._errors.append(error)
            self._failed.set()
