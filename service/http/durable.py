"""Durable calls over HTTP: their answer is whole, and found again by any door, whatever becomes of the connection.

A call is durable that is asked in the background, with ``Prefer: respond-async`` or with an ``Idempotency-Key``; or
each of them, by a setting. What is known of a call is what the log says. Its id tells whose it is, so that nobody
else's is looked for: it begins with eight bytes of a hash over the owner.
"""

import asyncio
import hashlib
import math
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from schemas import headers as h
from schemas.base import Headers, Record, read_json
from schemas.errors import ErrorObject
from schemas.requests import PATHS, Endpoint
from schemas.results import Chunk, Outcome, Result
from service.http import errors
from service.http.doorkeeper import Doorkeeper
from service.http.errors import Refused
from service.http.replies import Json, reply, while_connected, whole
from service.kafka.calls import Call, Calls
from service.kafka.files import begin_of, owner_named
from service.kafka.following import Following

KEY = "idempotency-key"
_PREVIOUS = "previous_response_id"
_LONGEST_KEY = 255
_KIND = "resp_"
_ID_BYTES = 16
_CANCELLED_WITHIN_S = 10.0
_LAST_PIECES_WITHIN_S = 5.0
"""Pieces of a stream travel beside its result: how long they may be behind it."""
_LONGEST_NUMBER = 12
_TAKEN_OVER = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p")
"""What OpenAI's object repeats of its request."""


@dataclass(frozen=True, slots=True)
class CallName:
    """What its answers call a call: a response's object has its id, and that of the one that it goes on with."""

    id: str
    endpoint: Endpoint
    previous: str | None = None

    @classmethod
    def of(cls, id_: str, record: Record) -> Self:
        return cls(id_, _endpoint_of(record), h.attribute(record.headers, h.PREVIOUS))

    @property
    def place(self) -> str:
        """Where it is found again."""
        return f"/v1/{'responses' if self.endpoint is Endpoint.RESPONSES else 'calls'}/{self.id}"

    def response(self, said: Mapping[str, Any]) -> dict[str, Any]:
        return {**said, "id": self.id, **({} if self.previous is None else {_PREVIOUS: self.previous})}

    def result(self, result: Result) -> Result:
        if self.endpoint is not Endpoint.RESPONSES or result.body is None:
            return result
        return result.model_copy(update={"body": self.response(result.body)})

    def piece(self, chunk: Chunk) -> Chunk:
        said = (chunk.data or {}).get("response")
        if self.endpoint is not Endpoint.RESPONSES or not isinstance(said, dict):
            return chunk
        return chunk.model_copy(update={"data": {**(chunk.data or {}), "response": self.response(said)}})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A body as its client sent it; with what was said before it, it may have ``max_bytes``.

    ``take`` is told what is held besides.
    """

    endpoint: Endpoint
    value: bytes
    max_bytes: int
    take: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """A call that is to be durable, and how it is to be answered."""

    call: CallName
    sent: Sent
    stream: bool
    background: bool
    """An object of the Responses API is the answer, at once."""
    later: bool
    """202 and a Location are."""
    keyed: bool
    """Who asks again with its key finds it; without one nobody does when the connection has gone."""


class Durable:
    """The door's side of durable calls.

    ``log`` gives them; None: this server has no broker. It raises Unavailable where it has one and has not read it.
    """

    def __init__(self, log: Callable[[], Calls | None], *, always: bool, ends_s: Callable[[str], float | None]) -> None:
        self._log = log
        self._ends_s = ends_s
        self._always = always

    def routes(self) -> list[Route]:
        """Where a call is found again by its id; as OpenAI's object, if it is a response."""
        found = []
        for path, kind in (("/v1/responses/{id}", Endpoint.RESPONSES), ("/v1/calls/{id}", None)):
            view = View(self._calls, only=kind, ends_s=self._ends_s)
            found.append(Route(path, view.get, methods=["GET"]))
            found.append(Route(path, view.delete, methods=["DELETE"]))
            found.append(Route(f"{path}/cancel", view.cancel, methods=["POST"]))
        return found

    async def continued(self, scope: Scope, sent: Sent) -> bytes:
        """A body that goes on with a durable response (``previous_response_id``), with all that was said before it.

        Other bodies are given back as they are. Raises Refused where that response is not finished, or not there.
        """
        previous = _previous(scope, sent)
        calls = None if previous is None else self._log()
        return sent.value if previous is None or calls is None else await _with_previous(calls, previous, sent)

    async def ask(
        self, request: Request, sent: Sent, headers: Headers, named: Mapping[str, str], *, door: Doorkeeper
    ) -> Response | None:
        """Write a call down that is to be durable, and give what answers it, without its body; None: it is not to be.

        One that was asked already is answered whatever its tenant may have now.

        Raises Refused, CallConflict, Overloaded, BrokerUnavailable, RecordRefused.
        """
        wish = self._wish(request, sent)
        if wish is None:
            return None
        calls = self._calls()
        call = await self._written(calls, wish, headers, door)
        if wish.background and not wish.stream:
            return Json(await _response(calls, wish.call, call.at, _object(wish.sent.value)))
        if wish.later:
            return _accepted(wish.call, named)
        return _Waiting(calls, wish.call, named, stream=wish.stream, findable=wish.keyed or wish.background)

    @staticmethod
    async def _written(calls: Calls, wish: Wish, headers: Headers, door: Doorkeeper) -> Call:
        """The call of a wish. One that was asked already, at any door, is what it was then, whatever it went on with.

        Raises as ``ask`` does.
        """
        id_, previous, value = wish.call.id, wish.call.previous, wish.sent.value
        if previous is not None:
            headers = [*headers, (h.PREVIOUS, previous.encode())]
            await calls.read_up()
        if calls.index.call(id_) is None:
            if previous is not None:
                value = await _with_previous(calls, previous, wish.sent)
            door.check(headers, len(value))
        return await calls.ask(id_, value, headers, sent=wish.sent.value)

    def _wish(self, request: Request, sent: Sent) -> Wish | None:
        """How a call is to be durable; None: not at all. Raises Refused for what can't be had."""
        endpoint, value = sent.endpoint, sent.value
        key, later = _key_of(request), _prefers_async(request)
        asked = _object(value) if later or key or self._always or b'"background"' in value else {}
        background = endpoint is Endpoint.RESPONSES and asked.get("background") is True
        if not (key or later or background or self._always):
            return None
        if background and not asked.get("store", True):
            raise Refused(errors.error(400, "background can only be used when `store` is true", param="background"))
        if self._log() is None:
            if key is None and not background:
                return None  # a preference may be passed over, says RFC 7240
            raise Refused(_no_broker(KEY if key else "background"))
        if background:
            sent = replace(sent, value=to_json({name: said for name, said in asked.items() if name != "background"}))
        return Wish(
            call=CallName(_id_of(owner_of(request.scope), key), sent.endpoint, _previous(request.scope, sent)),
            sent=sent,
            stream=asked.get("stream") is True,
            background=background,
            later=later,
            keyed=key is not None,
        )

    def _calls(self) -> Calls:
        calls = self._log()
        if calls is None:
            raise Refused(_no_broker(None))
        return calls


