"""The headers of a record: CloudEvents 1.0 in Kafka's binary mode, W3C trace context, and ours.

An attribute is found whether it is written as a plain header (``reply-to``), as a CloudEvents extension
(``ce_replyto``), or inside a structured CloudEvent.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache

from schemas.base import Headers

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
REDRIVE_OF = "redrive-of"
MOVED_FROM = "moved-from"
RECEIVED = "received"
DEATHS = "deaths"
SIGNATURE = "signature"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

OURS = frozenset(
    {
        ENDPOINT, DEADLINE, TTL, PRIORITY, REPLY_TO, REPLY_PARTITION, CORRELATION_ID, TENANT, SESSION, PART, FINAL,
        REDRIVE_OF, MOVED_FROM, RECEIVED, DEATHS,
    }
)  # fmt: skip


@lru_cache(maxsize=1024)
def canonical(name: str) -> str:
    """The one spelling of a header's name: ``ce_replyto``, ``Reply-To`` and ``reply-to`` are the same attribute."""
    return name.lower().removeprefix("ce_").replace("-", "").replace("_", "")


def attributes(headers: Headers) -> dict[str, str]:
    """Headers by canonical name, decoded leniently; of several with one name the last counts."""
    return {canonical(name): value.decode("utf-8", "replace") for name, value in headers if value is not None}


def get(found: Mapping[str, str], name: str) -> str | None:
    """The attribute ``name`` among canonical ones; an empty value is none."""
    return found.get(canonical(name)) or None


def event_headers(*, id_: str, source: str, kind: str, subject: str | None = None) -> list[tuple[str, bytes]]:
    """The CloudEvents headers of a record that we write."""
    found = [
        ("ce_specversion", b"1.0"),
        ("ce_id", id_.encode()),
        ("ce_source", source.encode()),
        ("ce_type", f"gearshift.{kind}".encode()),
        ("ce_time", datetime.now(UTC).isoformat().encode()),
        (CONTENT_TYPE, JSON),
    ]
    return found if subject is None else [*found, ("ce_subject", subject.encode())]
