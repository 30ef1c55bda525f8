"""By how much models miss their objectives, and when a worker asks to have them placed anew."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.objectives import Objective
from service.scheduling.demand import Demand

WANTED = {"": Objective(ttft_s=1, tpot_s=1, share=0.9), "batch": Objective(ttft_s=9, tpot_s=9, share=0.5)}
ONE = {"": WANTED[""]}
LOOK_S = 10.0


@pytest.fixture
def demand() -> Demand:
    return Demand(0.0)


def ended(found: Demand, request_class: str, met: int, missed: int, now: float = 0.0, alias: str = "llama") -> None:
    for number in range(met + missed):
        found.seen(alias, request_class, number < met, now)


def test_what_misses_its_share_misses_so_much_of_it(demand: Demand) -> None:
    ended(demand, "", met=45, missed=55)
    assert demand.short("llama", WANTED, 0.0) == pytest.approx(0.5)
    assert demand.short("qwen", WANTED, 0.0) == 0.0


def test_the_class_that_misses_most_counts_and_one_that_reaches_its_share_does_not(demand: Demand) -> None:
    ended(demand, "", met=90, missed=10)
    ended(demand, "batch", met=10, missed=90)
    assert demand.short("llama", WANTED, 0.0) == pytest.approx(0.8)
    assert demand.short("llama", ONE, 0.0) == 0.0


def test_a_few_requests_or_what_is_long_over_tell_nothing(demand: Demand) -> None:
    ended(demand, "", met=0, missed=19)
    assert demand.short("llama", WANTED, 0.0) == 0.0
    ended(demand, "", met=0, missed=61)
    assert demand.short("llama", WANTED, 599.0) == 1.0
    assert demand.short("llama", WANTED, 601.0) == 0.0


class Day:
    """A worker of one model, looked at every ten seconds; it gets what it asks for at once, or never."""

    def __init__(self, *, obeyed: bool = True) -> None:
        self.demand, self.obeyed = Demand(0.0), obeyed
        self.now, self.placements = 0.0, 0
        self.asked: list[float] = []

    def go_on(self, looks: int, *, met: int = 0, missed: int = 0) -> None:
        """So many looks, before each of which so many requests end."""
        for _ in range(looks):
            self.now += LOOK_S
            ended(self.demand, "", met, missed, self.now)
            if self.demand.to_be_placed({"llama": ONE}, self.placements, self.now):
                self.asked.append(self.now)
                self.placements += self.obeyed


def test_it_asks_once_it_has_missed_for_a_minute_and_its_placement_is_old_enough() -> None:
    day = Day()
    day.go_on(29, missed=30)
    assert day.asked == []
    day.go_on(1, missed=30)
    assert day.asked == [300.0]
    late = Day()
    late.go_on(40, met=1)
    late.go_on(6, missed=100)
    assert late.asked == []
    late.go_on(1, missed=100)
    assert late.asked == [470.0]


def test_a_little_is_no_reason() -> None:
    day = Day()
    day.go_on(500, met=87, missed=13)
    assert day.asked == []
    assert 0.02 < day.demand.short("llama", ONE, day.now) < 0.05


def test_where_that_brings_nothing_it_asks_ever_more_seldom() -> None:
    for day in (Day(), Day(obeyed=False)):
        day.go_on(5000, missed=30)
        gaps = [round(later - earlier) for earlier, later in itertools.pairwise(day.asked)]
        wanted = [600, 1200, 2400, *[3600] * (len(gaps) - 3)]
        assert all(0 <= gap - pause <= 2 * LOOK_S for gap, pause in zip(gaps, wanted, strict=True))


def test_a_placement_that_helps_is_not_asked_for_again_by_what_was_missed_before_it() -> None:
    day = Day()
    day.go_on(30, missed=30)
    assert day.asked == [300.0]
    day.go_on(10, met=30)
    assert day.demand.short("llama", ONE, day.now) > 0.5, "it weighs more still"
    day.go_on(200, met=10)
    assert day.asked == [300.0]


def test_where_one_brought_something_the_next_time_is_as_the_first() -> None:
    day = Day()
    day.go_on(30, missed=30)
    day.go_on(62, met=30)
    day.go_on(150, missed=300)
    assert day.asked[1] - 920 < 200
    assert day.asked[2] - day.asked[1] < 700


def test_what_is_missed_now_and_then_does_not_let_it_forget_that_nothing_has_helped() -> None:
    day = Day()
    day.go_on(1000, missed=30)
    asked = len(day.asked)
    for look in range(400):
        day.now += LOOK_S
        ended(day.demand, "", 0, 30, day.now)
        owned = {"llama": ONE} if look % 2 else {}
        assert not day.demand.to_be_placed(owned, day.placements, day.now)
    day.go_on(100, missed=30)
    assert len(day.asked) == asked + 1


def test_a_model_that_has_moved_away_is_no_reason_any_more() -> None:
    demand = Demand(0.0)
    for look in range(1, 600):
        ended(demand, "", met=0, missed=30 if look < 30 else 0, now=look * LOOK_S)
        ended(demand, "", met=30, missed=0, now=look * LOOK_S, alias="qwen")
        assert not demand.to_be_placed({"qwen": ONE}, 1 if look < 30 else 2, look * LOOK_S)


def test_placements_that_others_ask_for_are_given_time_and_lengthen_no_pause() -> None:
    day = Day()
    for _ in range(20):
        day.go_on(10, missed=30)
        day.placements += 1
    assert day.asked == []
    day.go_on(32, missed=30)
    assert len(day.asked) == 1


@given(missing=st.lists(st.integers(min_value=0, max_value=60), max_size=500))
def test_never_oftener_than_every_five_minutes(missing: list[int]) -> None:
    day = Day()
    for missed in missing:
        day.go_on(1, met=5, missed=missed)
    assert all(later - earlier >= 300.0 for earlier, later in itertools.pairwise([0.0, *day.asked]))
