"""What the bench of the durable door counts."""

from collections import Counter

from tests.bench.door import as_alone, counted, difference
from tests.bench.door_quotas import Turn


def test_a_line_is_missing_or_repeated_by_its_custom_id():
    assert counted(["0", "1", "2"], 3) == {"batch_missing": 0, "batch_repeated": 0}
    assert counted(["0", "2", "2", "2"], 3) == {"batch_missing": 1, "batch_repeated": 2}
    assert counted(["0", "1", "stranger"], 2) == {"batch_missing": 0, "batch_repeated": 1}


def test_usage_that_says_more_here_and_less_there_is_not_right_on_the_whole():
    results = Counter({("a", "prompt_tokens"): 3, ("b", "prompt_tokens"): 5})
    assert difference(results, results) == 0
    assert difference(Counter({("a", "prompt_tokens"): 5, ("b", "prompt_tokens"): 3}), results) == 4
    assert difference(Counter(), results) == 8


def test_a_wait_is_as_alone_within_a_tenth_or_fifty_milliseconds():
    def told(over: float, more_s: float) -> bool:
        return as_alone({"way_others_over_alone": over, "way_others_more_s": more_s}, "way")

    assert told(1.09, 5.0)
    assert told(3.0, 0.049)
    assert not told(1.2, 0.06)


def test_a_tenants_rate_is_of_what_was_answered_between_two_moments():
    turn = Turn(tokens=[(9.9, 1000), (10.0, 50), (12.0, 150), (20.0, 1000)])
    assert turn.rate(10.0, 20.0) == 20.0
