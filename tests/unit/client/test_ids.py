"""Ids that are their client's to find, and nobody's to guess."""

import time

import pytest
from aiokafka.partitioner import DefaultPartitioner

from service.client.ids import made_at, new_id, place_of


@pytest.mark.parametrize("partitions", [1, 2, 3, 12, 50])
def test_an_ids_records_are_in_the_partition_that_was_asked_for(partitions: int):
    partitioner = DefaultPartitioner()
    for place in range(partitions):
        made = new_id(place, partitions)
        assert partitioner(made.encode(), list(range(partitions)), []) == place
        assert place_of(made, partitions) == place


def test_the_partition_of_any_id_is_kafkas():
    partitioner = DefaultPartitioner()
    for id_ in ("", "x", "order-16", "Käse", "requests/3/17", "a" * 300):
        assert place_of(id_, 12) == partitioner(id_.encode(), list(range(12)), [])


def test_an_id_tells_when_it_was_made():
    before = time.time()
    at = made_at(new_id(3, 12))
    assert at is not None
    assert before - 0.001 <= at <= time.time() + 0.001
    for foreign in ("order-16", "ask-", "ask-zz-1", "0198c0ffee", "requests/3/17"):
        assert made_at(foreign) is None


def test_ids_share_nothing_that_would_let_the_next_be_guessed():
    made = [new_id(0, 12).rpartition("-")[2] for _ in range(1000)]
    assert len(set(made)) == len(made)
    for place in range(19):
        assert len({one[place] for one in made}) > 12, "a random digit"
