"""Our histograms say what prometheus_client's own would, to the letter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest

from service.worker.histograms import Histograms

BOUNDS = (0.005, 0.1, 1, 2.5, 300)
NAME, TEXT, LABELS = "waits_seconds", "How long they wait.", ("model", "phase")
VALUES = st.one_of(st.sampled_from([0.0, *map(float, BOUNDS)]), st.floats(-10, 1e6))


@given(st.lists(st.tuples(st.sampled_from(["a", 'quo"ted', "line\n"]), st.sampled_from(["read", "turn"]), VALUES)))
def test_the_text_is_that_of_the_librarys_own(observed: list[tuple[str, str, float]]) -> None:
    disable_created_metrics()
    here, there = CollectorRegistry(), CollectorRegistry()
    ours = Histograms(NAME, TEXT, LABELS, bounds=BOUNDS, registry=here)
    theirs = Histogram(NAME, TEXT, LABELS, buckets=BOUNDS, registry=there)
    for *labels, value in observed:
        ours(*labels).observe(value)
        theirs.labels(*labels).observe(value)
    assert generate_latest(here) == generate_latest(there)


def test_a_name_is_registered_once_and_has_its_labels() -> None:
    registry = CollectorRegistry()
    made = Histograms(NAME, TEXT, LABELS, bounds=BOUNDS, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Histograms(NAME, TEXT, LABELS, bounds=BOUNDS, registry=registry)
    with pytest.raises(ValueError, match="model"):
        made("only one")
