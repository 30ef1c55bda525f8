"""Errors over HTTP: OpenAI's error object, as vLLM's server shapes it, whatever went wrong."""

from collections.abc import Mapping
from http import HTTPStatus

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.errors import ErrorObject

RETRY_AFTER_S = "1"
_LATER = frozenset({429, 503})


def error(
    status: int,
    message: str,
    *,
    kind: str | None = None,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """A response with an error object; ``kind`` is the status' own phrase unless given."""
    answer = of(status, ErrorObject(message=message, type=kind or _phrase(status), param=param, code=status))
    answer.headers.update(headers or {})
    return answer


def of(status: int, found: ErrorObject) -> JSONResponse:
    """The response for an error object; one that passes says when to try again."""
    later = {"retry-after": RETRY_AFTER_S} if status in _LATER else None
    return JSONResponse({"error": found.model_dump()}, status, headers=later)


def invalid(wrong: ValidationError) -> JSONResponse:
    """The first thing that is wrong with what was sent."""
    first = wrong.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return error(400, f"{where or 'body'}: {first['msg']}", param=where or None)


class Refused(Exception):
    """The request is answered without being asked."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


async def http_exception(_request: Request, raised: Exception) -> JSONResponse:
    """No such path, or not with this method."""
    assert isinstance(raised, HTTPException)
    return error(raised.status_code, raised.detail, headers=raised.headers)


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in {each.value for each in HTTPStatus} else "Error"
