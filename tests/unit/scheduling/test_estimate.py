"""Estimates: how long a waiting request waits, by the order of turns, and which deadlines are past hope."""

import math
from dataclasses import replace
from typing import Any

import pytest

from schemas.contexts import Tier
from schemas.objectives import Objective
from service.scheduling.batch import Moments
from service.scheduling.costs import Pace
from service.scheduling.estimate import Coming, Forecast, Work, _Batch, can_meet
from service.scheduling.goodput import Goal
from service.scheduling.policy import Decision, Hold, ModelView, Policy, PolicySettings, View
from service.scheduling.queues import Place, QueueView

PACE = Pace(request_s=2.0, request_tokens=100.0, tokens_s=40.0, most_tokens_s=50.0, most_requests_s=0.5)
POLICY = Policy(PolicySettings())


def model(requests: int = 1, *, work_s: float, switch_s: float = 0.0, oldest: float = 99.0, **more: Any) -> ModelView:
    tokens = int(work_s * PACE.tokens_s) if requests else 0
    waiting = QueueView(requests=requests, tokens=tokens, oldest=oldest, best_priority=0, undated=requests)
    return ModelView(
        waiting=waiting, work_s=work_s, switch_s=switch_s, bring_s=switch_s, request_s=2.0, undated=True, **more
    )


def view(**models: ModelView) -> View:
    active = next(iter(models))
    return View(now=100.0, active=active, since=100.0, models=models, credit_s=10.0)


def rolled(of: View, policy: Policy = POLICY, **work: Work) -> Forecast:
    def switch_s(alias: str, _tier: Tier) -> float:
        return of.models[alias].switch_s

    return Forecast(of, policy, switch_s, work)


def test_a_model_that_is_brought_in_meanwhile_has_its_turn_without_the_time_that_took():
    aside = view(a=model(work_s=20.0), b=model(work_s=1.0, switch_s=15.0, tier=Tier.PARKED))
    cheap = Forecast(aside, POLICY, lambda _alias, _tier: 0.001)
    ends = cheap.served_s("a", 19.0) + 1.0
    assert cheap.turn_s("b") < ends + 5.0
    alone = Forecast(aside, Policy(PolicySettings(beside=frozenset())), lambda _alias, _tier: 0.001)
    assert alone.turn_s("b") > 15.0 + 19.0


@pytest.mark.parametrize("back_s", [0.5, 2.0])
def test_the_way_back_to_a_model_takes_its_time_too(back_s: float):
    urgent = replace(model(work_s=1.0, switch_s=0.5), waiting=QueueView(1, 50, 99.0, best_priority=-1, undated=1))
    both = view(a=model(work_s=10.0, unfinished=1), b=urgent)
    there_and_back = 0.5 + 1.0 + back_s
    found = Forecast(both, POLICY, lambda _alias, _tier: back_s).served_s("a", 5.0)
    assert found == pytest.approx(there_and_back + 5.0)


def test_a_model_waits_for_the_turns_and_switches_before_its_own():
    seen = view(a=model(work_s=4.0), b=model(work_s=3.0, switch_s=0.5), c=model(work_s=9.0, switch_s=0.25, oldest=99.5))
    found = rolled(seen)
    assert 0.5 < found.turn_s("b") <= 4.5
    assert found.turn_s("c") == pytest.approx(found.turn_s("b") + 3.0 + 0.25, abs=0.05)


def test_a_model_that_was_gone_to_has_the_same_way_back_to_the_forecast_as_to_the_worker():
    """What was prefilled again as it was gone to counts in whether it is left."""

    views = list[View]()

    class Seen(Policy):
        def decide(self, view: View) -> Decision:
            views.append(view)
            return super().decide(view)

    runs = model(work_s=10.0, running=(Goal(100.0, 130.0, ttft_s=10.0),), again_s=2.0)
    rolled(view(a=model(0, work_s=0.0), b=runs), Seen(PolicySettings()))
    told = [seen.models["b"].last_again_s for seen in views]
    assert (told[0], views[-1].active, told[-1]) == (0.0, "b", 2.0)


def test_what_is_known_better_than_the_policy_is_told_decides_how_long_turns_are():
    seen = view(a=model(work_s=4.0), b=model(work_s=3.0, switch_s=0.5), c=model(work_s=9.0, switch_s=0.25, oldest=99.5))
    found = rolled(seen, b=Work(1.0))
    assert found.turn_s("c") == pytest.approx(found.turn_s("b") + 1.0 + 0.25, abs=0.05)
    assert found.served_s("b", 1.0) == pytest.approx(found.turn_s("b") + 1.0)


