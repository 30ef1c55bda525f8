"""Sends requests, each once for an id, and waits for their results."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from opentelemetry.trace import SpanKind, get_tracer

from schemas.control import Cancel
from schemas.errors import nearest
from schemas.requests import Endpoint
from schemas.results import Result
from service.client.controls import Controls
from service.client.inbox import AnswerBox, Inbox
from service.client.options import Options, request_record
from service.client.routes import Routes
from service.errors import GearshiftError, NoAnswer, UnknownModel
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
        self._shared: dict[str, asyncio.Future[Result]] = {}

    async def answer(self, endpoint: Endpoint | None, body: Mapping[str, Any], options: Options) -> Result:
        """One result for a request; calls with the same request id share it."""
        request_id = options.request_id or await self._inbox.new_id()
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

    async def submit(self, body: Mapping[str, Any], endpoint: Endpoint | None, options: Options) -> str:
        """Send a request, and return its id once the broker has it."""
        request_id = options.request_id or await self._inbox.new_id()
        if self._inbox.box(request_id) is None:
            box = await self._inbox.keep(request_id)
            try:
                await self.send(box, endpoint, body, options, options.timeout_s)
            except BaseException:
                self._inbox.forget(request_id)
                raise
        return request_id

    async def result(self, request_id: str, *, within_s: float, since: float | None = None) -> Result:
        """The result of a request, whatever its outcome; looked for on the bus where nobody here waited for it."""
        known = self._inbox.box(request_id) is not None
        until = asyncio.get_running_loop().time() + within_s
        async with self._inbox.listening(request_id) as box:
            if not known:
                try:
                    async with asyncio.timeout_at(until):
                        found = await self._inbox.find(request_id, since=since)
                except TimeoutError:
                    raise NoAnswer(f"no result for {request_id} within {within_s:.3g} s") from None
                if found is not None:
                    return found
            return await box.result(within_s=max(0.0, until - asyncio.get_running_loop().time()))

    async def send(
        self,
        box: AnswerBox,
        endpoint: Endpoint | None,
        body: Mapping[str, Any],
        options: Options,
        timeout_s: float | None,
    ) -> None:
        """Send a request whose answers come into ``box``."""
        topic = await self._topic(options, body.get("model"))
        attributes = {
            "messaging.system": "kafka",
            "messaging.destination.name": topic,
            "messaging.message.id": box.name,
        }
        with _TRACER.start_as_current_span("send request", kind=SpanKind.PRODUCER, attributes=attributes):
            record = request_record(
                topic,
                body,
                request_id=box.name,
                endpoint=endpoint,
                options=options,
                timeout_s=timeout_s,
                reply=await self._inbox.reply_headers(),
            )
            box.sending()
            box.sent(await self._outlet.send(record))

    async def withdraw(self, request_id: str) -> None:
        """Nobody waits for this request any more: let it not be run for nothing, if that can be said."""
        with suppress(GearshiftError):
            await asyncio.shield(self._controls.publish(Cancel(request=request_id)))

    async def _send_and_wait(
        self, request_id: str, endpoint: Endpoint | None, body: Mapping[str, Any], options: Options
    ) -> Result:
        timeout_s = options.timeout_s or self._timeout_s
        if self._inbox.box(request_id) is not None:
            return await self.result(request_id, within_s=timeout_s)
        async with self._inbox.listening(request_id) as box:
            try:
                await self.send(box, endpoint, body, options, timeout_s)
                return await box.result(within_s=timeout_s + GRACE_S)
            except asyncio.CancelledError:
                await self.withdraw(request_id)
                raise

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