class View:
    """What there is of a durable call, for its owner. ``only``: calls of this endpoint, as its own objects.

    ``ends_s`` gives the seconds until one that is here ends, where that can be said.
    """

    def __init__(
        self, calls: Callable[[], Calls], *, only: Endpoint | None, ends_s: Callable[[str], float | None]
    ) -> None:
        self._calls = calls
        self._ends_s = ends_s
        self._only = only

    async def get(self, request: Request) -> Response:
        """The answer; what is there of it, where it is not finished; or its stream. Raises Refused."""
        calls, record, id_ = await self._found(request)
        if request.query_params.get("stream") in {"true", "1"}:
            if _object(record.value).get("stream") is not True:
                raise Refused(
                    errors.error(400, "It was not asked with stream: true, and has no stream", param="stream")
                )
            return _Streaming(calls, CallName.of(id_, record), _starting_after(request))
        return await self._now(calls, id_, record)

    async def cancel(self, request: Request) -> Response:
        """End it, and say how it is then; it may have been finished first. Raises Refused."""
        calls, record, id_ = await self._found(request)
        with calls.following(id_) as following, suppress(TimeoutError):
            if await calls.result(id_) is None:
                await calls.cancel(id_)
                async with asyncio.timeout(_CANCELLED_WITHIN_S):
                    while not isinstance(await following.next(), Result):
                        pass
        return await self._now(calls, id_, record)

    async def delete(self, request: Request) -> Response:
        """Nobody finds it from now on. Raises Refused."""
        calls, _, id_ = await self._found(request)
        await calls.delete(id_)
        return JSONResponse({"id": id_, "object": "response" if self._only else "call", "deleted": True})

    async def _found(self, request: Request) -> tuple[Calls, Record, str]:
        """The call of the id in the path, if it is the asker's. Raises Refused."""
        calls, id_ = self._calls(), request.path_params["id"]
        ours = id_.isascii() and id_.startswith(begin_of(_KIND, owner_of(request.scope)))
        record = await calls.find(id_) if ours else None
        if record is None or self._only not in {None, _endpoint_of(record)}:
            raise Refused(_not_found(id_))
        return calls, record, id_

    async def _now(self, calls: Calls, id_: str, record: Record) -> Response:
        call = CallName.of(id_, record)
        if self._only is not None:
            return Json(await _response(calls, call, record.timestamp, _object(record.value)))
        result = await calls.result(id_)
        if result is not None:
            return whole(call.result(result))
        body = {"id": id_, "object": "call", "status": _waiting(calls, id_), "created_at": int(record.timestamp)}
        return JSONResponse(body, 202, headers=errors.again_after(self._ends_s(id_)))