def test_a_turn_ends_with_a_step_and_not_before_what_began_in_it_has_its_first_token():
    seen = view(a=model(work_s=4.0), b=model(work_s=3.0, switch_s=0.5), c=model(work_s=9.0, switch_s=0.25, oldest=99.5))

    def turn_s(work: Work) -> float:
        found = rolled(seen, b=work)
        return found.turn_s("c") - found.turn_s("b") - 0.25

    plain = turn_s(Work(9.0))
    assert 3.0 < plain < 4.0
    assert turn_s(Work(9.0, step_s=0.4)) == pytest.approx(plain + 0.2)
    assert turn_s(Work(9.0, first_s=5.0, step_s=0.4)) == pytest.approx(5.2)


@pytest.mark.parametrize(
    ("work", "turn_s"), [(Work(10.0), 0.5), (Work(10.0, 0.0, 0.4), 0.7), (Work(10.0, 2.0, 0.4), 2.5)]
)
def test_a_turn_that_is_over_lasts_until_the_step_is_done(work: Work, turn_s: float):
    urgent = replace(model(work_s=1.0, switch_s=0.5), waiting=QueueView(1, 50, 99.0, best_priority=-1, undated=1))
    seen = replace(view(a=model(work_s=10.0, unfinished=1), b=urgent), since=90.0)
    assert rolled(seen, a=work).turn_s("b") == pytest.approx(turn_s)


def test_what_ends_with_its_models_work_ends_when_that_is_done_whatever_rounding_does():
    """To the last of a model's requests its turn is just long enough: it does not have to wait for another one."""
    for work_s in (n / 7 for n in range(1, 200)):
        seen = view(a=model(work_s=work_s), b=model(work_s=50.0, switch_s=0.5))
        found = rolled(replace(seen, hold=Hold("a", drained=True)))
        assert found.served_s("a", work_s) == pytest.approx(work_s)


def test_models_that_share_the_time_finish_later_than_they_would_alone():
    seen = rolled(view(**{alias: model(40, work_s=80.0, switch_s=0.001, slots=4) for alias in "abc"}))
    for alias in "abc":
        assert seen.served_s(alias, 78.0) == pytest.approx(3 * 78.0, rel=0.1)


def test_what_goes_on_for_longer_than_is_looked_ahead_is_told_by_what_was_seen():
    seen = rolled(view(**{alias: model(9000, work_s=18000.0, switch_s=0.001, slots=4) for alias in "ab"}))
    assert seen.served_s("b", 9000.0) == pytest.approx(18000.0, rel=0.1)
    assert seen.served_s("b", 18000.0) == pytest.approx(36000.0, rel=0.1)


OBJECTIVE = Objective(ttft_s=4.0, tpot_s=0.5)


def test_a_requests_next_token_is_due_the_later_the_more_it_has_said_and_in_time_only_if_its_first_one_is():
    coming = Coming(Moments(1.0, 2.0, 12.0), Goal(102.0, 104.0), OBJECTIVE, tokens=20)

    def served(now: float, *moments: tuple[float, float], to_come: Coming = coming) -> Goal:
        """At a moment, served for so long: as one of a model that is served by then, and at moments before it."""
        batch, model_, before_s = _Batch([to_come]), ModelView(), 0.0
        for served_s, at in (*moments, (7.0, now)):
            model_ = batch.serve(model_, served_s - before_s, at)
            before_s = served_s
        (goal,) = model_.running
        return goal

    begun = replace(coming, moments=Moments(0.0, 0.0, 10.0), goal=Goal(101.0, 140.0))
    assert served(107.0, to_come=begun) == Goal(101.0 + 14 * 0.5, 140.0)
    batch = _Batch([coming])
    assert batch.serve(ModelView(), 0.5, 100.5).goals == (coming.goal,)
    assert batch.serve(ModelView(), 1.0, 101.5).running == (coming.goal,)
    in_time, late = served(108.5), served(109.5)
    assert in_time == Goal(104.0 + 10 * 0.5, 104.0 + 20 * 0.5, ttft_s=4.0)
    assert late == Goal(104.0, 104.0, ttft_s=4.0), "it is to be answered still"
    assert served(120.0, (4.0, 105.5)) == in_time, "another model's turn since then does not make its first token late"


def test_what_has_no_objective_presses_nobody_once_it_runs():
    plain = Coming(Moments(1.0, 2.0, 12.0), Goal(130.0, 160.0), tokens=20)
    hurried = replace(plain, objective=OBJECTIVE)
    assert _Batch([plain]).serve(ModelView(), 7.0, 108.0).running == ()
    beside = _Batch([plain, hurried]).serve(ModelView(), 7.0, 108.0)
    assert beside.running[0] == Goal(math.inf, math.inf)
    assert math.isfinite(beside.running[1].by)


def pressing(presses: float, switch_s: float = 0.01, tier: Tier = Tier.RESIDENT) -> tuple[ModelView, Work]:
    """Ten, and what they take."""
    goals = [Goal(presses, presses + 20.0, 0.01)] * 10
    coming = [Coming(Moments(0.0, 0.1, 20.0), goal, OBJECTIVE, tokens=400) for goal in goals]
    return model(10, work_s=20.0, switch_s=switch_s, tier=tier, goals=tuple(goals)), Work(20.0, coming=coming)


