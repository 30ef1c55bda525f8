"""Estimates: how long a waiting request waits, by the order of turns, and which deadlines are past hope."""

import math
from dataclasses import replace
from typing import Any

import pytest

from schemas.contexts import Tier
from service.scheduling.costs import Pace
from service.scheduling.estimate import Estimate, Forecast, can_meet
from service.scheduling.policy import Hold, ModelView, Policy, PolicySettings, View
from service.scheduling.queues import Place, Queues, QueueView, Waiting
from service.scheduling.scheduler import Context, Scheduler

PACE = Pace(request_s=2.0, request_tokens=100.0, tokens_s=50.0, seen=True)
POLICY = Policy(PolicySettings())
FIRST = Place(0, 0)


def model(requests: int = 1, *, work_s: float, switch_s: float = 0.0, oldest: float = 99.0, **more: Any) -> ModelView:
    tokens = int(work_s * PACE.tokens_s) if requests else 0
    waiting = QueueView(requests=requests, tokens=tokens, oldest=oldest, best_priority=0, undated=requests)
    return ModelView(
        waiting=waiting, work_s=work_s, switch_s=switch_s, bring_s=switch_s, request_s=2.0, undated=True, **more
    )


def view(**models: ModelView) -> View:
    active = next(iter(models))
    return View(now=100.0, active=active, since=100.0, models=models, credit_s=10.0)


def expected(of: View, alias: str, place: Place = FIRST, policy: Policy = POLICY) -> Estimate:
    def switch_s(alias: str, _tier: Tier) -> float:
        return of.models[alias].switch_s

    return Forecast(of, policy, switch_s).estimate(alias, place, PACE)


def test_a_request_of_the_active_model_starts_at_once_where_a_slot_is_free():
    assert expected(view(a=model(4, work_s=10.0)), "a", Place(3, 250)) == Estimate(3, 250, turn_s=0.0, wait_s=0.0)


def test_a_request_waits_until_those_before_it_have_left_it_a_slot():
    """Four have just been started, four wait: 100 tokens each at 50 per second. As many are in the middle then."""
    begun = replace(model(4, work_s=8.0), work_s=16.0, unfinished=4, slots=4)
    assert [expected(view(a=begun), "a", Place(n, 100 * n)).wait_s for n in (0, 3)] == [8.0 - 4.0, 14.0 - 4.0]
    nearly_done = replace(model(4, work_s=8.0), work_s=9.0, unfinished=4, slots=4)
    assert [expected(view(a=nearly_done), "a", Place(n, 100 * n)).wait_s for n in (0, 3)] == [2.0, 8.0]


def test_what_is_thought_to_come_after_all_that_is_known_waits_for_that_and_as_much_as_it_takes():
    assert expected(view(a=model(work_s=1.0, unfinished=1, slots=1)), "a", Place(5, 0)).wait_s == pytest.approx(12.0)


def test_a_model_that_is_brought_in_meanwhile_has_its_turn_without_the_time_that_took():
    aside = view(a=model(work_s=20.0), b=model(work_s=1.0, switch_s=15.0, tier=Tier.PARKED))
    cheap = Forecast(aside, POLICY, lambda _alias, _tier: 0.001)
    ends = cheap.served_s("a", 19.0) + 1.0
    assert cheap.turn_s("b") < ends + 5.0
    alone = Forecast(aside, Policy(PolicySettings(prefetch=False)), lambda _alias, _tier: 0.001)
    assert alone.turn_s("b") > 15.0 + 19.0


@pytest.mark.parametrize("back_s", [0.5, 2.0])
def test_the_way_back_to_a_model_takes_its_time_too(back_s: float):
    urgent = replace(model(work_s=1.0, switch_s=0.5), waiting=QueueView(1, 50, 99.0, best_priority=-1, undated=1))
    both = view(a=model(work_s=10.0, unfinished=1), b=urgent)
    there_and_back = 0.5 + 1.0 + back_s
    found = Forecast(both, POLICY, lambda _alias, _tier: back_s).served_s("a", 5.0)
    assert found == pytest.approx(there_and_back + 5.0)


