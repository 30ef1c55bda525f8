"""Histograms that one thread counts: observing is a bisection and two additions.

prometheus_client's own take a lock for each number and go through the bounds one by one, which costs three times as
much; a request is observed in seven of them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Series:
    """What was observed with the same labels."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.total = 0.0
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, each one's own; the last one's are above all bounds."""

    def observe(self, value: float) -> None:
        """``value`` counts in the first bucket whose bound is not below it."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Histograms:
    """All series of a metric, as a collector of ``registry``. Call it with the labels' values for one of them."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(sorted(bounds))
        self._words = [*map(floatToGoString, self._bounds), "+Inf"]
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def __call__(self, *values: str) -> Series:
        """The series of these values, which are as many as the labels."""
        found = self._series.get(values)
        if found is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {values}")
            found = self._series[values] = Series(self._bounds)
        return found

    def describe(self) -> Iterator[Metric]:
        """Its name, for the registry to find it twice; none of its series."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        """Everything observed so far."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, list(zip(self._words, accumulate(series.counts), strict=True)), series.total)
        yield family
