"""Sends requests, each once for an id, and waits for their results."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from opentelemetry.trace import SpanKind, get_tracer

from schemas.base import Origin
from schemas.control import Cancel
from schemas.errors import nearest
from schemas.requests import Endpoint
from schemas.results import Result
from service.client.controls import Controls
from service.client.inbox import AnswerBox, Inbox
from service.client.options import Options, request_record
from service.client.routes import Routes
from service.errors import AlreadyAsked, GearshiftError, NoAnswer, UnknownModel
from service.kafka.producer import IdempotentProducer
from service.settings import TopicSettings

_TRACER = get_tracer("gearshift")
"""The application's own tracer provider, if it has set one."""
GRACE_S = 5.0
"""How long after a request's deadline its result, which then says so, may take to arrive."""


class Asking:
    """Requests on their way, and whoever waits for them."""

    def __init__(
        self, *, topics: TopicSettings, outlet: IdempotentProducer, inbox: Inbox, controls: Controls, timeout_s: float
    ) -> None:
        self._topics = topics
        self._outlet = outlet
        self._inbox = inbox
        self._controls = controls
        self._timeout_s = timeout_s
        self._routes = Routes(topics=topics, presences=controls.presences)

    def within_s(self, timeout_s: float | None) -> float:
        """How long is waited where nothing else is said."""
        return self._timeout_s if timeout_s is None else timeout_s

    async def answer(self, endpoint: Endpoint | None, body: Mapping[str, Any], options: Options) -> Result:
        """One result for a request; calls with the same request id share it."""
        timeout_s = self.within_s(options.timeout_s)
        async with self._inbox.listening(options.request_id or await self._inbox.new_id()) as box:
            try:
                await self._ask(box, endpoint, body, options, timeout_s)
                return await box.result(within_s=timeout_s + GRACE_S)
            except asyncio.CancelledError:
                await self._withdraw(box)
                raise

    @asynccontextmanager
    async def streaming(
        self, endpoint: Endpoint | None, body: Mapping[str, Any], options: Options, *, within_s: float
    ) -> AsyncIterator[AnswerBox]:
        """The box of a request that is sent for this, with its chunks. Raises AlreadyAsked."""
        async with self._inbox.listening(options.request_id or await self._inbox.new_id()) as box:
            if box.asked is not None:
                raise AlreadyAsked(f"request {box.name} is asked already: its result can be waited for, not its pieces")
            try:
                await self._ask(box, endpoint, {**body, "stream": True}, options, within_s, stream=True)
                yield box
            except (GeneratorExit, asyncio.CancelledError):
                await self._withdraw(box)
                raise
            finally:
                box.stream = False

    async def submit(self, body: Mapping[str, Any], endpoint: Endpoint | None, options: Options) -> str:
        """Send a request, and return its id once the broker has it."""
        async with self._inbox.listening(options.request_id or await self._inbox.new_id()) as box:
            await self._ask(box, endpoint, body, options, options.timeout_s)
            self._inbox.keep(box)
            return box.name

    async def result(self, request_id: str, *, within_s: float | None, since: float | None = None) -> Result:
        """The result of a request, whatever its outcome; looked for on the bus where we have not asked for it."""
        timeout_s = self.within_s(within_s)
        until = asyncio.get_running_loop().time() + timeout_s
        async with self._inbox.listening(request_id) as box:
            if box.asked is None:
                try:
                    async with asyncio.timeout_at(until):
                        found = await self._inbox.find(request_id, since=since)
                except TimeoutError:
                    raise NoAnswer(f"no result for {request_id} within {timeout_s:.3g} s") from None
                if found is not None:
                    box.put(found)
            return await box.result(within_s=max(0.0, until - asyncio.get_running_loop().time()))

    async def _ask(
        self,
        box: AnswerBox,
        endpoint: Endpoint | None,
        body: Mapping[str, Any],
        options: Options,
        timeout_s: float | None,
        *,
        stream: bool = False,
    ) -> None:
        """Send a request whose answers come into ``box``, or wait until it is sent by whoever was first to ask it."""
        if box.asked is not None:
            await asyncio.shield(box.asked)
            return
        box.sending()
        try:
            if stream:
                await self._inbox.hear_pieces(box)
            box.sent(await self._send(box.name, endpoint, body, options, timeout_s))
        except BaseException as error:
            given_up = NoAnswer("the call that sent it was cancelled")
            box.unsent(error if isinstance(error, Exception) else given_up)
            raise

    async def _send(
        self,
        request_id: str,
        endpoint: Endpoint | None,
        body: Mapping[str, Any],
        options: Options,
        timeout_s: float | None,
    ) -> Origin:
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
                reply=await self._inbox.reply_headers(),
            )
            return await self._outlet.send(record)

    async def _withdraw(self, box: AnswerBox) -> None:
        """Whoever asked gives it up: where nobody else wants it, let it not be run for nothing, if that can be said."""
        if not self._inbox.is_wanted_elsewhere(box):
            with suppress(GearshiftError):
                await asyncio.shield(self._controls.publish(Cancel(request=box.name)))

    async def _topic(self, options: Options, model: object) -> str:
        """Where a request is written: a model's topic that is asked for, else where its model is.

        A session's parts all go to the shared topic, whatever becomes known of the workers in between: one worker has
        its place. Raises UnknownModel: in a topic that no worker reads a request would be lost.
        """
        alias = options.topic_of
        if alias is None:
            return await self._routes.topic_for(None if options.session is not None else model)
        known = {context.alias for presence in await self._controls.presences() for context in presence.contexts}
        if known and alias not in known:
            raise UnknownModel(f"topic_of: no worker serves {alias!r}{nearest(alias, known)}")
        return self._topics.for_alias(alias)
