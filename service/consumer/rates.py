"""How many records are read of each topic, and how big they are: for placement, and tokens for scaling."""

import math
import time
from collections.abc import Callable, Mapping

_SPAN_S = 600.0


class Rates:
    """What was read of late; what is older than ten minutes hardly counts. Pure but for its clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._read: dict[str, tuple[float, float, float]] = {}

    def add(self, topic: str, size: int, records: int = 1) -> None:
        """So many records were read, of ``size`` bytes together."""
        read, before = self._left(topic)
        self._read[topic] = (read + size, before + records, self._now())

    def per_s(self, unread: Mapping[str, int]) -> dict[str, float]:
        """Records per second that come, by topic: those that were read, and those that are still to be read."""
        return {topic: (self._left(topic)[1] + unread.get(topic, 0)) / _SPAN_S for topic in {*self._read, *unread}}

    def mean(self, topic: str) -> float:
        """A record's bytes; as in the other topics where none has been read of this one, 0 where none at all."""
        read, records = self._left(topic)
        if not records:
            each = [self._left(other) for other in self._read]
            read, records = sum(one for one, _ in each), sum(one for _, one in each)
        return read / records if records else 0.0

    def _left(self, topic: str) -> tuple[float, float]:
        read, records, at = self._read.get(topic, (0.0, 0.0, self._now()))
        decay = math.exp((at - self._now()) / _SPAN_S)
        return read * decay, records * decay
