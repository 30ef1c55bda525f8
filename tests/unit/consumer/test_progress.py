"""What stands still, and for how long."""

from service.consumer.progress import Complaint, Progress, worst


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


def test_the_oldest_complaint_is_the_worst() -> None:
    complaints = [Complaint("young", 95), Complaint("older", 5), Complaint("old", 10)]
    assert worst(complaints).reason == "older"
