"""Cancellations of requests that are not here (yet), and the ids that were settled here lately."""

import asyncio
from collections import OrderedDict
from typing import TypeVar

from schemas.control import Cancel
from schemas.requests import Request

K = TypeVar("K")
V = TypeVar("V")
REMEMBERED = 20_000
"""Settled ids kept, to answer a later cancel with ``too_late``."""


class Cancellations:
    """What is still to be cancelled when it is read, bounded by count; the control topic keeps it for longer.

    A cancel means what the broker had received when it was issued: an id may be used again.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._issued: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._settled: OrderedDict[str, None] = OrderedDict()
        self.changed = asyncio.Event()
        """Set with each cancel: whoever has asked ``wanted`` of a parked request asks again."""

    def expect(self, event: Cancel) -> None:
        """Cancel it when it is read."""
        key = _key(event)
        _remember(self._issued, key, max(event.issued, self._issued.get(key, event.issued)), self._limit)
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
        _remember(self._settled, id_, None, self._limit)

    def too_late(self, event: Cancel) -> bool:
        """Whether what it asks for has ended already."""
        return event.request is not None and event.request in self._settled


def _remember(among: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    among[key] = value
    among.move_to_end(key)
    if len(among) > limit:
        among.popitem(last=False)


def _key(event: Cancel) -> tuple[str, str]:
    return ("id", event.request) if event.request is not None else ("correlation", event.correlation_id or "")
