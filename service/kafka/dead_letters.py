"""Dead letters: requests that can't succeed as they are, kept by class, to look at and to try again."""

import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from schemas import headers as h
from schemas.base import Headers, Outgoing, Record, read_json
from schemas.errors import ErrorObject, FailureClass
from schemas.marks import left
from service.errors import UnknownDeadLetter
from service.kafka.producer import IdempotentProducer
from service.kafka.reader import TopicReader
from service.settings import Settings, TopicSettings

HISTORY = "redrive-history"
"""The header that keeps what became of the earlier tries: a JSON list of their id, class, attempts and time."""
_NO_MOMENT = datetime.fromtimestamp(0, UTC)
_COUNT = re.compile(r"[0-9]{1,9}")
_REDRIVEN_AS = h.DEAD_LETTER + "redriven-as"
_OF_THE_OLD_TRY = frozenset(
    h.canonical(name)
    for name in ("id", h.REDRIVE_OF, HISTORY, h.DEADLINE, h.MOVED_FROM, h.RECEIVED, h.DEATHS, h.POOL_SIGNATURE)
)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A failed request: why it failed, and the record as its producer wrote it."""

    id: str
    failure: FailureClass | str
    error: ErrorObject
    attempts: int
    at: datetime
    topic: str
    """Where the request was read from; ``origin`` is the whole place."""
    origin: str
    value: bytes | None
    headers: Headers
    redriven_as: str | None = None

    @property
    def history(self) -> tuple[dict[str, Any], ...]:
        """What became of the tries before this one, the oldest first."""
        raw = next((value for name, value in self.headers if name == HISTORY), None)
        try:
            tries = read_json(raw or b"[]")
        except ValueError:
            return ()
        return tuple(one for one in tries if isinstance(one, dict)) if isinstance(tries, list) else ()


def read_dead_letter(record: Record) -> DeadLetter:
    """A record of the dead-letter topic; what a stranger wrote there is shown as well as can be."""
    ours = {
        name: value.decode("utf-8", "replace")
        for name, value in record.headers
        if value is not None and name.startswith(h.DEAD_LETTER)
    }

    def said(name: str, default: str = "") -> str:
        return ours.get(h.DEAD_LETTER + name, default)

    try:
        error = ErrorObject.model_validate_json(said("error", "{}"))
    except ValidationError:
        error = ErrorObject(message=said("error"))
    attempts = said("attempts", "0")
    failure = said("class", "unknown")
    origin = said("origin", str(record.origin))
    return DeadLetter(
        id=said("id", (record.key or b"").decode("utf-8", "replace")),
        failure=FailureClass(failure) if failure in set(FailureClass) else failure,
        error=error,
        attempts=int(attempts) if _COUNT.fullmatch(attempts) else 0,
        at=_moment(said("at")) or _moment(repr(record.timestamp)) or _NO_MOMENT,
        topic=origin.rsplit("/", 2)[0],
        origin=origin,
        value=record.value,
        headers=tuple((name, value) for name, value in record.headers if not name.startswith(h.DEAD_LETTER)),
    )


def redriven(letter: DeadLetter, new_id: str) -> Outgoing:
    """The same request once more: a new id with ``redrive-of``, its history, and no deadline that has passed."""
    tried = {
        "id": letter.id,
        "class": str(letter.failure),
        "attempts": letter.attempts,
        "at": letter.at.isoformat(timespec="milliseconds"),
    }
    headers = [(name, value) for name, value in letter.headers if h.canonical(name) not in _OF_THE_OLD_TRY]
    headers += [
        ("ce_id", new_id.encode()),
        (h.REDRIVE_OF, letter.id.encode()),
        (HISTORY, json.dumps([*letter.history, tried]).encode()),
    ]
    return Outgoing(
        topic=letter.topic,
        key=new_id.encode(),
        value=_asked_anew(letter.value, letter.headers, new_id),
        headers=headers,
    )


def where_asked(letter: DeadLetter, topics: TopicSettings) -> DeadLetter:
    """A durable call that was moved is asked again among the calls, which are answered; what was moved for its
    tenant's quota, where it was before: only workers write there."""
    found = h.attributes(letter.headers)
    if found.get(h.REPLY_TO) == topics.named(topics.answers):
        return replace(letter, topic=topics.named(topics.calls))
    if letter.topic != topics.named(topics.throttled):
        return letter
    before = left(found) or ""
    return replace(letter, topic=before if topics.takes_requests(before) else topics.named(topics.requests))


