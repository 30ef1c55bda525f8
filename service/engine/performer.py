"""Carrying out changes of contexts: one at a time, and each to its end."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from service.engine.catalog import Catalog
from service.engine.changes import Ask, Change, Step
from service.engine.death import Death
from service.engine.frontends import Frontend
from service.engine.launch import EngineProcesses


class Performer:
    """Changes asked at once are made one after another; one that has begun ends even if nobody waits for it.

    ``timeout_s`` bounds the wait for the core's answer to one step.
    """

    def __init__(
        self,
        frontends: Mapping[str, Frontend],
        catalog: Catalog,
        *,
        processes: EngineProcesses,
        death: Death,
        timeout_s: float,
    ) -> None:
        self._frontends = frontends
        self._catalog = catalog
        self._processes = processes
        self._death = death
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def make(self, begin: Callable[[], Change[Any]], name: str) -> Any:
        """Make the change that ``begin`` begins when its turn comes, and answer with its result."""

        async def in_turn() -> Any:
            async with self._lock:
                return await self._carry_out(begin())

        task = asyncio.create_task(in_turn(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def _carry_out(self, change: Change[Any]) -> Any:
        go_on: Callable[[Any], Step] = change.send
        given: Any = None
        while True:
            try:
                step = go_on(given)
            except StopIteration as done:
                return done.value
            try:
                go_on, given = change.send, await self._perform(step)
            except Exception as error:
                go_on, given = change.throw, error

    async def _perform(self, step: Step) -> Any:
        """Wait for the core, but not for ever: one that does not come back from a load is dead."""
        asked = isinstance(step, Ask)
        loading = self._catalog.loading(step.alias) if isinstance(step, Ask) and step.load else None
        try:
            async with asyncio.timeout(self._timeout_s if asked else None):
                return await self._frontends[step.alias].perform(step, loading)
        except TimeoutError:
            self._death.report(f"the engine core did not answer within {self._timeout_s:g} s")
            self._processes.stop(0)
            raise
        except Exception as error:
            self._death.raise_if_known(error)
            raise

    def cancel(self) -> None:
        """The engine ends: no change will be made any more."""
        for task in self._tasks:
            task.cancel()
