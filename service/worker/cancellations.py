"""Cancellations of requests that are not here (yet), and the ids that were settled here lately."""

from collections import OrderedDict
from typing import TypeVar

from schemas.control import Cancel
from schemas.requests import Request

K = TypeVar("K")
REMEMBERED = 20_000
"""Settled ids kept, to answer a later cancel with ``too_late``."""


class Cancellations:
    """What is still to be cancelled when it is read, bounded by count; the control topic keeps it for longer."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._pending: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._settled: OrderedDict[str, None] = OrderedDict()

    def expect(self, event: Cancel) -> None:
        """Cancel it when it is read."""
        _remember(self._pending, _key(event), self._limit)

    def wanted(self, request: Request) -> bool:
        """Whether a request that was just read is to be cancelled."""
        keys = [("id", request.id)]
        if request.correlation_id is not None:
            keys.append(("correlation", request.correlation_id))
        return any(key in self._pending for key in keys)

    def settled(self, id_: str) -> None:
        _remember(self._settled, id_, self._limit)

    def too_late(self, event: Cancel) -> bool:
        """Whether what it asks for has ended already."""
        return event.request is not None and event.request in self._settled


def _remember(among: OrderedDict[K, None], key: K, limit: int) -> None:
    among[key] = None
    among.move_to_end(key)
    if len(among) > limit:
        among.popitem(last=False)


def _key(event: Cancel) -> tuple[str, str]:
    return ("id", event.request) if event.request is not None else ("correlation", event.correlation_id or "")
