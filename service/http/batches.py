"""OpenAI's batches: what the log says of them."""

import time
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from schemas.batches import BatchAsked, BatchCancelled, BatchEnd, BatchEnded
from schemas.requests import Endpoint
from service.errors import BatchInvalid
from service.http import errors
from service.http.durable import owner_of
from service.http.errors import Refused
from service.http.files import BATCH, FILE, Found, named, page, there
from service.http.openai_routes import JSON, content_type, read_body, record_headers, tenant_of
from service.kafka.batch_lines import WINDOW_UNITS, window_of
from service.kafka.files import BATCH_INPUT, Batch, begin_of, new_id
from service.settings import Settings

PATH = "/v1/batches"
_MOST_LISTED = 100
_LISTED = 20
_BODY_BYTES = 64 << 10


class BatchBody(BaseModel):
    """What a batch is to be made of, as OpenAI takes it."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: str = "24h"
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None


class BatchRoutes:
    """The routes. ``found`` gives files and batches, as for the files' routes."""

    def __init__(self, found: Found, settings: Settings) -> None:
        self._found = found
        self._topics = settings.topics

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(PATH, self.list, methods=["GET"]),
            Route(PATH, self.create, methods=["POST"]),
            Route(f"{PATH}/{{id}}", self.get, methods=["GET"]),
            Route(f"{PATH}/{{id}}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Begin a batch. Only for JSON, as with a switch. Raises Refused, Overloaded, BrokerUnavailable."""
        if content_type(request) != JSON:
            return errors.error(415, f"Send {JSON}")
        files = there(self._found)
        with errors.of_what_was_sent():
            body = BatchBody.model_validate_json(await read_body(request, _BODY_BYTES))
        owner = owner_of(request.scope)
        await files.read_up()
        file = FILE.of(files.index, body.input_file_id, owner)
        if file is None or file.purpose != BATCH_INPUT:
            message = f"No batch input file of id {body.input_file_id[:100]!r} found"
            raise Refused(errors.error(404, message, kind="NotFoundError", param="input_file_id"))
        if file.endpoints != (body.endpoint,):
            message = f"The lines of the file ask for {', '.join(file.endpoints)}, and the batch for {body.endpoint}"
            raise Refused(errors.error(400, message, param="endpoint"))
        now = time.time()
        try:
            window_s = window_of(body.completion_window, file_at=file.at, now=now, topics=self._topics)
        except BatchInvalid as wrong:
            raise Refused(errors.error(400, f"completion_window {wrong}", param="completion_window")) from None
        files.require_room(owner)
        headers = record_headers(request.headers, body.endpoint, tenant=tenant_of(request.scope))[1:]
        asked = BatchAsked(
            id=new_id(BATCH.begin, owner),
            file=file.id,
            endpoint=body.endpoint,
            lines=file.lines,
            at=now,
            window_s=window_s,
            metadata=body.metadata,
            headers=tuple((name, value.decode()) for name, value in headers),
        )
        await files.store(asked)
        return JSONResponse(shown(Batch(asked)))

    async def list(self, request: Request) -> Response:
        """Those of who asks, the youngest first. Raises Refused, BrokerUnavailable."""
        files = there(self._found)
        await files.read_up()
        mine = files.index.batches(begin_of(BATCH.begin, owner_of(request.scope)))
        return JSONResponse(page([shown(one) for one in reversed(mine)], request, most=_MOST_LISTED, usual=_LISTED))

    async def get(self, request: Request) -> Response:
        """A batch as it is now. Raises Refused, BrokerUnavailable."""
        return JSONResponse(shown(await named(there(self._found), request, BATCH)))

    async def cancel(self, request: Request) -> Response:
        """Let nothing more of it be asked. Raises Refused, BrokerUnavailable."""
        files = there(self._found)
        batch = await named(files, request, BATCH)
        if batch.ended is not None:
            message = f"Cannot cancel a batch with status '{batch.ended.end}'."
            raise Refused(errors.error(409, message, kind="ConflictError"))
        if batch.cancelled is None:
            await files.store(BatchCancelled(id=batch.asked.id, at=time.time()))
        return JSONResponse(shown(await named(files, request, BATCH)))


def shown(batch: Batch) -> dict[str, Any]:
    """OpenAI's object."""
    asked, ended, cancelled = batch.asked, batch.ended, batch.cancelled
    ends = {end: int(ended.at) if ended is not None and ended.end is end else None for end in BatchEnd}
    return {
        "id": asked.id,
        "object": "batch",
        "endpoint": asked.endpoint,
        "errors": _errors(ended),
        "input_file_id": asked.file,
        "completion_window": _window(asked.window_s),
        "status": batch.status,
        "output_file_id": None if ended is None else ended.output,
        "error_file_id": None if ended is None else ended.errors,
        "created_at": int(asked.at),
        "in_progress_at": int(asked.at),
        "expires_at": int(batch.expires_at),
        "finalizing_at": None,
        "completed_at": ends[BatchEnd.COMPLETED],
        "failed_at": ends[BatchEnd.FAILED],
        "expired_at": ends[BatchEnd.EXPIRED],
        "cancelling_at": None if cancelled is None else int(cancelled.at),
        "cancelled_at": ends[BatchEnd.CANCELLED],
        "request_counts": {
            "total": asked.lines,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "metadata": asked.metadata,
    }


def _errors(ended: BatchEnded | None) -> dict[str, Any] | None:
    """OpenAI's list of why a batch has failed; None where it has not."""
    if ended is None or ended.end is not BatchEnd.FAILED:
        return None
    error = {"code": "batch_failed", "message": ended.reason or "The batch has failed", "param": None, "line": None}
    return {"object": "list", "data": [error]}


def _window(seconds: float) -> str:
    """As it was asked for, or the same in a smaller unit."""
    unit = next(unit for unit in "hm" if unit == "m" or seconds % WINDOW_UNITS[unit] == 0)
    return f"{seconds / WINDOW_UNITS[unit]:.0f}{unit}"
