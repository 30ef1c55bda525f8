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
from dataclasses import dataclass
from typing import Any

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
from service.kafka.calls import Calls
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
_TAKEN_OVER = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p")
"""What OpenAI's object repeats of its request."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A call that is to be durable: its id, and how it is to be answered."""

    id: str
    endpoint: Endpoint
    value: bytes
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

    async def continued(
        self, request: Request, endpoint: Endpoint, value: bytes, *, max_bytes: int, take: Callable[[int], None]
    ) -> bytes:
        """A body that goes on with a durable response (``previous_response_id``), with all that was said before it.

        Other bodies are given back as they are; ``take`` is told what is held besides. Raises Refused where that
        response is not finished, or not there.
        """
        if endpoint is not Endpoint.RESPONSES or b'"previous_response_id"' not in value:
            return value
        calls = self._log()
        if calls is None:
            return value
        asked = _object(value)
        id_ = asked.pop(_PREVIOUS, None)
        begin = begin_of(_KIND, owner_of(request.scope))
        if not isinstance(id_, str) or not id_.startswith(begin) or not id_.isascii():
            return value
        record, result = await calls.find(id_), await calls.result(id_)
        if record is None or _endpoint_of(record) is not Endpoint.RESPONSES:
            raise Refused(errors.error(404, f"Previous response with id '{id_}' not found.", param=_PREVIOUS))
        if result is None or result.outcome is not Outcome.COMPLETED:
            raise Refused(errors.error(400, f"Previous response '{id_}' is not completed.", param=_PREVIOUS))
        said = [*_items(_object(record.value).get("input")), *_items((result.body or {}).get("output"))]
        whole_value = to_json({**asked, "input": [*said, *_items(asked.get("input"))]})
        if len(whole_value) > max_bytes:
            raise Refused(errors.error(413, f"With what was said before it, it has more than {max_bytes} bytes"))
        take(len(whole_value))
        return whole_value

    async def ask(
        self,
        request: Request,
        endpoint: Endpoint,
        value: bytes,
        headers: Headers,
        named: Mapping[str, str],
        *,
        door: Doorkeeper,
    ) -> Response | None:
        """Write a call down that is to be durable, and give what answers it, without its body; None: it is not to be.

        One that was asked already is answered whatever its tenant may have now.

        Raises Refused, CallConflict, Overloaded, BrokerUnavailable, RecordRefused.
        """
        wish = self._wish(request, endpoint, value)
        if wish is None:
            return None
        calls = self._calls()
        if calls.index.call(wish.id) is None:
            door.check(headers, len(wish.value))
        call = await calls.ask(wish.id, wish.value, headers)
        if wish.background and not wish.stream:
            record = Record(calls.topic, call.partition, call.offset, call.at, wish.id.encode(), wish.value)
            return Json(await _response(calls, wish.id, record))
        if wish.later:
            return _accepted(wish, named)
        return _Waiting(
            calls, wish.id, wish.endpoint, named, stream=wish.stream, findable=wish.keyed or wish.background
        )

    def _wish(self, request: Request, endpoint: Endpoint, value: bytes) -> Wish | None:
        """How a call is to be durable; None: not at all. Raises Refused for what can't be had."""
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
            value = to_json({name: said for name, said in asked.items() if name != "background"})
        return Wish(
            id=_id_of(owner_of(request.scope), key),
            endpoint=endpoint,
            value=value,
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
            return _Streaming(calls, id_, _endpoint_of(record), _starting_after(request))
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
        if self._only is not None:
            return Json(await _response(calls, id_, record))
        result = await calls.result(id_)
        if result is not None:
            return whole(_named(result, id_, _endpoint_of(record)))
        body = {"id": id_, "object": "call", "status": _waiting(calls, id_), "created_at": int(record.timestamp)}
        return JSONResponse(body, 202, headers=errors.again_after(self._ends_s(id_)))


class _Waiting(Response):
    """The answer on the connection that asked; a call that is not ``findable`` after that ends with it."""

    def __init__(
        self, calls: Calls, id_: str, endpoint: Endpoint, named: Mapping[str, str], *, stream: bool, findable: bool
    ) -> None:
        super().__init__()
        self._calls = calls
        self._id = id_
        self._endpoint = endpoint
        self._named = named
        self._stream = stream
        self._findable = findable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._calls.following(self._id) as following:
            pieces = _Pieces(following, self._endpoint, stream=self._stream)
            try:
                await while_connected(reply(pieces, self._endpoint, self._named, scope, receive, send), receive)
            finally:
                if not (pieces.ended or self._findable):
                    await asyncio.shield(self._calls.cancel(self._id))


class _Streaming(Response):
    """The stream of a call from its beginning, or after what was seen of it, for as long as its client is there."""

    def __init__(self, calls: Calls, id_: str, endpoint: Endpoint, after: int) -> None:
        super().__init__()
        self._calls = calls
        self._id = id_
        self._endpoint = endpoint
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._calls.following(self._id) as following:
            pieces = _Pieces(following, self._endpoint, stream=True, after=self._after)
            await while_connected(reply(pieces, self._endpoint, {}, scope, receive, send), receive)


_NONE, _ANY = (-math.inf, -math.inf), (math.inf, math.inf)
"""Ranks before and behind those of all runs."""


class _Pieces:
    """What comes of a call, under its own id: the pieces of its stream to the last, behind ``after``, then the result.

    A result may overtake the last pieces, and is held back for them. Pieces may be lost, too: an answer of which not
    all were seen ends as a failure, so that no client takes it for whole.
    """

    def __init__(self, following: Following, endpoint: Endpoint, *, stream: bool, after: int = -1) -> None:
        self._following = following
        self._endpoint = endpoint
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
                return _piece(item, self._following.id, self._endpoint)
        assert self._result is not None
        if self._waits_for_pieces(self._result):
            return _cut_off(self._result, self._following.id, self._endpoint)
        return _named(self._result, self._following.id, self._endpoint)

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


def _accepted(wish: Wish, named: Mapping[str, str]) -> Response:
    headers = {**named, "location": _place_of(wish.id, wish.endpoint), "preference-applied": "respond-async"}
    return JSONResponse({"id": wish.id, "object": "call", "status": "queued"}, 202, headers=headers)


def _place_of(id_: str, endpoint: Endpoint) -> str:
    """Where a call is found again."""
    return f"/v1/{'responses' if endpoint is Endpoint.RESPONSES else 'calls'}/{id_}"


def _cut_off(result: Result, id_: str, endpoint: Endpoint) -> Result:
    """What a stream ends with whose last pieces have not come, though there is an answer."""
    message = f"The stream's end did not come; the whole answer is at {_place_of(id_, endpoint)}"
    error = ErrorObject(message=message, type="InternalServerError", code=500)
    failed = {"outcome": Outcome.FAILED, "status": 500, "body": None, "error": error, "objective": None}
    return result.model_copy(update=failed)


def _waiting(calls: Calls, id_: str) -> str:
    return "queued" if calls.index.answer(id_) is None else "in_progress"


async def _response(calls: Calls, id_: str, record: Record) -> dict[str, Any]:
    """OpenAI's object of a response as it is now."""
    result = await calls.result(id_)
    if result is not None and result.outcome is Outcome.COMPLETED:
        return {**(_named(result, id_, Endpoint.RESPONSES).body or {}), "background": True}
    asked = _object(record.value)
    found: dict[str, Any] = {
        "id": id_,
        "object": "response",
        "created_at": int(record.timestamp),
        "status": _waiting(calls, id_),
        "background": True,
        "model": asked.get("model"),
        "output": [],
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": asked.get("tools", []),
        "usage": None,
        **{name: asked.get(name) for name in _TAKEN_OVER},
    }
    if result is None:
        return found
    if result.outcome is Outcome.CANCELLED:
        return {**found, "status": "cancelled"}
    error = result.error or ErrorObject(message=f"The request is {result.outcome}")
    return {**found, "status": "failed", "error": {"code": error.type, "message": error.message}}


def _named(result: Result, id_: str, endpoint: Endpoint) -> Result:
    """A response's object has the id under which it is found; other answers are as they are."""
    if endpoint is not Endpoint.RESPONSES or result.body is None:
        return result
    return result.model_copy(update={"body": {**result.body, "id": id_}})


def _piece(chunk: Chunk, id_: str, endpoint: Endpoint) -> Chunk:
    response = (chunk.data or {}).get("response")
    if endpoint is not Endpoint.RESPONSES or not isinstance(response, dict):
        return chunk
    return chunk.model_copy(update={"data": {**(chunk.data or {}), "response": {**response, "id": id_}}})


def _not_found(id_: str) -> Response:
    return errors.error(404, f"No response with id '{id_[:100]}' found.", kind="NotFoundError", param="id")


def _no_broker(param: str | None) -> Response:
    return errors.error(400, "Durable calls need a broker, and this server runs without one", param=param)
