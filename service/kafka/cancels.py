"""Cancels that mean nothing any more, so that the control topic does not keep them for ever. Pure."""

from collections import OrderedDict

from schemas.control import Cancel
from service.ports import ControlRecord

_MOST = 20_000
_LONGEST_KEY = 1024
"""Bytes; our own cancels have shorter keys."""


class OldCancels:
    """The keys whose latest word is a cancel, the oldest first; beyond the most that are noted, a later worker's."""

    def __init__(self, live_s: float) -> None:
        self._live_s = live_s
        self._issued: OrderedDict[bytes, float] = OrderedDict()

    def note(self, found: ControlRecord) -> None:
        """The latest word under its key."""
        key, event = found.record.key, found.event
        if key is None or len(key) > _LONGEST_KEY:
            return
        self._issued.pop(key, None)
        if isinstance(event, Cancel) and len(self._issued) < _MOST:
            self._issued[key] = event.issued

    def take(self, now: float) -> list[bytes]:
        """The keys of cancels that no request can be left for; each is given once."""
        gone = []
        while self._issued and next(iter(self._issued.values())) + self._live_s < now:
            key, _ = self._issued.popitem(last=False)
            gone.append(key)
        return gone
