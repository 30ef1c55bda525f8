"""How many records come in each topic, and how big they are: for placement, and tokens for scaling."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from aiokafka import TopicPartition

_SPAN_S = 600.0
_SETTLED_S = 60.0
"""What came in less time than that is taken to have come in as much: a few records tell little."""


@dataclass(slots=True)
class _Came:
    """Records of a partition that were read of late, as of a moment; and since when it has been ours."""

    count: float
    at: float
    ours_since: float


class Rates:
    """What was read of late; what is older than ten minutes hardly counts. Pure but for its clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._sizes: dict[str, tuple[float, float, float]] = {}
        """By topic, whoever reads it by now: bytes, records, and as of when."""
        self._came: dict[TopicPartition, _Came] = {}

    def own(self, partitions: Iterable[TopicPartition]) -> None:
        """These are ours from now on; those among them that were not begin anew."""
        now = self._now()
        self._came = {each: self._came.get(each) or _Came(0.0, now, now) for each in partitions}

    def add(self, partition: TopicPartition, size: int, records: int = 1) -> None:
        """So many records were read, of ``size`` bytes together."""
        now = self._now()
        read, before = self._left(partition.topic)
        self._sizes[partition.topic] = (read + size, before + records, now)
        came = self._came.setdefault(partition, _Came(0.0, now, now))
        came.count, came.at = came.count * self._decay(came.at) + records, now

    def per_s(self, unread: Mapping[str, int]) -> dict[str, float]:
        """Records per second that come, by topic of ours: those that were read, and those that are still to be read."""
        found = {topic: count / _SPAN_S for topic, count in unread.items()}
        for partition, came in self._came.items():
            ours_s = max(_SETTLED_S, self._now() - came.ours_since)
            rate = came.count * self._decay(came.at) / (_SPAN_S * -math.expm1(-ours_s / _SPAN_S))
            found[partition.topic] = found.get(partition.topic, 0.0) + rate
        return found

    def mean(self, topic: str) -> float:
        """A record's bytes; as in the other topics where none has been read of this one, 0 where none at all."""
        read, records = self._left(topic)
        if not records:
            each = [self._left(other) for other in self._sizes]
            read, records = sum(one for one, _ in each), sum(one for _, one in each)
        return read / records if records else 0.0

    def _left(self, topic: str) -> tuple[float, float]:
        read, records, at = self._sizes.get(topic, (0.0, 0.0, self._now()))
        decay = self._decay(at)
        return read * decay, records * decay

    def _decay(self, at: float) -> float:
        return math.exp((at - self._now()) / _SPAN_S)
