"""Errors over HTTP: OpenAI's error object, as vLLM's server shapes it, whatever went wrong.

Where Anthropic's client asks it is Anthropic's.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from schemas.errors import ErrorObject
from schemas.requests import Endpoint

ANTHROPIC = frozenset({Endpoint.MESSAGES, Endpoint.COUNT_TOKENS})
RETRY_AFTER = "retry-after"
_LATER = frozenset({429, 503})


class ErrorResponse(JSONResponse):
    """An error, in the shape that whoever asks at a path expects."""

    def __init__(self, status: int, found: ErrorObject, headers: Mapping[str, str] | None = None) -> None:
        super().__init__({"error": found.model_dump()}, status, headers)
        self._found = found

    def at(self, path: str) -> "ErrorResponse":
        """This error as it is sent from a path."""
        if path in ANTHROPIC:
            self.body = self.render(anthropic(self._found))
            self.headers["content-length"] = str(len(self.body))
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super(ErrorResponse, self.at(scope["path"])).__call__(scope, receive, send)


def anthropic(found: ErrorObject) -> dict[str, Any]:
    """An error as Anthropic's API gives it, with vLLM's name for it, as its server does."""
    return {"type": "error", "error": {"type": found.type, "message": found.message}}


def error(
    status: int,
    message: str,
    *,
    kind: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ErrorResponse:
    """A response with an error object; ``kind`` is the status' own phrase unless given."""
    answer = of(status, ErrorObject(message=message, type=kind or _phrase(status), param=param, code=status))
    answer.headers.update(headers or {})
    return answer


def of(status: int, found: ErrorObject) -> ErrorResponse:
    """The response for an error object; one that passes says when to try again."""
    return ErrorResponse(status, found, again_after() if status in _LATER else None)


def again_after(seconds: float | None = None) -> dict[str, str]:
    """The header that says when to ask again: after a second, where it is not known."""
    return {RETRY_AFTER: str(max(1, math.ceil(seconds or 0.0)))}


class Refused(Exception):
    """The request is answered without being asked."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


@contextmanager
def of_what_was_sent() -> Iterator[None]:
    """What is made here of a request's own words, and is not valid, refuses it: the first thing wrong is named.

    Raises Refused.
    """
    try:
        yield
    except ValidationError as wrong:
        first = wrong.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(error(400, f"{where or 'body'}: {first['msg']}", param=where or None)) from None


async def http_exception(_request: Request, raised: Exception) -> ErrorResponse:
    """No such path, or not with this method."""
    assert isinstance(raised, HTTPException)
    return error(raised.status_code, raised.detail, headers=raised.headers)


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in {each.value for each in HTTPStatus} else "Error"
