"""What is read of late, by topic."""

import pytest

from service.consumer.rates import Rates


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_rate_is_what_was_read_of_late(clock: Clock):
    rates = Rates(clock)
    for _ in range(600):
        rates.add("a", 50)
        clock.now += 10.0
    assert rates.per_s({})["a"] == pytest.approx(0.1, rel=0.02)
    clock.now += 3600.0
    assert rates.per_s({})["a"] < 0.0004


def test_what_is_still_to_be_read_has_come_too(clock: Clock):
    rates = Rates(clock)
    rates.add("a", 50, records=600)
    assert rates.per_s({"a": 1200, "b": 300}) == {"a": pytest.approx(3.0), "b": pytest.approx(0.5)}


def test_a_record_s_size_is_that_of_its_topic_s_records_however_long_ago(clock: Clock):
    rates = Rates(clock)
    for size in (100, 300):
        rates.add("a", size)
    clock.now += 600.0
    assert rates.mean("a") == pytest.approx(200.0)
    rates.add("a", 500)
    assert rates.mean("a") > 300.0


def test_where_nothing_was_read_the_other_topics_tell(clock: Clock):
    rates = Rates(clock)
    assert rates.mean("a") == 0.0
    rates.add("b", 10)
    rates.add("c", 30)
    assert rates.mean("a") == 20.0
