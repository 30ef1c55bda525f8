"""What stands still, and for how long."""

import pytest

from service.bus.vitals import Complaint, Progress, check, trouble
from service.errors import Stalled


def test_a_counter_that_moves_is_no_trouble_and_one_that_stands_is_old_since_it_last_moved() -> None:
    progress = Progress()
    progress.update({"a": 1, "b": 1}, now=0)
    progress.update({"a": 2, "b": 1}, now=10)
    assert (progress.since("a"), progress.since("b")) == (10, 0)


def test_a_counter_is_judged_only_while_it_ought_to_move() -> None:
    progress = Progress()
    progress.update({"a": 1}, now=0)
    progress.update({}, now=50)
    progress.update({"a": 1}, now=100)
    assert progress.since("a") == 100


def test_the_oldest_complaint_is_the_reason() -> None:
    complaints = [Complaint("young", 95), Complaint("old", 10), Complaint("older", 5)]
    assert trouble(complaints, now=100, after_s=50) == "older, for 95 s"
    assert trouble(complaints, now=100, after_s=95) is None


def test_what_stands_too_long_ends_the_worker_with_the_reason() -> None:
    check([Complaint("slow", 90)], now=100, after_s=20)
    with pytest.raises(Stalled, match="stuck, for 30 s"):
        check([Complaint("stuck", 70)], now=100, after_s=20)
