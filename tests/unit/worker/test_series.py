"""Our counters and histograms say what prometheus_client's own would, to the letter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from service.worker.series import Counters, Histograms

BOUNDS = (0.005, 0.1, 1, 2.5, 300)
NAME, TEXT, LABELS = "waits_seconds", "How long they wait.", ("model", "phase")
VALUES = st.one_of(st.sampled_from([0.0, *map(float, BOUNDS)]), st.floats(-10, 1e6))
MODELS, PHASES = st.sampled_from(["a", 'quo"ted', "line\n"]), st.sampled_from(["read", "turn"])


@given(st.lists(st.tuples(MODELS, PHASES, VALUES)))
def test_a_histograms_text_is_that_of_the_librarys_own(observed: list[tuple[str, str, float]]) -> None:
    disable_created_metrics()
    here, there = CollectorRegistry(), CollectorRegistry()
    ours = Histograms(NAME, TEXT, LABELS, bounds=BOUNDS, registry=here)
    theirs = Histogram(NAME, TEXT, LABELS, buckets=BOUNDS, registry=there)
    for *labels, value in observed:
        ours.observe(value, *labels)
        theirs.labels(*labels).observe(value)
    assert generate_latest(here) == generate_latest(there)


@given(st.lists(st.tuples(MODELS, PHASES, st.integers(0, 1 << 40))))
def test_a_counters_text_is_that_of_the_librarys_own(counted: list[tuple[str, str, int]]) -> None:
    disable_created_metrics()
    here, there = CollectorRegistry(), CollectorRegistry()
    ours = Counters(NAME, TEXT, LABELS, registry=here)
    theirs = Counter(NAME, TEXT, LABELS, registry=there)
    for *labels, by in counted:
        ours.count(*labels, by=by)
        theirs.labels(*labels).inc(by)
    assert generate_latest(here) == generate_latest(there)


def test_a_name_is_registered_once_and_has_its_labels() -> None:
    registry = CollectorRegistry()
    histograms = Histograms(NAME, TEXT, LABELS, bounds=BOUNDS, registry=registry)
    counters = Counters("others", TEXT, LABELS, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Histograms(NAME, TEXT, LABELS, bounds=BOUNDS, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Counters("others", TEXT, LABELS, registry=registry)
    with pytest.raises(ValueError, match="model"):
        histograms.observe(1.0, "only one")
    with pytest.raises(ValueError, match="model"):
        counters.count("only one")
