"""The client: what producers and consumers use, so that nobody writes their own collector."""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import structlog
from opentelemetry.trace import SpanKind, get_tracer
from pydantic import ValidationError

from schemas import headers as h
from schemas.base import Record
from schemas.codec import decode_chunk, decode_result, decode_status
from schemas.contexts import Leftover, SwitchMode
from schemas.control import EVERYONE, Cancel, Control, Query, Switch
from schemas.errors import nearest
from schemas.requests import Endpoint
from schemas.results import Chunk, Result
from schemas.status import Presence, Status
from service.client.answers import answer_of
from service.client.controls import DONE, Controls
from service.client.feed import Feed
from service.client.options import Options, request_record, split
from service.client.ordered import Errors, in_order
from service.client.routes import Routes
from service.client.session import Session
from service.client.stream import Pieces, Stream
from service.errors import GearshiftError, NoAnswer, SwitchFailed, UnknownModel
from service.kafka.connection import reachable
from service.kafka.producer import IdempotentProducer
from service.kafka.reader import TopicReader
from service.kafka.topics import ensure_reply_topic, request_topics
from service.ports import RecordRefused
from service.settings import Settings, load

if TYPE_CHECKING:
    from openai.types import Completion, CreateEmbeddingResponse
    from openai.types.chat import ChatCompletion

log = structlog.get_logger(__name__)

T = TypeVar("T")

_TRACER = get_tracer("gearshift")
"""The application's own tracer provider, if it has set one."""

_GRACE_S = 5.0
"""How long after a request's deadline its result, which then says so, may take to arrive."""


_SENT_WITHIN_S = 60.0
"""Thousands of calls at once stand in line for one connection."""
_KEPT = 100_000
"""Results of submitted requests that are kept for whoever asks; older ones are found again on the bus."""