def _asked_anew(value: bytes | None, headers: Headers, new_id: str) -> bytes | None:
    """A structured CloudEvent has its attributes inside."""
    structured = (h.attributes(headers).get(h.CONTENT_TYPE) or "").startswith(h.CLOUDEVENT_JSON)
    if not structured or value is None:
        return value
    try:
        event = read_json(value)
    except ValueError:
        return value
    if not isinstance(event, dict):
        return value
    kept = {name: said for name, said in event.items() if h.canonical(name) not in _OF_THE_OLD_TRY}
    return json.dumps({**kept, "id": new_id}).encode()


def _moment(text: str) -> datetime | None:
    """The moment that seconds since the epoch say, if they say one."""
    try:
        return datetime.fromtimestamp(float(text), UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _note(letter: DeadLetter, new_id: str, topic: str) -> Outgoing:
    """Says beside a dead letter that it was redriven; the letter itself stays."""
    said = {_REDRIVEN_AS: new_id, h.DEAD_LETTER + "id": letter.id, h.DEAD_LETTER + "origin": letter.origin}
    return Outgoing(
        topic=topic, key=letter.id.encode(), value=None, headers=[(name, text.encode()) for name, text in said.items()]
    )


def collect(records: Iterable[Record]) -> list[DeadLetter]:
    """Dead letters in the order they came, each with what it was last redriven as."""
    letters: dict[str, DeadLetter] = {}
    for record in records:
        letter = read_dead_letter(record)
        again = next((value for name, value in record.headers if name == _REDRIVEN_AS), None)
        if again is None:
            letters[letter.origin] = letter
        elif letter.origin in letters:
            letters[letter.origin] = replace(letters[letter.origin], redriven_as=again.decode("utf-8", "replace"))
    return list(letters.values())


async def dead_letters(settings: Settings, *, failure: FailureClass | None = None) -> list[DeadLetter]:
    """All that are kept, the oldest first, or those of one class. Raises TopicError, BrokerUnavailable."""
    topic = settings.topics.named(settings.topics.dead_letters)
    async with TopicReader(kafka=settings.kafka, topics=[topic]) as tail:
        letters = collect([record async for record in tail.backlog()])
    return [letter for letter in letters if failure in (None, letter.failure)]


async def dead_letter(settings: Settings, id_: str) -> DeadLetter:
    """The latest dead letter of a request, by its id or its origin. Raises UnknownDeadLetter."""
    letters = [letter for letter in await dead_letters(settings) if id_ in {letter.id, letter.origin}]
    if not letters:
        raise UnknownDeadLetter(f"no dead letter of request {id_!r}")
    return letters[-1]


async def redrive(settings: Settings, letters: Iterable[DeadLetter]) -> dict[str, str]:
    """Produce requests once more, each under a new id; gives new ids by old ones.

    Raises UnknownDeadLetter before anything is done for one that came from no topic of requests, which somebody else
    must have written; BrokerUnavailable, RecordRefused: those before it are redriven, and say so when listed again.
    """
    letters = tuple(letters)
    if strange := [letter for letter in letters if not settings.topics.takes_requests(letter.topic)]:
        raise UnknownDeadLetter(f"{strange[0].id!r} says that it was read from {strange[0].topic!r}")
    topic = settings.topics.named(settings.topics.dead_letters)
    new_ids: dict[str, str] = {}
    async with IdempotentProducer(kafka=settings.kafka, max_record_bytes=settings.topics.max_message_bytes) as outlet:
        for letter in letters:
            new_id = uuid.uuid4().hex
            await outlet.send(redriven(where_asked(letter, settings.topics), new_id))
            await outlet.send(_note(letter, new_id, topic))
            new_ids[letter.id] = new_id
    return new_ids
