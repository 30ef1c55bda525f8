"""OpenAI's files: what batches are made of, and what they write, in the log behind every door."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from schemas.batches import StoredFile
from service.errors import BatchInvalid, FileLost
from service.http import errors
from service.http.durable import owner_of
from service.http.errors import Refused
from service.http.upload import Upload
from service.kafka import files as kept
from service.kafka.batch_lines import Arriving
from service.kafka.files import BATCH_INPUT, Batch, FileIndex, Files, Writing, begin_of
from service.settings import Settings

PATH = "/v1/files"
_FORM_BYTES = 64 << 10
"""What a form has beside its file."""
_MOST_LISTED = 10_000
T = TypeVar("T")
Found = Callable[[], Files | None]
Hold = Callable[[int], None]
"""Told how many bytes are held from now on; raises Overloaded where they have no room."""
Holding = AbstractContextManager[Hold]


class FileRoutes:
    """The routes. ``found`` gives the files; None: this server has no broker. It raises Unavailable until it knows."""

    def __init__(self, found: Found, settings: Settings, holding: Callable[[], Holding]) -> None:
        """``holding``: where counts what is held of a file that comes."""
        self._found = found
        self._holding = holding
        self._settings = settings

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(PATH, self.list, methods=["GET"]),
            Route(PATH, self.upload, methods=["POST"]),
            Route(f"{PATH}/{{id}}", self.get, methods=["GET"]),
            Route(f"{PATH}/{{id}}", self.delete, methods=["DELETE"]),
            Route(f"{PATH}/{{id}}/content", self.content, methods=["GET"]),
        ]

    async def upload(self, request: Request) -> Response:
        """Store a file as it comes, and check it meanwhile.

        Raises Refused, Overloaded, BrokerUnavailable, ClientDisconnect.
        """
        files, most = there(self._found), self._settings.http.http_max_file_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most + _FORM_BYTES:
            raise Refused(_too_large(most))
        owner = owner_of(request.scope)
        files.require_room(owner)
        upload = Upload(request.headers.get("content-type", ""))
        lines = Arriving(
            most_lines=self._settings.http.http_most_batch_lines,
            most_bytes=self._settings.worker.max_request_bytes,
        )
        async with files.writing(begin_of(FILE.begin, owner)) as writing:
            with self._holding() as hold:
                await self._take_all(request, upload, writing, lines, hold)
                file = await writing.finish(
                    filename=upload.filename,
                    purpose=BATCH_INPUT,
                    lines=len(lines.known),
                    endpoints=tuple(sorted(lines.known.endpoints)),
                )
        return JSONResponse(self._shown(file))

    async def _take_all(self, request: Request, upload: Upload, writing: Writing, lines: Arriving, hold: Hold) -> None:
        """Raises Refused, Overloaded, BrokerUnavailable, ClientDisconnect."""
        most = self._settings.http.http_max_file_bytes
        try:
            async for piece in request.stream():
                data = upload.feed(piece)
                if "purpose" in upload.fields:  # said before what its lines are like, which only a batch's file has
                    _look_at_purpose(upload)
                if writing.size + len(data) > most:
                    raise Refused(_too_large(most))
                lines.take(data)
                hold(lines.held + writing.held + len(data))
                await writing.write(data)
                hold(lines.held + writing.held)
            upload.end()
            _look_at_purpose(upload)
            lines.end()
        except BatchInvalid as wrong:
            raise Refused(errors.error(400, str(wrong), param="file")) from None
        except FileLost as late:
            raise Refused(errors.error(408, str(late), param="file")) from None

    async def list(self, request: Request) -> Response:
        """Those of who asks, the youngest first unless ``order=asc``. Raises Refused, BrokerUnavailable."""
        files, asked = there(self._found), request.query_params
        await files.read_up()
        mine = files.index.files(begin_of(FILE.begin, owner_of(request.scope)))
        if asked.get("purpose"):
            mine = [file for file in mine if file.purpose == asked["purpose"]]
        if asked.get("order") != "asc":
            mine.reverse()
        return JSONResponse(page([self._shown(file) for file in mine], request, most=_MOST_LISTED))

    async def get(self, request: Request) -> Response:
        """What is known of a file. Raises Refused, BrokerUnavailable."""
        return JSONResponse(self._shown(await named(there(self._found), request, FILE)))

    async def content(self, request: Request) -> Response:
        """The file itself; before anything is said of it there must be some. Raises Refused, BrokerUnavailable."""
        files = there(self._found)
        file = await named(files, request, FILE)
        pieces = files.content(file)
        try:
            first = await anext(pieces, b"")
        except FileLost as lost:
            raise Refused(errors.error(404, str(lost), kind="NotFoundError")) from None
        headers = {"content-length": str(file.size)}
        return StreamingResponse(_all(first, pieces), media_type="application/octet-stream", headers=headers)

    async def delete(self, request: Request) -> Response:
        """Nobody finds it from now on. Raises Refused, BrokerUnavailable."""
        files = there(self._found)
        file = await named(files, request, FILE)
        if files.index.is_read(file.id):
            raise Refused(errors.error(409, "A batch that has not ended is made of this file", kind="ConflictError"))
        await files.delete(file)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    def _shown(self, file: StoredFile) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "id": file.id,
            "object": "file",
            "bytes": file.size,
            "created_at": int(file.at),
            "expires_at": int(file.at + self._settings.topics.files_retention_s),
            "filename": file.filename,
            "purpose": file.purpose,
            "status": "processed",
        }


async def _all(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in others:
        yield piece


def _look_at_purpose(upload: Upload) -> None:
    if upload.fields.get("purpose") != BATCH_INPUT:
        message = f"purpose must be {BATCH_INPUT!r}: nothing else is done with files"
        raise Refused(errors.error(400, message, param="purpose"))


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """What is found by its id: how such ids begin, how the index has it, and what is said where there is none."""

    begin: str
    in_index: Callable[[FileIndex, str], T | None]
    none: str

    def of(self, index: FileIndex, id_: str, owner: str) -> T | None:
        """What there is of this id, if it is this owner's."""
        return self.in_index(index, id_) if id_.startswith(begin_of(self.begin, owner)) else None


