"""What is read of late, by topic."""

import math

import pytest
from aiokafka import TopicPartition

from service.consumer.rates import Rates


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


A0, A1, B0, C0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0), TopicPartition("c", 0)


def test_a_rate_is_what_was_read_of_late(clock: Clock):
    rates = Rates(clock)
    for _ in range(600):
        rates.add(A0, 50)
        clock.now += 10.0
    assert rates.per_s({})["a"] == pytest.approx(0.1, rel=0.02)
    clock.now += 3600.0
    assert rates.per_s({})["a"] < 0.0004


def test_what_is_still_to_be_read_has_come_too(clock: Clock):
    rates = Rates(clock)
    assert rates.per_s({"a": 1200, "b": 300}) == {"a": pytest.approx(2.0), "b": pytest.approx(0.5)}


@pytest.mark.parametrize("after_s", [60, 300, 3000])
def test_what_was_just_taken_over_comes_as_fast_as_it_does(clock: Clock, after_s: int):
    rates = Rates(clock)
    clock.now = 5000.0
    rates.own([A0, A1])
    for _ in range(after_s):
        rates.add(A0, 50, records=2)
        rates.add(A1, 50, records=3)
        clock.now += 1.0
    assert rates.per_s({})["a"] == pytest.approx(5.0, rel=0.05)


def test_a_few_records_of_a_moment_are_no_flood(clock: Clock):
    rates = Rates(clock)
    rates.own([A0])
    rates.add(A0, 50, records=3)
    assert rates.per_s({})["a"] < 0.06


def test_a_partition_that_went_to_another_one_is_not_counted_and_begins_anew_when_it_comes_back(clock: Clock):
    rates = Rates(clock)
    rates.own([A0, B0])
    for partition in (A0, B0):
        rates.add(partition, 50, records=6000)
    clock.now += 600.0
    rates.own([A0])
    assert rates.per_s({}).keys() == {"a"}
    rates.own([A0, B0])
    assert rates.per_s({})["b"] == 0.0
    assert rates.per_s({})["a"] == pytest.approx(10.0 * math.exp(-1) / (1 - math.exp(-1)))
    assert rates.mean("b") == pytest.approx(50 / 6000)


def test_a_record_s_size_is_that_of_its_topic_s_records_however_long_ago(clock: Clock):
    rates = Rates(clock)
    for size in (100, 300):
        rates.add(A0, size)
    clock.now += 600.0
    assert rates.mean("a") == pytest.approx(200.0)
    rates.add(A0, 500)
    assert rates.mean("a") > 300.0


def test_where_nothing_was_read_the_other_topics_tell(clock: Clock):
    rates = Rates(clock)
    assert rates.mean("a") == 0.0
    rates.add(B0, 10)
    rates.add(C0, 30)
    assert rates.mean("a") == 20.0
