"""For how long somebody's transaction has hidden records, by what fetches tell each second."""

from typing import Any

import pytest
from aiokafka import TopicPartition
from structlog.testing import capture_logs

from service.consumer.liveness import OpenTransactions

ONE, TWO, OTHER = TopicPartition("requests", 0), TopicPartition("requests", 1), TopicPartition("requests.llama", 0)


class Watched:
    def __init__(self) -> None:
        self.now = 0.0
        self.found = OpenTransactions(lambda: self.now)

    def look(self, at: float, hidden: dict[Any, tuple[int, int] | None]) -> dict[str, float]:
        self.now = at
        self.found.look(hidden)
        return self.found.longest_s()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_it_is_as_old_as_what_it_hides_from_has_stood(watched: Watched) -> None:
    assert watched.look(10, {ONE: (5, 1), TWO: (0, 0)}) == {"requests": 0.0}
    assert watched.look(40, {ONE: (5, 9), OTHER: (3, 1)}) == {"requests": 30.0, "requests.llama": 0.0}
    assert watched.look(50, {ONE: (7, 9), TWO: (5, 1), OTHER: (3, 1)}) == {"requests": 0.0, "requests.llama": 10.0}
    assert watched.look(60, {TWO: (5, 1)}) == {"requests": 10.0}
    assert watched.look(70, {TWO: (6, 0)}) == {}
    assert watched.look(80, {TWO: (6, 1)}) == {"requests": 0.0}


def test_while_a_partition_is_paused_its_transaction_is_as_old_as_it_was_and_then_as_old_as_it_is(
    watched: Watched,
) -> None:
    watched.look(0, {ONE: (5, 1), TWO: (5, 1)})
    assert watched.look(100, {ONE: (5, 1), TWO: (5, 1)}) == {"requests": 100.0}
    for second in range(110, 500, 10):
        assert watched.look(second, {ONE: None}) == {"requests": 100.0}
    assert watched.look(500, {ONE: (5, 1)}) == {"requests": 500.0}
    assert watched.look(510, {ONE: None, TWO: None}) == {"requests": 500.0}
    assert watched.look(520, {}) == {}


def test_many_short_ones_one_after_another_are_none_that_is_long_open(watched: Watched) -> None:
    for second in range(1000):
        assert watched.look(second, {ONE: (second, 3)}) == {"requests": 0.0}


def test_one_that_is_long_open_is_told_of_once(watched: Watched) -> None:
    with capture_logs() as said:
        for second in range(0, 300, 10):
            watched.look(second, {ONE: (5, second + 1), TWO: (second, 1)})
    assert [(line["event"], line["partition"], line["offset"], line["open_s"]) for line in said] == [
        ("bus.transaction_open", 0, 5, 70)
    ]
    with capture_logs() as said:
        watched.look(400, {ONE: (9, 1)})
        watched.look(500, {ONE: (9, 1)})
    assert [line["offset"] for line in said] == [9]