FILE: Kind[StoredFile] = Kind(kept.FILE, FileIndex.file, "No such File object: {}")
BATCH: Kind[Batch] = Kind(kept.BATCH, FileIndex.batch, "No batch found with id '{}'.")


async def named(files: Files, request: Request, kind: Kind[T]) -> T:
    """What a path names, if it is the asker's. Raises Refused, BrokerUnavailable."""
    id_ = request.path_params["id"]
    await files.read_up()
    found = kind.of(files.index, id_, owner_of(request.scope))
    if found is None:
        raise Refused(errors.error(404, kind.none.format(id_[:100]), kind="NotFoundError", param="id"))
    return found


def there(found: Found) -> Files:
    """Raises Refused without a broker, Unavailable until it is known what there is."""
    files = found()
    if files is None:
        raise Refused(errors.error(400, "Files and batches need a broker, and this server runs without one"))
    return files


def page(shown: Sequence[dict[str, Any]], request: Request, *, most: int, usual: int | None = None) -> dict[str, Any]:
    """Some of a list, ``limit`` (or the ``usual``) of those behind ``after``, as OpenAI gives them. Raises Refused."""
    asked = request.query_params
    limit = usual or most
    if "limit" in asked:
        with suppress(ValueError):
            limit = int(asked["limit"][:9])
        if not (asked["limit"].isdecimal() and 1 <= limit <= most):
            raise Refused(errors.error(400, f"limit must be a number from 1 to {most}", param="limit"))
    ids = [one["id"] for one in shown]
    first = ids.index(asked["after"]) + 1 if asked.get("after") in ids else 0
    data = shown[first : first + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": first + limit < len(shown),
    }


def _too_large(most: int) -> Response:
    return errors.error(413, f"The file is too large; at most {most} bytes are taken", param="file")
