"""Counters and histograms that one thread counts: an addition, and where the value is among the bounds.

prometheus_client's own take a lock for each number, and go through the bounds one by one, which costs three times as
much; a request is counted in ten of them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class Counters:
    """The counts of a metric by its labels' values, as a collector of ``registry``."""

    def __init__(self, name: str, text: str, labels: Sequence[str], *, registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._counts: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def count(self, *values: str, by: float = 1) -> None:
        """Add ``by`` to what has these values, which are as many as the labels."""
        try:
            self._counts[values] += by
        except KeyError:
            _check(self._name, self._labels, values)
            self._counts[values] = by

    def describe(self) -> Iterator[Metric]:
        """Its name, for the registry to find it twice; none of its series."""
        yield CounterMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        """Everything counted so far."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in self._counts.items():
            family.add_metric(values, count)
        yield family


class Histograms:
    """What was observed of a metric by its labels' values, as a collector of ``registry``."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, tuple(labels)
        self._bounds = tuple(sorted(bounds))
        self._words = [*map(floatToGoString, self._bounds), "+Inf"]
        self._series: dict[tuple[str, ...], _Series] = {}
        registry.register(self)

    def observe(self, value: float, *values: str) -> None:
        """Count ``value`` with these labels, in the first bucket whose bound is not below it."""
        try:
            series = self._series[values]
        except KeyError:
            _check(self._name, self._labels, values)
            series = self._series[values] = _Series(len(self._bounds) + 1)
        series.counts[bisect_left(self._bounds, value)] += 1
        series.total += value

    def describe(self) -> Iterator[Metric]:
        """As a counter's."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        """Everything observed so far."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, series in self._series.items():
            family.add_metric(values, list(zip(self._words, accumulate(series.counts), strict=True)), series.total)
        yield family


class _Series:
    """What was observed with the same labels."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.total = 0.0
        self.counts = [0] * buckets
        """By bucket, each one's own; the last one's are above all bounds."""


def _check(name: str, labels: tuple[str, ...], values: tuple[str, ...]) -> None:
    if len(values) != len(labels):
        raise ValueError(f"{name} has the labels {labels}, not {values}")
