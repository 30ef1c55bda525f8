"""The tasks of a worker: the first that fails ends it, and none keeps it from ending."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import structlog

from service.errors import Stalled

P = ParamSpec("P")
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

    def loop(
        self, name: str, work: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **named: P.kwargs
    ) -> asyncio.Task[None]:
        """Run ``work`` until the worker ends."""
        return self._start(self._loops, name, work, *args, **named)

    def spawn(
        self, name: str, work: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **named: P.kwargs
    ) -> asyncio.Task[None]:
        """Run ``work`` to its end; if it fails, the worker ends."""
        return self._start(self._work, name, work, *args, **named)

    async def idle(self) -> None:
        """Return when no work is left."""
        while left := _unfinished(self._work):
            await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)

    async def until(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``main`` until it ends or a task fails, then end all the others, within LEAVE_WITHIN_S seconds.

        Raises an ExceptionGroup of what failed.
        """
        ended = self.loop("worker", main)
        failed = asyncio.create_task(self._failed.wait(), name="failure")
        try:
            await asyncio.wait({ended, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
            await self._leave()
        if self._errors:
            raise BaseExceptionGroup("the worker failed", self._errors)

    async def _leave(self) -> None:
        left = _unfinished(self._loops | self._work)
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=LEAVE_WITHIN_S)
        if left:
            log.error("worker.tasks_left", tasks=sorted(task.get_name() for task in left))

    def _start(
        self,
        among: set[asyncio.Task[None]],
        name: str,
        work: Callable[P, Coroutine[Any, Any, None]],
        *args: P.args,
        **named: P.kwargs,
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run(among, work, *args, **named), name=name)
        among.add(task)
        return task

    async def _run(
        self,
        among: set[asyncio.Task[None]],
        work: Callable[P, Coroutine[Any, Any, None]],
        *args: P.args,
        **named: P.kwargs,
    ) -> None:
        """Each request is such a task: what it comes to is seen here, which costs less than a callback of the task.

        A client library that lets the cancellation of one of its own tasks out ends ours: that is a failure, too.
        """
        task = asyncio.current_task()
        assert task is not None
        try:
            await work(*args, **named)
        except asyncio.CancelledError:
            if not task.cancelling():
                self._fail(Stalled(f"{task.get_name()} was cancelled from inside"))
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self._fail(error)
        finally:
            among.discard(task)

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self._failed.set()


def _unfinished(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """A task that is cancelled before its first step is done, and has not taken itself out."""
    return {task for task in tasks if not task.done()}