def test_a_turn_that_is_to_end_goes_on_while_the_next_model_is_brought_in():
    (a, work_of_a), (b, work_of_b) = pressing(100.0), pressing(101.0, 1.0, Tier.PARKED)
    found = Forecast(
        view(a=replace(a, switch_s=0.0), b=b),
        POLICY,
        lambda _alias, tier: 0.01 if tier is Tier.RESIDENT else 1.0,
        {"a": work_of_a, "b": work_of_b},
    )
    assert found.turn_s("b") == pytest.approx(1.01)
    assert found.served_s("a", 0.99) == pytest.approx(0.99)


def test_a_turn_is_left_for_another_when_what_pressed_has_been_served():
    """Ten of a press; then the ten of b do, until which all of a's have said enough to be left."""
    (a, work_of_a), (b, work_of_b) = pressing(100.0), pressing(101.0)
    seen = view(a=replace(a, switch_s=0.0), b=b)
    found = rolled(seen, a=work_of_a, b=work_of_b)
    assert 1.0 < found.turn_s("b") < 2.0
    assert found.served_s("a", 20.0) < 45.0
    as_they_were = rolled(seen, a=Work(20.0), b=Work(20.0)).turn_s("b")
    assert as_they_were > 10.0, "what has been served pressed on"


def test_who_gets_no_turn_as_far_as_is_looked_ahead_comes_behind_all_others():
    """What is too late for its objective waits while a thousand press, of which some is always in time."""
    goals = [Goal(100.0 + n, 160.0 + n, 0.01) for n in range(1000)]
    coming = [Coming(Moments(float(n), n + 0.1, n + 1.0), goal, OBJECTIVE, tokens=20) for n, goal in enumerate(goals)]
    a = model(1000, work_s=1000.0, slots=1, goals=tuple(goals[:1]))
    b = model(1, work_s=2.0, switch_s=0.5, oldest=100.0, slots=1)
    seen = Policy(PolicySettings(max_wait_s=1e6))
    found = rolled(view(a=a, b=b, asleep=ModelView()), seen, a=Work(1000.0, coming=coming), b=Work(2.0))
    assert 950.0 < found.served_s("b", 2.0) < 1010.0
    assert found.served_s("asleep", 2.0) == math.inf


def held(hold: Hold, **more: Any) -> View:
    models = {"a": model(work_s=1.0), "b": model(work_s=3.0, switch_s=0.5), "c": model(work_s=1.0, oldest=99.9)}
    return replace(view(**models), hold=hold, **more)


@pytest.mark.parametrize(
    ("hold", "turn_s"), [(Hold("a", until=130.0), 30.5), (Hold("a", drained=True), 1.55), (Hold("a"), math.inf)]
)
def test_under_the_operators_hold_other_models_wait_until_it_ends(hold: Hold, turn_s: float):
    found = rolled(held(hold))
    assert found.turn_s("b") == pytest.approx(turn_s)
    assert found.turn_s("a") == 0.0


def test_in_manual_mode_only_the_operator_knows():
    seen = view(a=model(work_s=1.0), b=model(work_s=1.0, switch_s=0.5))
    assert rolled(seen, Policy(PolicySettings(manual=True))).turn_s("b") == math.inf


@pytest.mark.parametrize(("deadline", "hope"), [(104.9, False), (105.1, True)])
def test_a_deadline_is_past_hope_only_if_it_could_not_be_met_even_at_once(deadline: float, hope: bool):
    assert can_meet(100.0, 1.0, Place(4, 200), PACE, deadline) is hope  # 1 s to switch, 4 s ahead


def test_a_request_that_claims_a_million_tokens_refuses_nobody_behind_it():
    assert can_meet(100.0, 0.0, Place(1, 1_000_000), PACE, 102.1)  # 2 s each, as others did
    assert not can_meet(100.0, 0.0, Place(1, 1_000_000), PACE, 101.9)


def test_a_line_of_short_ones_is_not_taken_for_one_of_long_ones_as_those_before_them_were() -> None:
    assert can_meet(100.0, 0.0, Place(1000, 1000), PACE, 120.1)  # 50 tokens per second
    assert not can_meet(100.0, 0.0, Place(1000, 1000), PACE, 119.9)


def test_who_has_nobody_before_it_is_not_refused_because_others_had_much_to_say() -> None:
    assert can_meet(100.0, 0.0, Place(0, 0), replace(PACE, request_s=1000.0), 100.1)


def test_where_the_pace_was_never_measured_nothing_is_refused_before_its_time():
    unseen = Pace(request_s=1.0, request_tokens=500.0, tokens_s=1.0)
    assert can_meet(100.0, 0.0, Place(9, 9000), unseen, 100.1)
    assert not can_meet(100.0, 0.0, Place(0, 0), unseen, 99.9)
