"""OpenAI's batch files: a line per request, a line per answer."""

import codecs
import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from schemas.base import immutable, read_json
from schemas.errors import nearest
from schemas.requests import PATHS, Endpoint
from schemas.results import Outcome, Result
from service.errors import BatchInvalid
from service.settings import TopicSettings

_LONGEST_ID = 512
"""Of a custom id over HTTP, in bytes: those of a whole batch are held while it is worked on."""
_FILE_OUTLASTS_S = 3600.0
"""A batch's file is kept for so much longer than its window, or for a quarter of its time: a file counts from its end,
which may be half an hour after its beginning, and a batch's end takes time, too."""
_KNOWN_BYTES = 160
"""Of memory, for each line that is known: its digest, its number, and their place."""
WINDOW_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
_WINDOW = re.compile(r"([1-9]\d{0,3})([mhd])")
_NO_RESPONSE = {Outcome.CANCELLED: "batch_cancelled", Outcome.EXPIRED: "batch_expired"}


@immutable
class Line:
    """One request of a batch; ``number`` counts from 1."""

    number: int
    custom_id: str
    endpoint: Endpoint
    body: Mapping[str, Any]


def content_of(number: int, raw: bytes) -> bytes:
    """What a line has to say; the first one may begin with the mark by which some editors tell UTF-8."""
    return (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip()


def parse_line(number: int, raw: str | bytes) -> Line:
    """Raises BatchInvalid with the line's number and what is wrong; whatever is taken can be written as JSON again."""
    try:
        data = read_json(raw)
    except ValueError as error:
        raise BatchInvalid(f"line {number}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BatchInvalid(f"line {number}: not a JSON object")
    custom_id, url, body = data.get("custom_id"), data.get("url"), data.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchInvalid(f"line {number}: custom_id must be a string")
    if data.get("method", "POST") != "POST":
        raise BatchInvalid(f"line {number}: method must be POST, not {data['method']!r}")
    if not isinstance(url, str):
        raise BatchInvalid(f"line {number}: url must be a string")
    if url not in PATHS:
        raise BatchInvalid(f"line {number}: unknown url {url!r}{nearest(url, PATHS)}")
    if not isinstance(body, dict):
        raise BatchInvalid(f"line {number}: body must be an object")
    if body.get("stream"):
        raise BatchInvalid(f"line {number}: a batch has no streams")
    return Line(number, custom_id, PATHS[url], body)


class KnownLines:
    """The lines of a batch that have been read, told apart by their custom ids, and what they ask for."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        """By a digest of the custom id, which may be long."""
        self.endpoints: set[Endpoint] = set()

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def endpoint(self) -> Endpoint:
        """The one that all ask for. Raises BatchInvalid where there are several."""
        if len(self.endpoints) > 1:
            raise BatchInvalid(f"the lines ask for {', '.join(sorted(self.endpoints))}, and a batch has one endpoint")
        (found,) = self.endpoints
        return found

    def add(self, line: Line) -> None:
        """Raises BatchInvalid where another line has its custom id."""
        digest_ = hashlib.sha256(line.custom_id.encode()).digest()[:16]
        if digest_ in self._numbers:
            raise BatchInvalid(
                f"line {line.number}: custom_id {line.custom_id[:100]!r} is that of line {self._numbers[digest_]}"
            )
        self._numbers[digest_] = line.number
        self.endpoints.add(line.endpoint)


class Arriving:
    """A batch's input that comes in pieces, checked line by line; a line of it is held, and marks of those before."""

    def __init__(self, *, most_lines: int, most_bytes: int) -> None:
        self.known = KnownLines()
        self._most_lines = most_lines
        self._most_bytes = most_bytes
        self._rest = b""
        self._number = 0

    @property
    def held(self) -> int:
        """Bytes of what is kept: a line that has not ended, and what is known of those before it."""
        return len(self._rest) + _KNOWN_BYTES * len(self.known)

    def take(self, data: bytes) -> None:
        """Raises BatchInvalid."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for raw in whole:
            self._check(raw)
        if len(self._rest) > self._most_bytes:
            raise BatchInvalid(f"line {self._number + 1}: a request has at most {self._most_bytes} bytes")

    def end(self) -> None:
        """All has come. Raises BatchInvalid."""
        self._check(self._rest)
        if not self.known.endpoints:
            raise BatchInvalid("the file has no requests")

    def _check(self, raw: bytes) -> None:
        self._number += 1
        self._bound(len(raw))
        if not (content := content_of(self._number, raw)):
            return
        line = parse_line(self._number, content)
        self._bound(len(to_json(line.body)))
        if len(line.custom_id.encode()) > _LONGEST_ID:
            raise BatchInvalid(f"line {self._number}: a custom_id has at most {_LONGEST_ID} bytes")
        self.known.add(line)
        if len(self.known) > self._most_lines:
            raise BatchInvalid(f"line {self._number}: a batch has at most {self._most_lines} requests")

    def _bound(self, size: int) -> None:
        """A line as it came, and its body as it will be written: numbers may become longer."""
        if size > self._most_bytes:
            raise BatchInvalid(f"line {self._number}: a request has at most {self._most_bytes} bytes")


def window_of(given: str, *, file_at: float, now: float, topics: TopicSettings) -> float:
    """How long a batch of a file that was stored at ``file_at`` may take, in seconds. Raises BatchInvalid.

    Its answers are kept as calls, and whoever takes the batch over reads its file again: both are there to its end.
    Moments are seconds since the epoch.
    """
    found = _WINDOW.fullmatch(given)
    window_s = float(found[1]) * WINDOW_UNITS[found[2]] if found else 0.0
    read_s = topics.files_retention_s - min(_FILE_OUTLASTS_S, topics.files_retention_s / 4)
    longest_s = min(topics.calls_retention_s / 2, read_s)
    if not 0 < window_s <= longest_s:
        raise BatchInvalid(f"must be like 24h, and {longest_s:g} s at most: calls and files are kept no longer")
    left_s = file_at + read_s - now
    if window_s > left_s:
        expires = datetime.fromtimestamp(file_at + topics.files_retention_s, UTC)
        shorter = f", or take {left_s:.0f} s at most" if left_s >= WINDOW_UNITS["m"] else ""
        when = f"{expires:%Y-%m-%dT%H:%M:%SZ}"
        raise BatchInvalid(f"is too long for a file that expires at {when}: upload it again{shorter}")
    return window_s


def digest(path: Path) -> str:
    """Tells one input file from another. Raises BatchInvalid."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BatchInvalid(f"{path}: {error.strerror}") from None


def never_answered(id_: str, custom_id: str, why: str) -> dict[str, Any]:
    """The error file's line of a request without an answer; ``why``: how its batch ended."""
    error = {"code": f"batch_{why}", "message": f"The batch was {why} before this request was answered"}
    return {"id": id_, "custom_id": custom_id, "response": None, "error": error}


def output_line(custom_id: str, result: Result) -> dict[str, Any]:
    """A result as a line of the output or the error file."""
    line: dict[str, Any] = {"id": result.id, "custom_id": custom_id, "response": None, "error": None}
    error = None if result.error is None else result.error.model_dump(mode="json")
    if result.outcome in _NO_RESPONSE:
        message = "" if result.error is None else result.error.message
        return {**line, "error": {"code": _NO_RESPONSE[result.outcome], "message": message}}
    body = {"error": error} if error is not None else result.body
    return {**line, "response": {"status_code": result.status, "request_id": result.id, "body": body}}
