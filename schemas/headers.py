"""The headers of a record: CloudEvents 1.0 in Kafka's binary mode, W3C trace context, and ours.

An attribute is found whether it is written as a plain header (``reply-to``), as a CloudEvents extension
(``ce_replyto``), or inside a structured CloudEvent. Each is bounded; other headers are not looked into, and only a
dead letter carries them on.
"""

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from schemas.base import MAX_ATTRIBUTE, Headers

CONTENT_TYPE = "content-type"
JSON = b"application/json"
CLOUDEVENT_JSON = "application/cloudevents+json"
DEAD_LETTER = "dl-"
"""The prefix of the headers that a dead letter has beside its original ones."""

ENDPOINT = "endpoint"
DEADLINE = "deadline"
"""When the answer stops being wanted: RFC 3339, or seconds since the epoch."""
TTL = "ttl"
"""The same, in seconds from the broker's timestamp."""
PRIORITY = "priority"
REQUEST_CLASS = "request-class"
"""Which of its model's classes it is of: their objectives are in models.yaml."""
TTFT = "ttft"
"""Seconds to the first token that will do, where its objective has less."""
TPOT = "tpot"
"""The same per further token."""
REPLY_FAILED = "reply-failed"
"""Why a result that was to go to a reply topic is in the topic of all."""
REPLY_TO = "reply-to"
REPLY_PARTITION = "reply-partition"
"""Which partition of that topic; of many clients that share it each reads its own."""
CORRELATION_ID = "correlation-id"
TENANT = "tenant"
SESSION = "session"
"""A prompt that arrives in several records: they share this name, and their key."""
PART = "part"
"""Which of them this is, counted from 0."""
FINAL = "final"
"""``false`` on all of them but the last."""
PREVIOUS = "previous"
"""The id of the response that a durable call goes on with: its body has what was said there."""
FINGERPRINT = "fingerprint"
"""Of a durable call's body as its client sent it, where the record's has more."""
REDRIVE_OF = "redrive-of"
MOVED_FROM = "moved-from"
RECEIVED = "received"
DEATHS = "deaths"
POOL_SIGNATURE = "pool-signature"
"""Who moved a request to its model's own topic had the pool's key: ``schemas.marks``."""
SIGNATURE = "signature"
SIGNED_AT = "signed-at"
"""Who made a control event had the key, and when: ``service.kafka.signatures``."""
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

OURS = frozenset(
    {
        ENDPOINT, DEADLINE, TTL, PRIORITY, REQUEST_CLASS, TTFT, TPOT, REPLY_TO, REPLY_PARTITION, CORRELATION_ID, TENANT,
        SESSION, PART, FINAL, REDRIVE_OF, MOVED_FROM, RECEIVED, DEATHS,
    }
)  # fmt: skip


_LONGEST_NAME = 64
"""Bytes of a name that is looked at; no attribute has a longer one."""
MAX_TRACESTATE = 512


@lru_cache(maxsize=1024)
def _plain(name: str) -> str:
    return name.lower().removeprefix("ce_").replace("-", "").replace("_", "")


def canonical(name: str) -> str:
    """The one spelling of a header's name: ``ce_replyto``, ``Reply-To`` and ``reply-to`` are the same attribute."""
    return _plain(name) if len(name) <= _LONGEST_NAME else ""


_BOUNDS = {canonical(TRACESTATE): MAX_TRACESTATE}
_OPTIONAL = frozenset({canonical(TRACEPARENT), canonical(TRACESTATE)})
"""Left out where they are out of bounds, as W3C asks, and no reason to refuse a record."""
KNOWN = frozenset(
    map(canonical, (*OURS, "id", "type", CONTENT_TYPE, SIGNATURE, SIGNED_AT, POOL_SIGNATURE, TRACEPARENT, TRACESTATE))
)


@dataclass(slots=True)
class Attributes:
    """What is known of a record by name, each value within its bound: 256 bytes, and 512 for ``tracestate``."""

    beyond: set[str] = field(default_factory=set)
    """Canonical names of those that were there and out of bounds."""
    _values: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: bytes | str | None) -> None:
        """Take one in, read leniently as UTF-8; of several with one name the last counts. Null is as if absent."""
        plain = canonical(name)
        if value is not None and plain in KNOWN:
            self._put(plain, value)

    def _put(self, plain: str, value: bytes | str) -> None:
        text = _bounded(value, _BOUNDS.get(plain, MAX_ATTRIBUTE))
        if text is not None:
            self._values[plain] = text
            self.beyond.discard(plain)
            return
        self._values.pop(plain, None)
        if plain not in _OPTIONAL:
            self.beyond.add(plain)

    def get(self, name: str) -> str | None:
        """The attribute ``name``; an empty value is none."""
        return (self._values.get(_plain(name)) or None) if self._values else None


def _bounded(value: bytes | str, most: int) -> str | None:
    """A value as text, if it has no more than so many bytes."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) and len(value) <= most else value
    if isinstance(text, str) and len(text) <= most and (text.isascii() or len(text.encode()) <= most):
        return text
    return None


def attribute(headers: Headers, plain: str) -> str | None:
    """What ``attributes`` finds under one canonical name, but for ``tracestate``, in a third of the time."""
    found = None
    for name, value in headers:
        if value is not None and len(name) <= _LONGEST_NAME and _plain(name) == plain:
            found = _bounded(value, MAX_ATTRIBUTE)
    return found or None


def attributes(headers: Headers) -> Attributes:
    """The attributes among a record's headers."""
    found = Attributes()
    for name, value in headers:
        if value is not None and len(name) <= _LONGEST_NAME and (plain := _plain(name)) in KNOWN:
            found._put(plain, value)
    return found


def event_headers(*, id_: str, source: str, kind: str, subject: str | None = None) -> list[tuple[str, bytes | None]]:
    """The CloudEvents headers of a record that we write."""
    second, micros = divmod(time.time_ns() // 1000, 1_000_000)
    now = b"%s.%06d+00:00" % (_until_the_second(second), micros)
    return [("ce_id", id_.encode()), ("ce_time", now), *_of_its_kind(source, kind, subject)]


@lru_cache(maxsize=8)
def _until_the_second(second: int) -> bytes:
    """The beginning of a time as ISO 8601 has it."""
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()


@lru_cache(maxsize=1024)
def _of_its_kind(source: str, kind: str, subject: str | None) -> tuple[tuple[str, bytes | None], ...]:
    """What many records have in common."""
    found: tuple[tuple[str, bytes | None], ...] = (
        ("ce_specversion", b"1.0"),
        ("ce_source", source.encode()),
        ("ce_type", f"gearshift.{kind}".encode()),
        (CONTENT_TYPE, JSON),
    )
    return found if subject is None else (*found, ("ce_subject", subject.encode()))
