"""Cancellations of requests that are not here (yet), and the ids that were settled here lately."""

import asyncio
from array import array
from collections import OrderedDict

from schemas.control import Cancel
from schemas.requests import Request

REMEMBERED = 20_000
"""Settled ids kept, to answer a later cancel with ``too_late``."""


class Cancellations:
    """What is still to be cancelled when it is read, bounded by count; the control topic keeps it for longer.

    A cancel means what the broker had received when it was issued: an id may be used again.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._issued: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._settled = array("q")
        """The hashes of the last ids, 8 bytes each: the oldest one is at ``_next`` once there are enough."""
        self._next = 0
        self.changed = asyncio.Event()
        """Set with each cancel: whoever has asked ``wanted`` of a parked request asks again."""

    def expect(self, event: Cancel) -> None:
        """Cancel it when it is read."""
        key = _key(event)
        self._issued[key] = max(event.issued, self._issued.get(key, event.issued))
        self._issued.move_to_end(key)
        if len(self._issued) > self._limit:
            self._issued.popitem(last=False)
        self.changed.set()

    def wanted(self, request: Request) -> bool:
        """Whether a request that was just read is to be cancelled."""
        if not self._issued:
            return False
        issued = [self._issued.get(("id", request.id))]
        if request.correlation_id is not None:
            issued.append(self._issued.get(("correlation", request.correlation_id)))
        return any(request.received <= at for at in issued if at is not None)

    def settled(self, id_: str) -> None:
        """A request of this id has ended here."""
        if len(self._settled) < self._limit:
            self._settled.append(0)
        self._settled[self._next] = hash(id_)
        self._next = (self._next + 1) % self._limit

    def too_late(self, event: Cancel) -> bool:
        """Whether what it asks for has ended already."""
        return event.request is not None and hash(event.request) in self._settled


def _key(event: Cancel) -> tuple[str, str]:
    return ("id", event.request) if event.request is not None else ("correlation", event.correlation_id or "")
