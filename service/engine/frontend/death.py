"""The end of an engine that nobody asked for: known once, and told to everyone who waits for it."""

import asyncio
from collections.abc import Mapping
from typing import Any
from weakref import WeakMethod

from service.engine.frontend.frontend import Frontend
from service.engine.processes.launch import EngineProcesses


class Death:
    """Whether the engine is dead, and of what. Made in the event loop that its frontends run in."""

    def __init__(self, frontends: Mapping[str, Frontend]) -> None:
        self._frontends = frontends
        self.known: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def watch(self, processes: EngineProcesses) -> None:
        """Know it as soon as one of the processes ends."""
        report = WeakMethod(self.report)  # the watching thread must not keep the engine
        processes.watch(lambda reason: (tell := report()) and tell(reason))

    def report(self, reason: str) -> None:
        """The engine is dead. Any thread may say so."""
        from vllm.v1.engine.exceptions import EngineDeadError

        def tell() -> None:
            error = EngineDeadError(reason)
            if not self.known.done():
                self.known.set_result(error)
            for frontend in self._frontends.values():
                frontend.fail(error)

        loop = self.known.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell)

    def raise_if_known(self, error: Exception | None = None) -> None:
        """Where the engine is dead, that is what an error means, and an answer to whatever is asked of it."""
        if self.known.done() and self.known.result() is not error:
            raise self.known.result() from error

    async def wait(self) -> Any:
        """What it died of, as soon as it is dead."""
        return await asyncio.shield(self.known)
