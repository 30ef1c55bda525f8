"""What the bench of the durable door counts."""

from collections import Counter

from tests.bench.door import counted, difference


def test_a_line_is_missing_or_repeated_by_its_custom_id():
    assert counted(["0", "1", "2"], 3) == {"batch_missing": 0, "batch_repeated": 0}
    assert counted(["0", "2", "2", "2"], 3) == {"batch_missing": 1, "batch_repeated": 2}
    assert counted(["0", "1", "stranger"], 2) == {"batch_missing": 0, "batch_repeated": 1}


def test_usage_that_says_more_here_and_less_there_is_not_right_on_the_whole():
    results = Counter({("a", "prompt_tokens"): 3, ("b", "prompt_tokens"): 5})
    assert difference(results, results) == 0
    assert difference(Counter({("a", "prompt_tokens"): 5, ("b", "prompt_tokens"): 3}), results) == 4
    assert difference(Counter(), results) == 8
