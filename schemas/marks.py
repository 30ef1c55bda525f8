"""What workers tell each other in records: beside a request that one moves to its model's own topic, and in presences.

A record does not tell who wrote it. Where the workers of a pool share a key, such records are signed with it, over the
topic, the record's key, its value and every attribute that is looked at but the trace's, so that nobody can write
them once more with another deadline; a reader believes them only where the signature holds. Without a key no marks
are believed: a moved request is then a record of its own, under the id that it had.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from schemas import headers as h
from schemas.base import Origin, Outgoing, Record

Keys = Sequence[bytes]
"""Keys that signatures are made with: the first signs, each of them is accepted, so that they can be changed."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Where the producer wrote a request, when the broker took it there (seconds since the epoch), and how many
    workers or engines had died with it."""

    moved_from: Origin
    received: float
    deaths: int


_DIGITS = 20
_NAMES = (h.MOVED_FROM, h.RECEIVED, h.DEATHS)
_SIGNED = ("id", "type", h.CONTENT_TYPE, *sorted(h.OURS))


def written(marks: Marks) -> list[tuple[str, bytes | None]]:
    """The marks as headers."""
    values = (str(marks.moved_from), repr(marks.received), str(marks.deaths))
    return [(name, value.encode()) for name, value in zip(_NAMES, values, strict=True)]


def signed(record: Outgoing, keys: Keys) -> Outgoing:
    """The record with the pool's signature; as it is, where there is no key."""
    if not keys:
        return record
    found = h.attributes(record.headers)
    given = (h.POOL_SIGNATURE, _signature(record, found, keys[0]))
    return Outgoing(topic=record.topic, key=record.key, value=record.value, headers=[*record.headers, given])


def believed(record: Record, found: h.Attributes, keys: Keys) -> Marks | None:
    """The marks of a record that a worker of the pool wrote; None of any other."""
    if not keys or not is_signed(record, found, keys):
        return None
    origin, received, deaths = (found.get(name) or "" for name in _NAMES)
    topic, partition, offset = origin.rsplit("/", 2)
    moved_from = Origin(topic=topic, partition=int(partition), offset=int(offset))
    return Marks(moved_from=moved_from, received=float(received), deaths=int(deaths))


def claimed(found: h.Attributes, keys: Keys) -> Origin | None:
    """Where a record says that its producer wrote it, in a pool without a key: anybody may have said so.

    With a key there is nothing to claim: a worker's own word is believed.
    """
    place, _, offset = (found.get(h.MOVED_FROM) or "").rpartition("/")
    topic, _, partition = place.rpartition("/")
    if keys or not topic or not all(n.isascii() and n.isdigit() and len(n) < _DIGITS for n in (partition, offset)):
        return None
    return Origin(topic=topic, partition=int(partition), offset=int(offset))


def left(found: h.Attributes) -> str | None:
    """The topic that a record says it was moved from, whoever wrote that; None where it says no such thing."""
    topic, _, _ = (found.get(h.MOVED_FROM) or "").rpartition("/")[0].rpartition("/")
    return topic or None


def is_signed(record: Record, found: h.Attributes, keys: Keys) -> bool:
    """Whether a worker of the pool wrote the record to this topic, under this key."""
    given = (found.get(h.POOL_SIGNATURE) or "").encode()
    return any(hmac.compare_digest(given, _signature(record, found, key)) for key in keys)


def check_signed(record: Record, keys: Keys) -> None:
    """Raises ValueError for a record that a pool with keys did not sign."""
    if keys and not is_signed(record, h.attributes(record.headers), keys):
        raise ValueError("the signature is missing or wrong")


def _signature(record: Record | Outgoing, found: h.Attributes, key: bytes) -> bytes:
    """Over lengths and bytes of each part, so that no part can pass for the end of the one before it.

    What is out of its bound has no value, and is a part by its name: the record would be refused for it.
    """
    digest = hmac.new(key, digestmod=hashlib.sha256)
    value = hashlib.sha256(record.value or b"").digest()
    attributes = ((found.get(name) or "").encode() for name in _SIGNED)
    beyond = ",".join(sorted(found.beyond)).encode()
    for part in (record.topic.encode(), record.key or b"", value, *attributes, beyond):
        digest.update(len(part).to_bytes(4, "big"))
        digest.update(part)
    return digest.hexdigest().encode()