def test_a_request_of_another_model_waits_for_the_turns_and_switches_before_its_own():
    seen = view(a=model(work_s=4.0), b=model(work_s=3.0, switch_s=0.5), c=model(work_s=9.0, switch_s=0.25, oldest=99.5))
    first, second = expected(seen, "b"), expected(seen, "c")
    assert 0.5 < first.turn_s <= 4.5
    assert second.turn_s == pytest.approx(first.turn_s + 3.0 + 0.25, abs=0.05)
    assert second.wait_s == second.turn_s


def test_models_that_share_the_time_finish_later_than_they_would_alone():
    last = Place(39, 3900)
    seen = view(**{alias: model(40, work_s=80.0, switch_s=0.001, slots=4) for alias in "abc"})
    alone = expected(view(a=model(40, work_s=80.0, slots=4)), "a", last).wait_s
    for alias in "abc":
        assert expected(seen, alias, last).wait_s == pytest.approx(3 * alone, rel=0.1)


def test_what_goes_on_for_longer_than_is_looked_ahead_is_told_by_what_was_seen():
    seen = view(**{alias: model(9000, work_s=18000.0, switch_s=0.001, slots=4) for alias in "ab"})
    half, whole = (expected(seen, "b", Place(n, 100 * n)).wait_s for n in (4500, 8999))
    assert half == pytest.approx(18000.0, rel=0.1)
    assert whole == pytest.approx(36000.0, rel=0.1)


def held(hold: Hold, **more: Any) -> View:
    models = {"a": model(work_s=1.0), "b": model(work_s=3.0, switch_s=0.5), "c": model(work_s=1.0, oldest=99.9)}
    return replace(view(**models), hold=hold, **more)


@pytest.mark.parametrize(
    ("hold", "turn_s"), [(Hold("a", until=130.0), 30.5), (Hold("a", drained=True), 1.55), (Hold("a"), math.inf)]
)
def test_under_the_operators_hold_other_models_wait_until_it_ends(hold: Hold, turn_s: float):
    seen = held(hold)
    first = expected(seen, "b", Place(2, 100))
    assert (first.position, first.turn_s, first.wait_s) == (2, pytest.approx(turn_s), pytest.approx(turn_s))
    assert expected(seen, "a").turn_s == 0.0


def test_in_manual_mode_only_the_operator_knows():
    seen = view(a=model(work_s=1.0), b=model(work_s=1.0, switch_s=0.5))
    assert expected(seen, "b", policy=Policy(PolicySettings(manual=True))).wait_s == math.inf


@pytest.mark.parametrize(("deadline", "hope"), [(105.9, False), (106.1, True)])
def test_a_deadline_is_past_hope_only_if_it_could_not_be_met_even_at_once(deadline: float, hope: bool):
    assert can_meet(100.0, 1.0, Place(4, 200), PACE, deadline) is hope  # 1 s to switch, 4 s ahead, half of 2 s itself


def test_a_request_that_claims_a_million_tokens_refuses_nobody_behind_it():
    assert can_meet(100.0, 0.0, Place(1, 1_000_000), PACE, 104.0)  # 2 s each, as others did


def test_where_the_pace_was_never_measured_nothing_is_refused_before_its_time():
    unseen = Pace(request_s=1.0, request_tokens=500.0, tokens_s=1.0)
    assert can_meet(100.0, 0.0, Place(9, 9000), unseen, 100.1)
    assert not can_meet(100.0, 0.0, Place(0, 0), unseen, 99.9)


def test_the_scheduler_knows_the_place_of_each_request_that_waits():
    queues: Queues[str] = Queues()
    scheduler = Scheduler(policy=POLICY, active="a", now=0.0, queues=queues)
    for number in range(3):
        queues.admit(Waiting(f"r{number}", "b", "", float(number), tokens=10))
    contexts = [Context("a"), Context("b", tier=Tier.PARKED)]
    forecast = scheduler.forecast(3.0, contexts)
    found = [scheduler.estimate(f"r{number}", forecast) for number in range(3)]
    assert [each.position for each in found] == [0, 1, 2]
    assert [each.tokens_ahead for each in found] == [0, 10, 20]
    assert scheduler.estimate("unknown", forecast) is None
