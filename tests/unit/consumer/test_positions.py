"""Where a group stands, as its ledger in a commit says."""

from aiokafka import TopicPartition

from service.consumer.ledger import Ledger
from service.consumer.positions import position_of

TP = TopicPartition("requests", 0)


def ledger():
    """Ten offsets delivered from 100; 103, 104 and 107 finished; 101 started."""
    made = Ledger(100)
    for offset in range(100, 110):
        made.deliver(offset)
    made.start(101)
    for offset in (103, 104, 107):
        made.finish(offset)
    return made


def test_lag_does_not_count_what_is_finished_above_the_watermark():
    position = position_of(TP, (90, 120), ledger().encode())
    assert (position.watermark, position.finished_above, position.lag) == (100, 3, 17)
    assert position.suspects == ((101, 1),)


def test_without_a_commit_everything_that_is_kept_is_lag():
    position = position_of(TP, (90, 120), None)
    assert (position.watermark, position.lag) == (None, 30)


def test_what_retention_took_is_told():
    position = position_of(TP, (150, 160), (100, ""))
    assert position.lag == 10
    assert "50 records were deleted" in position.problem


def test_a_position_beyond_the_end_is_told():
    position = position_of(TP, (0, 10), (500, ""))
    assert position.lag == 0
    assert "beyond the end" in position.problem


def test_an_offset_that_has_expired_is_told_with_where_it_stood():
    position = position_of(TP, (90, 120), None, Ledger(100))
    assert (position.watermark, position.lag) == (None, 30)
    assert "stood at 100" in position.problem


def test_a_later_versions_ledger_is_told_and_not_guessed_at():
    position = position_of(TP, (0, 10), (5, "gs9.AAAA"))
    assert "version 9" in position.problem
