"""The client for code without an event loop: the same calls, waited for."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from schemas.control import Control
from schemas.requests import Endpoint
from schemas.results import Result
from schemas.status import Presence, Status
from service.client.batches import Batches, Progress
from service.client.client import Client
from service.client.ordered import Errors
from service.client.session import Session
from service.errors import BrokerUnavailable

if TYPE_CHECKING:
    from openai.types import Completion, CreateEmbeddingResponse
    from openai.types.chat import ChatCompletion

T = TypeVar("T")
_END = object()


class _NotHere(RuntimeError):
    """Nobody would do it: the client is not open, or who asks is its own thread."""


class SyncSession:
    """As Session; made by SyncClient.session."""

    def __init__(self, client: "SyncClient", session: Session) -> None:
        self._client = client
        self._session = session

    def complete(self, prompt: str | list[int], *, final: bool = False, **rest: Any) -> Any:
        """As Session.complete."""
        return self._client._wait(self._session.complete(prompt, final=final, **rest))

    def stream(self, prompt: str | list[int], *, final: bool = False, **rest: Any) -> Iterator[Any]:
        """As Session.stream."""
        return self._client._each(aiter(self._session.stream(prompt, final=final, **rest)))


class SyncBatches:
    """As Batches; a SyncClient's ``batch``."""

    def __init__(self, client: "SyncClient", batches: Batches) -> None:
        self._client = client
        self._batches = batches

    def run(self, source: Path, output: Path, **how: Any) -> Progress:
        """As Batches.run."""
        return self._client._wait(self._batches.run(source, output, **how))

    def submit(self, source: Path, **how: Any) -> str:
        """As Batches.submit."""
        return self._client._wait(self._batches.submit(source, **how))

    def list(self) -> tuple[Progress, ...]:
        """As Batches.list."""
        return self._client._wait(self._batches.list())

    def get(self, id_: str) -> Progress:
        """As Batches.get."""
        return self._client._wait(self._batches.get(id_))

    def cancel(self, id_: str) -> Progress:
        """As Batches.cancel."""
        return self._client._wait(self._batches.cancel(id_))

    def fetch(self, id_: str, output: Path, **how: Any) -> Progress:
        """As Batches.fetch."""
        return self._client._wait(self._batches.fetch(id_, output, **how))


class SyncClient:
    """A Client on a thread of its own; opened with ``with``. May be used by several threads at once.

    Takes what Client takes, and raises what it raises. When it is closed, calls of other threads end with
    BrokerUnavailable. Callbacks and the bodies that ``map`` takes run on its own thread, and can't ask it.
    """

    def __init__(self, bootstrap_servers: str | None = None, **given: Any) -> None:
        self._client = Client(bootstrap_servers, **given)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gearshift-client", daemon=True)
        self._is_open = False
        self._opening = threading.Lock()
        self._calls: set[asyncio.Task[Any]] = set()
        """Those under way; of the client's thread."""

    def __enter__(self) -> Self:
        self._is_open = True
        self._thread.start()
        try:
            self._wait(self._client.__aenter__())
        except BaseException:
            self._end(self._leave(None, None, None))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self._leave(kind, error, trace))

    def chat(self, *, model: str, messages: Iterable[Mapping[str, Any]], **rest: Any) -> "ChatCompletion":
        """As Client.chat."""
        return self._wait(self._client.chat(model=model, messages=messages, **rest))

    def complete(self, *, model: str, prompt: str | list[Any], **rest: Any) -> "Completion":
        """As Client.complete."""
        return self._wait(self._client.complete(model=model, prompt=prompt, **rest))

    def embed(self, *, model: str, input: str | list[Any], **rest: Any) -> "CreateEmbeddingResponse":  # noqa: A002
        """As Client.embed."""
        return self._wait(self._client.embed(model=model, input=input, **rest))

    def call(self, endpoint: Endpoint | str, **rest: Any) -> Any:
        """As Client.call."""
        return self._wait(self._client.call(endpoint, **rest))

    def stream(self, *, model: str, **rest: Any) -> Iterator[Any]:
        """The pieces of a streamed answer, as Client.stream gives them."""
        return self._each(aiter(self._client.stream(model=model, **rest)))

    def session(self, *, model: str, **defaults: Any) -> SyncSession:
        """As Client.session."""
        return SyncSession(self, self._client.session(model=model, **defaults))

    def map(
        self, bodies: Iterable[Mapping[str, Any]], *, concurrency: int = 64, errors: Errors = "raise", **rest: Any
    ) -> Iterator[Any]:
        """As Client.map; ``bodies`` are taken on the client's thread."""
        return self._each(self._client.map(bodies, concurrency=concurrency, errors=errors, **rest))

    @property
    def batch(self) -> SyncBatches:
        """As Client.batch."""
        return SyncBatches(self, self._client.batch)

    def submit(self, body: Mapping[str, Any], *, endpoint: Endpoint | str | None = None, **options: Any) -> str:
        """As Client.submit."""
        return self._wait(self._client.submit(body, endpoint=endpoint, **options))

    def result(self, request_id: str, *, timeout_s: float | None = None, since: float | None = None) -> Result:
        """As Client.result."""
        return self._wait(self._client.result(request_id, timeout_s=timeout_s, since=since))

    def cancel(self, request_id: str | None = None, *, correlation_id: str | None = None) -> str:
        """As Client.cancel."""
        return self._wait(self._client.cancel(request_id, correlation_id=correlation_id))

    def switch(self, model: str, **how: Any) -> Status:
        """As Client.switch."""
        return self._wait(self._client.switch(model, **how))

    def control(self, event: Control, *, timeout_s: float | None = None) -> tuple[Status, ...]:
        """As Client.control."""
        return self._wait(self._client.control(event, timeout_s=timeout_s))

    def query(self, request_id: str | None = None, *, timeout_s: float = 30.0) -> dict[str, dict[str, Any]]:
        """As Client.query."""
        return self._wait(self._client.query(request_id, timeout_s=timeout_s))

    def presences(self) -> tuple[Presence, ...]:
        """As Client.presences."""
        return self._wait(self._client.presences())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._begin(work)
        try:
            return future.result()
        except CancelledError:
            raise BrokerUnavailable("the call has ended: the client is closed") from None
        except BaseException:
            future.cancel()  # a Ctrl-C while waiting withdraws the request
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Have the client's thread do it. Raises _NotHere."""
        own = threading.current_thread() is self._thread
        with self._opening:
            if self._is_open and not own:
                return asyncio.run_coroutine_threadsafe(self._call(work), self._loop)
        work.close()
        if own:
            raise _NotHere("a callback of this client, or what it maps, would wait for itself: ask from another thread")
        raise _NotHere("the client is not open: use it inside `with SyncClient(...) as client`")

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await work
        finally:
            self._calls.discard(task)

    def _each(self, items: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> T | object:
            return await anext(items, _END)

        async def leave() -> None:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

        try:
            while (item := self._wait(following())) is not _END:
                yield item  # type: ignore[misc]  # not the end
        finally:
            with suppress(_NotHere):  # the loop's end leaves it, too
                self._wait(leave())

    async def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End what other threads wait for, then the client."""
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._client.__aexit__(kind, error, trace)

    def _end(self, leaving: Coroutine[Any, Any, None]) -> None:
        with self._opening:
            self._is_open = False
        try:
            asyncio.run_coroutine_threadsafe(leaving, self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