class _Waiting(Response):
    """The answer on the connection that asked; a call that is not ``findable`` after that ends with it."""

    def __init__(self, calls: Calls, call: CallName, named: Mapping[str, str], *, stream: bool, findable: bool) -> None:
        super().__init__()
        self._calls = calls
        self._call = call
        self._named = named
        self._stream = stream
        self._findable = findable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        id_, endpoint = self._call.id, self._call.endpoint
        with self._calls.following(id_) as following:
            pieces = _Pieces(following, self._call, stream=self._stream)
            try:
                await while_connected(reply(pieces, endpoint, self._named, scope, receive, send), receive)
            finally:
                if not (pieces.ended or self._findable):
                    await asyncio.shield(self._calls.cancel(id_))


class _Streaming(Response):
    """The stream of a call from its beginning, or after what was seen of it, for as long as its client is there."""

    def __init__(self, calls: Calls, call: CallName, after: int) -> None:
        super().__init__()
        self._calls = calls
        self._call = call
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._calls.following(self._call.id) as following:
            pieces = _Pieces(following, self._call, stream=True, after=self._after)
            await while_connected(reply(pieces, self._call.endpoint, {}, scope, receive, send), receive)


_NONE, _ANY = (-math.inf, -math.inf), (math.inf, math.inf)
"""Ranks before and behind those of all runs."""


class _Pieces:
    """What comes of a call, by its own name: the pieces of its stream to the last, behind ``after``, then the result.

    A result may overtake the last pieces, and is held back for them. Pieces may be lost, too: an answer of which not
    all were seen ends as a failure, so that no client takes it for whole.
    """

    def __init__(self, following: Following, call: CallName, *, stream: bool, after: int = -1) -> None:
        self._following = following
        self._call = call
        self._stream = stream
        self._after = after
        self._result: Result | None = None
        self._following_number = 0
        """Of the next piece, if none is missing."""
        self._whole: tuple[float, float] = _NONE if stream else _ANY
        """The rank of the run of which every piece has come, to the last one: that of a later one is another answer."""
        self.ended = False
        """Whether there is a result."""

    async def next(self) -> Chunk | Result:
        """The next piece, or the result. Raises Unavailable, BrokerUnavailable."""
        while self._result is None or self._waits_for_pieces(self._result):
            item = await self._next()
            if item is None:
                break
            if isinstance(item, Result):
                self._result, self.ended = self._result or item, True
                continue
            if self._stream:
                self._whole = item.attempt.rank if item.final and item.seq == self._following_number else _NONE
                self._following_number = item.seq + 1
            if item.data is not None and item.data.get("sequence_number", item.seq) > self._after:
                return self._call.piece(item)
        assert self._result is not None
        if self._waits_for_pieces(self._result):
            return _cut_off(self._result, self._call)
        return self._call.result(self._result)

    def _waits_for_pieces(self, result: Result) -> bool:
        """Whether something is missing before an answer; nobody needs the pieces of what failed."""
        return result.outcome is Outcome.COMPLETED and self._whole < result.attempt.rank

    async def _next(self) -> Chunk | Result | None:
        """None: what is still missing does not come."""
        if self._result is None:
            return await self._following.next()
        try:
            async with asyncio.timeout(_LAST_PIECES_WITHIN_S):
                return await self._following.next()
        except TimeoutError:
            return None


# --- whose it is ---


def owner_of(scope: Scope) -> str:
    """Who asks: the tenant of their key, or the key; without keys the tenant that they say they are."""
    owner: str | None = scope.get("state", {}).get("owner")
    if owner is not None:
        return owner
    given = Request(scope).headers
    return owner_named(given.get("x-gearshift-tenant") or given.get(h.TENANT) or "")


def _id_of(owner: str, key: str | None) -> str:
    """A new id; the same one for the same key of the same owner."""
    if key is None:
        return begin_of(_KIND, owner) + secrets.token_hex(_ID_BYTES)
    said = f"{len(owner)} {owner} {key}".encode("utf-8", "replace")
    return begin_of(_KIND, owner) + hashlib.sha256(said).hexdigest()[: 2 * _ID_BYTES]


# --- what is asked ---


def _key_of(request: Request) -> str | None:
    key: str | None = request.headers.get(KEY)
    if key is not None and not (0 < len(key) <= _LONGEST_KEY and key.isprintable()):
        raise Refused(errors.error(400, f"Idempotency-Key must be 1 to {_LONGEST_KEY} printable characters", param=KEY))
    return key


