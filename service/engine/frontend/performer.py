"""Carrying out changes of contexts: one at a time, and each to its end."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, NoReturn

from service.engine.frontend.death import Death
from service.engine.frontend.frontend import Frontend
from service.engine.frontend.ranks import RanksApart
from service.engine.models.catalog import Catalog
from service.engine.models.changes import Arrive, Ask, Change, Finish, Step, Wake
from service.engine.processes.launch import EngineProcesses
from service.errors import SwitchFailed
from service.platforms import current

_POLL_S, _POLL_MOST_S = 0.005, 0.05


class Performer:
    """Changes asked at once are made one after another; one that has begun ends even if nobody waits for it.

    The core gives a load up after ``timeout_s``; one that is still silent ``stuck_s`` later is dead, unless it has
    said that it is warming the model up, which takes hours on some platforms.
    """

    def __init__(
        self,
        frontends: Mapping[str, Frontend],
        catalog: Catalog,
        *,
        processes: EngineProcesses,
        death: Death,
        timeout_s: float,
        stuck_s: float,
    ) -> None:
        self._frontends = frontends
        self._catalog = catalog
        self._processes = processes
        self._death = death
        self.timeout_s = timeout_s
        self.stuck_s = stuck_s
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def make(self, begin: Callable[[], Change[Any]], name: str) -> Any:
        """Make the change that ``begin`` begins when its turn comes, and answer with its result.

        Whoever gives it up before that is not surprised by it later. Raises as ``finish`` does.
        """
        begun = False

        async def in_turn() -> Any:
            nonlocal begun
            async with self._lock:
                begun = True
                self._death.raise_if_known()
                return await self._carry_out(begin())

        return await self.finish(in_turn(), name, has_begun=lambda: begun)

    async def finish(
        self, work: Coroutine[Any, Any, Any], name: str, *, has_begun: Callable[[], bool] = lambda: True
    ) -> Any:
        """Wait for work that ends, once it ``has_begun``, even if nobody waits for it.

        Raises EngineDeadError where ``cancel`` ended it: a CancelledError would tell the caller's TaskGroup that the
        caller was cancelled.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise EngineDeadError("the engine was shut down") from None
            if not has_begun():
                task.cancel()
            raise

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
        """Wait for the core, but not for ever: it gives up a slow load itself, so one that says nothing is stuck."""
        frontend, within_s = self._frontends[step.alias], self.timeout_s
        match step:
            case Arrive():
                return await self.arrival(step.alias)
            case Finish():  # which says itself how long
                return await frontend.perform(step, None, within_s=within_s)
            case Ask(load=load):
                loading = self._catalog.loading(step.alias) if load else None
                undo = [(each.command, self._frontends[each.alias].key, *each.arguments(None)) for each in step.undo]
                warm_up_s = current().warm_up_s if load else 0.0
                stuck = "it neither loaded a model nor gave it up"
            case _:
                loading, undo = None, []
                warm_up_s = current().warm_up_s if isinstance(step, Wake) else 0.0
                stuck = f"it has not answered {step.alias}"
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            perform = partial(frontend.perform, step, loading, within_s=within_s, undo=undo)
            return await self._patient(frontend, perform, warm_up_s=warm_up_s)
        except TimeoutError:
            took = f"{loop.time() - began:.0f} s"
            await self._give_up(f"the engine core is stuck: {stuck} in {took}")
        except RanksApart as error:
            await self._give_up(str(error))
        except Exception as error:
            self._death.raise_if_known(error)
            raise

    async def arrival(self, alias: str) -> None:
        """Wait for a model that is brought in beside the active one. Raises SwitchFailed where it did not come."""
        frontend = self._frontends[alias]

        async def warmed() -> None:
            pause = _POLL_S
            while not await frontend.ask("warmed", frontend.key, undo=[("drop", frontend.key)]):
                await asyncio.sleep(pause)
                pause = min(2 * pause, _POLL_MOST_S)

        try:
            await self._patient(frontend, warmed, warm_up_s=current().warm_up_s)
        except TimeoutError:
            await self._give_up(f"the engine core is stuck: it neither loaded {alias} nor gave it up")
        except Exception as error:
            self._death.raise_if_known(error)
            raise SwitchFailed(f"Failed to preload {alias}: {error}") from error

    async def _patient(self, frontend: Frontend, work: Callable[[], Awaitable[Any]], *, warm_up_s: float) -> Any:
        """Wait for the core as long as it may be silent; ``warm_up_s`` longer once it says that it warms a model up.

        Raises TimeoutError.
        """
        async with asyncio.timeout(self.timeout_s + self.stuck_s) as limit:
            if not warm_up_s:
                return await work()

            async def longer() -> None:
                await frontend.ask("warming")
                limit.reschedule((limit.when() or 0.0) + warm_up_s)

            warming = asyncio.create_task(longer(), name="warming")
            warming.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                await asyncio.sleep(0)  # it is asked before the load, behind which it would not be heard
                return await work()
            finally:
                warming.cancel()

    async def _give_up(self, reason: str) -> NoReturn:
        """The core can't be worked with any more, though it runs. Raises EngineDeadError."""
        from vllm.v1.engine.exceptions import EngineDeadError

        self._death.report(reason)
        await asyncio.to_thread(self._processes.stop, 0)
        raise EngineDeadError(reason)

    def cancel(self) -> None:
        """The engine ends: no change will be made any more."""
        for task in tuple(self._tasks):
            task.cancel()
