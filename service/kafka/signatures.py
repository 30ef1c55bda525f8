"""Signatures of control events: who made one, for which topic and key, and when.

The header ``signature`` is the HMAC-SHA256, in hexadecimal, of six lines and the value after them: the topic, the
record's key, ``ce_id``, ``ce_type``, ``content-type`` and ``signed-at`` (seconds since the epoch). What a record lacks
is an empty line, and a tombstone has no value; a line break within a part is ``%0A``, a percent sign ``%25``.
"""

import hmac
import math
from collections import OrderedDict
from dataclasses import replace

from schemas import headers as h
from schemas.base import Outgoing, Record
from schemas.marks import Keys

FRESH_S = 300.0
"""How long after it was signed the broker may take an event; by the broker's clock, so that backlogs stay good."""


def sign(record: Outgoing, keys: Keys, now: float) -> Outgoing:
    """The record with the first key's signature of this moment; as it is where there is no key."""
    if not keys:
        return record
    dated = replace(record, headers=[*record.headers, (h.SIGNED_AT, f"{now:.3f}".encode())])
    return replace(dated, headers=[*dated.headers, (h.SIGNATURE, signature(dated, keys[0]))])


def signature(record: Record | Outgoing, key: bytes) -> bytes:
    """What the header ``signature`` is to say."""
    found = h.attributes(record.headers)
    told = ((found.get(name) or "").encode() for name in ("id", "type", h.CONTENT_TYPE, h.SIGNED_AT))
    lines = (
        part.replace(b"%", b"%25").replace(b"\n", b"%0A") for part in (record.topic.encode(), record.key or b"", *told)
    )
    return (
        hmac.new(key, b"".join(line + b"\n" for line in lines) + (record.value or b""), "sha256").hexdigest().encode()
    )


def flaw(record: Record, keys: Keys) -> str | None:
    """Why nobody with a key made this record, for this topic and key, when the broker took it; None: somebody did."""
    found = h.attributes(record.headers)
    given = (found.get(h.SIGNATURE) or "").encode()
    if not any(hmac.compare_digest(given, signature(record, key)) for key in keys):
        return "the signature is missing or wrong"
    try:
        signed_at = float(found.get(h.SIGNED_AT) or "nan")
    except ValueError:
        signed_at = math.nan
    away_s = record.timestamp - signed_at
    if not abs(away_s) <= FRESH_S:
        return f"it was signed {away_s:.0f} s before it was written, and {FRESH_S:.0f} are allowed"
    return None


class Replays:
    """Signed records that are written once more while their signature is fresh. Pure; time is the broker's."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()

    def note(self, record: Record) -> bool:
        """Whether a record whose signature is good has been here before."""
        given = h.attributes(record.headers).get(h.SIGNATURE) or ""
        while self._seen and next(iter(self._seen.values())) < record.timestamp - 2 * FRESH_S:
            self._seen.popitem(last=False)
        again = given in self._seen
        self._seen.setdefault(given, record.timestamp)
        return again
