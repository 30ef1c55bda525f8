"""The client: what producers and consumers use, so that nobody writes their own collector."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from schemas import headers as h
from schemas.base import Record
from schemas.codec import decode_result, decode_status
from schemas.contexts import Leftover, SwitchMode
from schemas.control import EVERYONE, Cancel, Control, Query, Switch
from schemas.requests import Endpoint
from schemas.results import Result
from schemas.status import Presence, Status
from service.client.answers import answer_of
from service.client.asking import GRACE_S, Asking
from service.client.batches import Batches
from service.client.controls import DONE, Controls
from service.client.feed import Traffic
from service.client.inbox import Inbox, readable
from service.client.options import Options, split
from service.client.ordered import Errors, in_order
from service.client.session import Session
from service.client.stream import Stream
from service.errors import SwitchFailed
from service.kafka.connection import reachable
from service.kafka.producer import IdempotentProducer
from service.kafka.reader import TopicReader, as_unavailable
from service.kafka.topics import ensure_reply_topic, request_topics
from service.settings import Settings, load

if TYPE_CHECKING:
    from openai.types import Completion, CreateEmbeddingResponse
    from openai.types.chat import ChatCompletion

_SENT_WITHIN_S = 60.0
"""Thousands of calls at once stand in line for one connection."""


class Client:
    """A producer of requests and the collector of their results; opened with ``async with``.

    ``Client("broker:9092")``, with any setting by its name (``topic_prefix=...``, ``security_protocol=...``), or with
    ``settings``. Calls take the fields of OpenAI's API, those that vLLM adds, and the names of ``Options``. One
    process needs one client: any number of calls may wait at once.

    Results are read from the topic of all, in one of its partitions: that of the ids that this client makes. For very
    many clients there is ``reply_topic``, which many may share: results and chunks come in one partition of it,
    ``reply_partition`` or one chosen at random, and in no other topic. It is created where it is missing, and the
    workers' setting ``reply_topics`` must allow it. Another client finds these results, and what a batch was answered,
    only with the same ``reply_partition``.

    Calls raise RequestFailed (its kinds RequestCancelled and RequestExpired) with the OpenAI error, NoAnswer,
    BrokerUnavailable, TopicError, and RecordRefused for a request that the broker won't take; a stream of a request id
    that is asked already raises AlreadyAsked.
    """

    def __init__(
        self,
        bootstrap_servers: str | None = None,
        *,
        settings: Settings | None = None,
        reply_topic: str | None = None,
        reply_partition: int | None = None,
        timeout_s: float = 600.0,
        **given: object,
    ) -> None:
        self._settings = settings or load(bootstrap_servers=bootstrap_servers, **given)
        topics = self._settings.topics
        self._reply_topic = reply_topic
        self._outlet = IdempotentProducer(
            kafka=self._settings.kafka, max_record_bytes=topics.max_message_bytes, within_s=_SENT_WITHIN_S
        )
        self._controls = Controls(settings=self._settings, outlet=self._outlet)
        self.traffic = Traffic()
        """What was read for calls, and what was passed over."""
        self._inbox = Inbox(
            settings=self._settings, reply_topic=reply_topic, reply_partition=reply_partition, traffic=self.traffic
        )
        self._asking = Asking(
            topics=topics, outlet=self._outlet, inbox=self._inbox, controls=self._controls, timeout_s=timeout_s
        )
        self._batches = Batches(settings=self._settings)
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await reachable(self._settings.kafka, within_s=self._settings.kafka.request_timeout_s)
        if self._reply_topic is not None:
            await ensure_reply_topic(self._settings, self._reply_topic)
        async with AsyncExitStack() as opening:
            # Opened by the first record: who only reads may have no right to write anything.
            opening.push_async_callback(self._outlet.close)
            opening.push_async_callback(self._controls.close)
            opening.push_async_callback(self._inbox.close)
            await opening.enter_async_context(self._batches)
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
        return answer_of(await self._asking.answer(Endpoint(endpoint), body, options))

    def stream(self, *, model: str, **rest: Any) -> Stream:
        """A streamed chat completion, or completion where there is a ``prompt``: ``async for piece in stream``."""
        options, body = split({**rest, "model": model, "stream": True})
        endpoint = Endpoint.COMPLETIONS if "prompt" in body else Endpoint.CHAT
        return self.stream_of(endpoint, body, options)

    def stream_of(self, endpoint: Endpoint | None, body: Mapping[str, Any], options: Options | None = None) -> Stream:
        """The same for any endpoint that streams; without ``endpoint`` the body must tell it, and pieces are dicts."""
        options = options or Options()
        within_s = self._asking.within_s(options.timeout_s)
        opened = partial(self._asking.streaming, endpoint, body, options, within_s=within_s)
        return Stream(request_id=options.request_id, endpoint=endpoint, opened=opened, within_s=within_s + GRACE_S)

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
            return answer_of(await self._asking.answer(None, {**defaults, **body}, options))

        return in_order(bodies, answer, concurrency=concurrency, errors=errors)

    @property
    def batch(self) -> Batches:
        """OpenAI's batches: a file of requests is asked, by the pool itself, and its answers are fetched."""
        return self._batches

    # --- by id ----------------------------------------------------------------------------------------------------

    async def submit(self, body: Mapping[str, Any], *, endpoint: Endpoint | str | None = None, **options: Any) -> str:
        """Send a request, and return its id once the broker has it. ``options`` are those of ``Options``.

        Without ``endpoint`` the body must tell it (``messages``, ``prompt``).
        """
        return await self._asking.submit(body, Endpoint(endpoint) if endpoint else None, Options(**options))

    async def result(self, request_id: str, *, timeout_s: float | None = None, since: float | None = None) -> Result:
        """The result of a request, whatever its outcome, with its times; also of one that somebody else sent.

        One that this client does not wait for yet is looked for on the bus, and then waited for: among the latest
        20,000 records of the one partition that an id's result is in, and none older than the id where a client made
        it. With ``since`` (seconds since the epoch), among all of that partition since then. Raises NoAnswer.
        """
        return await self._asking.result(request_id, within_s=timeout_s, since=since)

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
        only = self._inbox.read_of
        async for record in self._records(self._inbox.topic, past=past, follow=follow, only=only):
            if (record.key or b"").startswith(prefix.encode()) and (result := readable(decode_result, record)):
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
        return await self._controls.ask(event, timeout_s=self._asking.within_s(timeout_s), on_status=on_status)

    async def query(self, request_id: str | None = None, *, timeout_s: float = 30.0) -> dict[str, dict[str, Any]]:
        """Where a request stands, or the whole state, by worker."""
        statuses = await self.control(Query(request=request_id), timeout_s=timeout_s)
        return {status.worker: status.answer or {} for status in statuses}

    async def statuses(self, *, past: bool | float = False, follow: bool = True) -> AsyncIterator[Status]:
        """What workers say about control events, as ``results`` does."""
        topics = self._settings.topics
        async for record in self._records(topics.named(topics.status), past=past, follow=follow):
            if status := readable(decode_status, record):
                yield status

    async def presences(self) -> tuple[Presence, ...]:
        """The workers that are there."""
        return await self._controls.presences()

    # --- inside ---------------------------------------------------------------------------------------------------

    async def _records(
        self, *topics: str, past: bool | float, follow: bool, only: Callable[[int], Collection[int]] = range
    ) -> AsyncIterator[Record]:
        since = None if isinstance(past, bool) else past
        from_end = topics if past is False else ()
        reader = TopicReader(kafka=self._settings.kafka, topics=topics, from_end=from_end, since=since, only=only)
        with as_unavailable(", ".join(topics)):
            async with reader:
                async for record in reader if follow else reader.backlog():
                    yield record