class Client:
    """A producer of requests and the collector of their results; opened with ``async with``.

    ``Client("broker:9092")``, with any setting by its name (``topic_prefix=...``, ``security_protocol=...``), or with
    ``settings``. A ``reply_topic`` for our results alone is created where it is missing; the workers' setting
    ``reply_topics`` must allow it. Calls take the fields of
    OpenAI's API, those that vLLM adds, and the names of ``Options``. One process needs one client: any number of
    calls may wait at once.

    Calls raise RequestFailed (its kinds RequestCancelled and RequestExpired) with the OpenAI error, NoAnswer,
    BrokerUnavailable, TopicError, and RecordRefused for a request that the broker won't take.
    """

    def __init__(
        self,
        bootstrap_servers: str | None = None,
        *,
        settings: Settings | None = None,
        reply_topic: str | None = None,
        timeout_s: float = 600.0,
        **given: object,
    ) -> None:
        self._settings = settings or load(bootstrap_servers=bootstrap_servers, **given)
        topics = self._settings.topics
        self._reply_topic = reply_topic
        self._timeout_s = timeout_s
        self._outlet = IdempotentProducer(
            kafka=self._settings.kafka, max_record_bytes=topics.max_message_bytes, within_s=_SENT_WITHIN_S
        )
        self._controls = Controls(settings=self._settings, outlet=self._outlet)
        self._routes = Routes(topics=topics, presences=self._controls.presences)
        self._results = self._feed("result", reply_topic or topics.named(topics.results), decode_result)
        self._chunks = self._feed("chunk", topics.named(topics.chunks), decode_chunk)
        self._shared: dict[str, asyncio.Future[Result]] = {}
        self._submitted: OrderedDict[str, None] = OrderedDict()
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await reachable(self._settings.kafka, within_s=self._settings.kafka.request_timeout_s)
        if self._reply_topic is not None:
            await ensure_reply_topic(self._settings, self._reply_topic)
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self._outlet)
            opening.push_async_callback(self._controls.close)
            opening.push_async_callback(self._chunks.close)
            opening.push_async_callback(self._results.close)
            self._open = opening.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    # --- asking for an answer -------------------------------------------------------------------------------------

    async def chat(self, *, model: str, messages: Iterable[Mapping[str, Any]], **rest: Any) -> "ChatCompletion":
        """A chat completion."""
        found: ChatCompletion = await self.call(Endpoint.CHAT, model=model, messages=list(messages), **rest)
        return found

    async def complete(self, *, model: str, prompt: str | list[Any], **rest: Any) -> "Completion":
        """A completion of a text, of several, or of token ids."""
        found: Completion = await self.call(Endpoint.COMPLETIONS, model=model, prompt=prompt, **rest)
        return found

    async def embed(self, *, model: str, input: str | list[Any], **rest: Any) -> "CreateEmbeddingResponse":  # noqa: A002
        """Embeddings; ``input`` as OpenAI's API calls it."""
        found: CreateEmbeddingResponse = await self.call(Endpoint.EMBEDDINGS, model=model, input=input, **rest)
        return found

    async def call(self, endpoint: Endpoint | str, **rest: Any) -> Any:
        """The answer of any endpoint, in the openai package's type for it, else as a dict."""
        options, body = split(rest)
        return answer_of(await self._ask(Endpoint(endpoint), body, options))

    def stream(self, *, model: str, **rest: Any) -> Stream:
        """A streamed chat completion, or completion where there is a ``prompt``: ``async for piece in stream``."""
        options, body = split({**rest, "model": model, "stream": True})
        endpoint = Endpoint.COMPLETIONS if "prompt" in body else Endpoint.CHAT
        return self.stream_of(endpoint, body, options)

    def stream_of(self, endpoint: Endpoint, body: Mapping[str, Any], options: Options | None = None) -> Stream:
        """The same for any endpoint that streams."""
        options = options or Options()
        request_id, timeout_s = options.request_id or uuid.uuid4().hex, options.timeout_s or self._timeout_s

        @asynccontextmanager
        async def opened() -> AsyncIterator[Pieces]:
            async with self._results.listening(request_id) as box:
                try:
                    await self._chunks.open_box(request_id, box)
                    await self._send(request_id, endpoint, {**body, "stream": True}, options, timeout_s)
                    yield box
                except (GeneratorExit, asyncio.CancelledError):
                    await self._withdraw(request_id)
                    raise
                finally:
                    self._chunks.close_box(request_id)

        return Stream(request_id=request_id, endpoint=endpoint, opened=opened, within_s=timeout_s + _GRACE_S)

    def session(self, *, model: str, **defaults: Any) -> Session:
        """A prompt in several parts; ``defaults`` are fields and options of each of them."""
        return Session(call=self.call, stream_of=self.stream_of, defaults={**defaults, "model": model})

    def map(
        self,
        bodies: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        *,
        concurrency: int = 64,
        errors: Errors = "raise",
        **rest: Any,
    ) -> AsyncIterator[Any]:
        """The answers to many bodies, in their order, ``concurrency`` at a time; bodies are taken as they are needed.

        ``rest`` are defaults for every body. With ``errors="return"`` an error takes the place of its answer.
        """
        options, defaults = split(rest)

        async def answer(body: Mapping[str, Any]) -> Any:
            return answer_of(await self._ask(None, {**defaults, **body}, options))

        return in_order(bodies, answer, concurrency=concurrency, errors=errors)

    # --- by id ----------------------------------------------------------------------------------------------------

    async def submit(self, body: Mapping[str, Any], *, endpoint: Endpoint | str | None = None, **options: Any) -> str:
        """Send a request, and return its id once the broker has it. ``options`` are those of ``Options``.

        Without ``endpoint`` the body must tell it (``messages``, ``prompt``).
        """
        chosen = Options(**options)
        request_id = chosen.request_id or uuid.uuid4().hex
        if self._results.box(request_id) is None:
            await self.expect(request_id)
            await self._send(request_id, Endpoint(endpoint) if endpoint else None, body, chosen, chosen.timeout_s)
        return request_id

    async def expect(self, request_id: str) -> None:
        """Keep the result of a request, also of one that somebody else sent, until ``result`` asks for it."""
        await self._results.open_box(request_id)
        self._submitted[request_id] = None
        if len(self._submitted) > _KEPT:
            self._results.close_box(self._submitted.popitem(last=False)[0])

    def forget(self, request_id: str) -> None:
        """Nobody will ask for this result here."""
        self._submitted.pop(request_id, None)
        self._results.close_box(request_id)

    async def result(self, request_id: str, *, timeout_s: float | None = None) -> Result:
        """The result of a request, whatever its outcome, with its times; also of one that somebody else sent."""
        known = self._results.box(request_id) is not None
        async with self._results.listening(request_id) as box:
            self._submitted.pop(request_id, None)
            if not known:
                async for result in self.results(past=True, follow=False, prefix=request_id):
                    if result.id == request_id:
                        return result
            return _as_result(await box.take(within_s=timeout_s or self._timeout_s))

    async def cancel(self, request_id: str | None = None, *, correlation_id: str | None = None) -> str:
        """Cancel a request, or all of a correlation id; its result will say so. Gives the control event's id."""
        event = Cancel(request=request_id, correlation_id=correlation_id)
        await self._controls.publish(event)
        return event.id

    async def results(
        self, *, past: bool | float = False, follow: bool = True, prefix: str = ""
    ) -> AsyncIterator[Result]:
        """Everybody's results as they come; with ``past`` also the older ones, all or since a moment (epoch seconds).

        Without ``follow`` it ends with what is the newest now; ``prefix`` is one of request ids.
        """
        topics = self._settings.topics
        topic = self._reply_topic or topics.named(topics.results)
        async for record in self._records(topic, past=past, follow=follow):
            if (record.key or b"").startswith(prefix.encode()) and (result := _readable(decode_result, record)):
                yield result

    async def requests(self, *, past: bool | float = False, follow: bool = False) -> AsyncIterator[Record]:
        """What was asked, by anyone, as ``results`` gives what was answered; as raw records, each once."""
        topics = await request_topics(self._settings)
        async for record in self._records(*topics, past=past, follow=follow):
            if h.attributes(record.headers).get(h.MOVED_FROM) is None:
                yield record

    # --- control --------------------------------------------------------------------------------------------------

    async def switch(
        self,
        model: str,
        *,
        mode: SwitchMode | str | None = None,
        drain_timeout: float | None = None,
        leftover: Leftover | str | None = None,
        hold: float | Literal["drained", "forever"] | None = None,
        target: str = EVERYONE,
        timeout_s: float | None = None,
        on_status: Callable[[Status], None] | None = None,
    ) -> Status:
        """Switch, wait until every worker that is meant has, and give the last one's status, with its times.

        Raises SwitchFailed with a worker's reason, NoAnswer.
        """
        event = Switch(
            model=model,
            mode=SwitchMode(mode) if mode else None,
            drain_timeout=drain_timeout,
            leftover=Leftover(leftover) if leftover else None,
            hold=hold,
            target=target,
        )
        statuses = await self.control(event, timeout_s=timeout_s, on_status=on_status)
        for status in statuses:
            if status.state not in DONE:
                raise SwitchFailed(f"{status.worker}: {status.state}: {status.reason}")
        return statuses[-1]

    async def control(
        self, event: Control, *, timeout_s: float | None = None, on_status: Callable[[Status], None] | None = None
    ) -> tuple[Status, ...]:
        """Publish any control event, and give the last word of every worker that it is for."""
        return await self._controls.ask(event, timeout_s=timeout_s or self._timeout_s, on_status=on_status)

    async def query(self, request_id: str | None = None, *, timeout_s: float = 30.0) -> dict[str, dict[str, Any]]:
        """Where a request stands, or the whole state, by worker."""
        statuses = await self.control(Query(request=request_id), timeout_s=timeout_s)
        return {status.worker: status.answer or {} for status in statuses}

    async def statuses(self, *, past: bool | float = False, follow: bool = True) -> AsyncIterator[Status]:
        """What workers say about control events, as ``results`` does."""
        topics = self._settings.topics
        async for record in self._records(topics.named(topics.status), past=past, follow=follow):
            if status := _readable(decode_status, record):
                yield status

    async def presences(self) -> tuple[Presence, ...]:
        """The workers that are there."""
        return await self._controls.presences()

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _ask(self, endpoint: Endpoint | None, body: Mapping[str, Any], options: Options) -> Result:
        """One result for a request; calls with the same request id share it."""
        request_id = options.request_id or uuid.uuid4().hex
        shared = self._shared.get(request_id)
        if shared is not None:
            return await asyncio.shield(shared)
        shared = self._shared[request_id] = asyncio.get_running_loop().create_future()
        try:
            result = await self._send_and_wait(request_id, endpoint, body, options)
        except BaseException as error:
            shared.set_exception(
                error if isinstance(error, Exception) else NoAnswer("the call that sent it was cancelled")
            )
            shared.exception()  # there may be nobody else who retrieves it
            raise
        else:
            shared.set_result(result)
            return result
        finally:
            del self._shared[request_id]

    async def _send_and_wait(
        self, request_id: str, endpoint: Endpoint | None, body: Mapping[str, Any], options: Options
    ) -> Result:
        timeout_s = options.timeout_s or self._timeout_s
        if self._results.box(request_id) is not None:
            return await self.result(request_id, timeout_s=timeout_s)
        async with self._results.listening(request_id) as box:
            try:
                await self._send(request_id, endpoint, body, options, timeout_s)
                return _as_result(await box.take(within_s=timeout_s + _GRACE_S))
            except asyncio.CancelledError:
                await self._withdraw(request_id)
                raise

    async def _send(
        self,
        request_id: str,
        endpoint: Endpoint | None,
        body: Mapping[str, Any],
        options: Options,
        timeout_s: float | None,
    ) -> None:
        topic = await self._topic(options, body.get("model"))
        attributes = {
            "messaging.system": "kafka",
            "messaging.destination.name": topic,
            "messaging.message.id": request_id,
        }
        with _TRACER.start_as_current_span("send request", kind=SpanKind.PRODUCER, attributes=attributes):
            record = request_record(
                topic,
                body,
                request_id=request_id,
                endpoint=endpoint,
                options=options,
                timeout_s=timeout_s,
                reply_to=self._reply_topic,
            )
            await self._outlet.send(record)

    async def _topic(self, options: Options, model: object) -> str:
        """Where a request is written: a model's topic that is asked for, else where its model is.

        A session's parts all go to the shared topic, whatever becomes known of the workers in between: one worker has
        its place. Raises UnknownModel: in a topic that no worker reads a request would be lost.
        """
        alias = options.topic_of
        if alias is None:
            return await self._routes.topic_for(None if options.session is not None else model)
        known = {context.alias for presence in await self.presences() for context in presence.contexts}
        if known and alias not in known:
            raise UnknownModel(f"topic_of: no worker serves {alias!r}{nearest(alias, known)}")
        return self._settings.topics.for_alias(alias)

    async def _withdraw(self, request_id: str) -> None:
        """Nobody waits for this request any more: let it not be run for nothing, if that can be said."""
        with suppress(GearshiftError, RecordRefused):
            await asyncio.shield(self._controls.publish(Cancel(request=request_id)))

    async def _records(self, *topics: str, past: bool | float, follow: bool) -> AsyncIterator[Record]:
        since = None if isinstance(past, bool) else past
        from_end = topics if past is False else ()
        async with TopicReader(kafka=self._settings.kafka, topics=topics, from_end=from_end, since=since) as tail:
            async for record in tail if follow else tail.backlog():
                yield record

    def _feed(
        self, expected: str, topic: str, decode: Callable[[Record], Chunk] | Callable[[Record], Result]
    ) -> Feed[Chunk | Result]:
        kafka = self._settings.kafka
        return Feed(
            expected=expected,
            open_tail=lambda: TopicReader(
                kafka=kafka, topics=[topic], from_end=[topic], within_s=min(10.0, kafka.request_timeout_s)
            ),
            name_of=lambda record: (record.key or b"").decode("utf-8", "replace"),
            decode=decode,
        )


def _readable(decode: Callable[[Record], T], record: Record) -> T | None:
    """The message in a record; None for what a stranger wrote."""
    try:
        return decode(record)
    except ValidationError:
        log.warning("record.malformed", at=str(record.origin))
        return None


def _as_result(item: Chunk | Result) -> Result:
    assert isinstance(item, Result), "only streams share their box with chunks"
    return item