def _prefers_async(request: Request) -> bool:
    """Whether one of the preferences is ``respond-async``, as RFC 7240 writes them."""
    given = ",".join(request.headers.getlist("prefer"))
    return any(part.partition(";")[0].strip().lower() == "respond-async" for part in given.split(","))


def _starting_after(request: Request) -> int:
    raw = request.query_params.get("starting_after", "")
    if raw and not (raw.isascii() and raw.isdigit() and len(raw) <= _LONGEST_NUMBER):
        raise Refused(errors.error(400, "starting_after must be the number of an event", param="starting_after"))
    return int(raw) if raw else -1


def _object(value: bytes | None) -> dict[str, Any]:
    """A body, if it is a JSON object; what is wrong with it is the engine's to say."""
    with suppress(ValueError):
        found = read_json(value or b"")
        if isinstance(found, dict):
            return found
    return {}


def _previous(scope: Scope, sent: Sent) -> str | None:
    """The durable response that a body goes on with, there or not; None where none of who asks could be meant."""
    if sent.endpoint is not Endpoint.RESPONSES or b'"previous_response_id"' not in sent.value:
        return None
    id_ = _object(sent.value).get(_PREVIOUS)
    ours = isinstance(id_, str) and id_.isascii() and id_.startswith(begin_of(_KIND, owner_of(scope)))
    return id_ if ours else None


async def _with_previous(calls: Calls, id_: str, sent: Sent) -> bytes:
    """A body with all that was said before it. Raises Refused where that is not finished, or not there."""
    record, result = await calls.find(id_), await calls.result(id_)
    if record is None or _endpoint_of(record) is not Endpoint.RESPONSES:
        raise Refused(errors.error(404, f"Previous response with id '{id_}' not found.", param=_PREVIOUS))
    if result is None or result.outcome is not Outcome.COMPLETED:
        raise Refused(errors.error(400, f"Previous response '{id_}' is not completed.", param=_PREVIOUS))
    said = [*_items(_object(record.value).get("input")), *_items((result.body or {}).get("output"))]
    asked = _object(sent.value)
    del asked[_PREVIOUS]
    value = to_json({**asked, "input": [*said, *_items(asked.get("input"))]})
    if len(value) > sent.max_bytes:
        raise Refused(errors.error(413, f"With what was said before it, it has more than {sent.max_bytes} bytes"))
    sent.take(len(value))
    return value


def _items(said: Any) -> list[Any]:
    """What a response was asked, or has answered, as items; a text is what a user says."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    return said if isinstance(said, list) else []


def _endpoint_of(record: Record) -> Endpoint:
    """As the door wrote it; what somebody else wrote there is read as a chat."""
    found = h.attributes(record.headers).get(h.ENDPOINT)
    return PATHS.get(found or "", Endpoint.CHAT)


# --- what is answered ---


def _accepted(call: CallName, named: Mapping[str, str]) -> Response:
    headers = {**named, "location": call.place, "preference-applied": "respond-async"}
    return JSONResponse({"id": call.id, "object": "call", "status": "queued"}, 202, headers=headers)


def _cut_off(result: Result, call: CallName) -> Result:
    """What a stream ends with whose last pieces have not come, though there is an answer."""
    message = f"The stream's end did not come; the whole answer is at {call.place}"
    error = ErrorObject(message=message, type="InternalServerError", code=500)
    failed = {"outcome": Outcome.FAILED, "status": 500, "body": None, "error": error, "objective": None}
    return result.model_copy(update=failed)


def _waiting(calls: Calls, id_: str) -> str:
    return "queued" if calls.index.answer(id_) is None else "in_progress"


async def _response(calls: Calls, call: CallName, at: float, asked: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's object of a response as it is now. ``at``: when it was asked, since the epoch."""
    result = await calls.result(call.id)
    if result is not None and result.outcome is Outcome.COMPLETED:
        return {**call.response(result.body or {}), "background": True}
    found: dict[str, Any] = {
        "id": call.id,
        "object": "response",
        "created_at": int(at),
        "status": _waiting(calls, call.id),
        "background": True,
        "model": asked.get("model"),
        "output": [],
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": asked.get("tools", []),
        "usage": None,
        _PREVIOUS: call.previous,
        **{name: asked.get(name) for name in _TAKEN_OVER},
    }
    if result is None:
        return found
    if result.outcome is Outcome.CANCELLED:
        return {**found, "status": "cancelled"}
    error = result.error or ErrorObject(message=f"The request is {result.outcome}")
    return {**found, "status": "failed", "error": {"code": error.type, "message": error.message}}


def _not_found(id_: str) -> Response:
    return errors.error(404, f"No response with id '{id_[:100]}' found.", kind="NotFoundError", param="id")


def _no_broker(param: str | None) -> Response:
    return errors.error(400, "Durable calls need a broker, and this server runs without one", param=param)
