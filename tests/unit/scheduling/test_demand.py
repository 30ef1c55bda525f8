"""By how much models miss their objectives, and when a worker asks to have them placed anew."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.objectives import Objective
from service.scheduling.demand import Shortfalls, Unrest

WANTED = {"": Objective(ttft_s=1, tpot_s=1, share=0.9), "batch": Objective(ttft_s=9, tpot_s=9, share=0.5)}
LOOK_S = 10.0


def ended(found: Shortfalls, request_class: str, met: int, missed: int, now: float = 0.0) -> None:
    for number in range(met + missed):
        found.seen("llama", request_class, number < met, now)


def test_what_misses_its_share_misses_so_much_of_it() -> None:
    found = Shortfalls()
    ended(found, "", met=45, missed=55)
    assert found.of("llama", WANTED, 0.0) == pytest.approx(0.5)
    assert found.of("qwen", WANTED, 0.0) == 0.0


def test_the_class_that_misses_most_counts_and_one_that_reaches_its_share_does_not() -> None:
    found = Shortfalls()
    ended(found, "", met=90, missed=10)
    ended(found, "batch", met=10, missed=90)
    assert found.of("llama", WANTED, 0.0) == pytest.approx(0.8)
    assert found.of("llama", {"": WANTED[""]}, 0.0) == 0.0


def test_a_few_requests_or_what_is_long_over_tell_nothing() -> None:
    found = Shortfalls()
    ended(found, "", met=0, missed=19)
    assert found.of("llama", WANTED, 0.0) == 0.0
    ended(found, "", met=0, missed=61)
    assert found.of("llama", WANTED, 0.0) == 1.0
    assert found.of("llama", WANTED, 599.0) == 1.0
    assert found.of("llama", WANTED, 601.0) == 0.0


def asked(missing: list[bool], *, helps: bool = False) -> list[float]:
    """When a worker asks that looks every ten seconds; it gets what it asks for at once."""
    unrest, placements, times = Unrest(0.0), 0, []
    for number, is_missing in enumerate(missing):
        now = (number + 1) * LOOK_S
        if unrest.asks(is_missing and not (helps and times), placements, now):
            placements += 1
            times.append(now)
    return times


def test_it_asks_once_it_has_missed_for_a_minute_and_its_placement_is_old_enough() -> None:
    assert asked([True] * 29) == []
    assert asked([True] * 30) == [300.0]
    assert asked([False] * 40 + [True] * 6) == []
    assert asked([False] * 40 + [True] * 7) == [470.0]
    assert asked(([True] * 6 + [False]) * 100) == []


def test_where_that_brings_nothing_it_asks_ever_more_seldom() -> None:
    times = asked([True] * 5000)
    gaps = [round(later - earlier) for earlier, later in itertools.pairwise(times)]
    assert gaps[:4] == [610, 1210, 2410, 3610]
    assert set(gaps[4:]) == {3610}


def test_where_it_brought_something_the_next_time_is_as_the_first() -> None:
    unrest = Unrest(0.0)
    assert unrest.asks(True, 0, 300.0) is False
    assert unrest.asks(True, 0, 360.0) is True
    assert [unrest.asks(False, 1, now) for now in (370.0, 971.0)] == [False, False]
    assert [unrest.asks(True, 1, now) for now in (980.0, 1040.0)] == [False, True]


def test_a_placement_that_another_one_asked_for_is_given_time_too() -> None:
    unrest = Unrest(0.0)
    unrest.asks(True, 0, 300.0)
    assert unrest.asks(True, 1, 360.0) is False
    assert unrest.asks(True, 1, 900.0) is False
    assert unrest.asks(True, 1, 960.0) is True


@given(missing=st.lists(st.booleans(), max_size=500))
def test_never_oftener_than_every_five_minutes(missing: list[bool]) -> None:
    times = [0.0, *asked(missing)]
    assert all(later - earlier >= 300.0 for earlier, later in itertools.pairwise(times))
