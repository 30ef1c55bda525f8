"""The policy: what always holds, and what it does in the situations it is made for."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.contexts import Tier
from service.scheduling.policy import Hold, ModelView, Policy, PolicySettings, View
from service.scheduling.queues import QueueView

SETTINGS = PolicySettings(max_wait_s=60.0)
NOW = 1000.0


def model(
    *,
    requests: int = 1,
    oldest: float = NOW - 1,
    deadline: float = math.inf,
    priority: int = 0,
    tier: Tier = Tier.PARKED,
    switch_s: float = 1.0,
    work_s: float = 5.0,
    unfinished: int = 0,
    left: float = -math.inf,
    weight: float = 1.0,
) -> ModelView:
    waiting = QueueView(requests, 100 * requests, oldest, deadline, priority, requests) if requests else QueueView()
    return ModelView(
        waiting=waiting,
        tier=tier,
        unfinished=unfinished,
        undated=math.isinf(deadline),
        left=left,
        switch_s=switch_s,
        bring_s=switch_s,
        work_s=work_s,
        request_s=2.0,
        weight=weight,
    )


def active(**more: object) -> ModelView:
    return model(switch_s=0.0, tier=Tier.RESIDENT, left=NOW, **more)  # type: ignore[arg-type]


def view(*, since: float = NOW - 1.0, credit_s: float = 3.0, hold: Hold | None = None, **models: ModelView) -> View:
    return View(now=NOW, active="a", since=since, models=models, hold=hold, credit_s=credit_s)


def decide(of: View, settings: PolicySettings = SETTINGS) -> str:
    return Policy(settings).decide(of).run


def test_a_model_that_ran_dry_is_left_for_one_that_has_work():
    assert decide(view(a=active(requests=0), b=model())) == "b"


def test_nothing_is_switched_where_nothing_waits():
    assert Policy(SETTINGS).decide(view(a=active(requests=0), b=model(requests=0))).until is None


def test_frozen_requests_bring_their_model_back():
    frozen = model(requests=0, unfinished=3, left=NOW - 5)
    assert decide(view(a=active(requests=0), b=frozen)) == "b"


def test_the_next_model_is_named_for_prefetching_while_this_one_serves():
    decision = Policy(SETTINGS).decide(view(since=NOW, a=active(), b=model()))
    assert (decision.run, decision.prefetch, decision.order) == ("a", "b", ("b",))


def test_a_resident_model_needs_no_prefetch():
    assert Policy(SETTINGS).decide(view(since=NOW, a=active(), b=model(tier=Tier.RESIDENT))).prefetch is None


def test_a_model_is_prefetched_only_from_where_the_engine_can_bring_it_in_meanwhile():
    policy = Policy(replace(SETTINGS, beside=frozenset({Tier.PARKED})))
    for tier, named in ((Tier.PARKED, "b"), (Tier.DROPPED, None)):
        assert policy.decide(view(since=NOW, a=active(), b=model(tier=tier))).prefetch == named


def test_the_bound_on_waiting_ends_a_turn_whatever_the_credit():
    of = view(since=NOW - 50, credit_s=-100.0, a=active(), b=model(oldest=NOW - 59))
    assert decide(of) == "b"


def test_a_deadline_that_would_be_missed_comes_before_the_end_of_the_turn():
    urgent = model(deadline=NOW + 2.9)
    assert decide(view(a=active(deadline=NOW + 500.0), b=urgent)) == "b"
    assert decide(view(a=active(deadline=NOW + 500.0), b=model(deadline=NOW + 300.0))) == "a"


def test_a_turn_is_planned_to_end_just_before_a_deadline_would_be_missed():
    decision = Policy(SETTINGS).decide(view(a=active(deadline=NOW + 500.0), b=model(deadline=NOW + 20.0)))
    assert (decision.run, decision.until) == ("a", NOW + 20.0 - 2.0 - 1.0)


def test_a_better_priority_takes_the_turn_from_a_running_model_once_that_has_had_the_least_turn():
    policy = Policy(PolicySettings(beside=frozenset()))
    assert [policy.decide(view(a=active(), b=model(priority=p))).run for p in (-1, 0, 1)] == ["b", "a", "a"]
    just_begun = policy.decide(view(since=NOW, a=active(), b=model(priority=-1)))
    assert (just_begun.run, just_begun.until) == ("a", NOW + policy.settings.min_turn_s)


def test_what_runs_is_outranked_as_what_waits_is_and_a_frozen_request_keeps_its_priority():
    policy = Policy(PolicySettings(beside=frozenset()))
    running = replace(active(requests=0, unfinished=2), unfinished_priority=0)
    frozen = replace(model(requests=0, unfinished=1, left=NOW - 1), unfinished_priority=-1)
    assert policy.decide(view(a=running, b=model(priority=-1))).run == "b"
    assert policy.decide(view(a=running, b=frozen)).run == "b"
    assert policy.decide(view(a=replace(running, unfinished_priority=-1), b=model(priority=-1))).run == "a"
    assert policy.decide(view(a=active(requests=0), b=model(deadline=NOW + 20), c=frozen)).run == "c"


def test_a_better_priority_goes_before_an_earlier_deadline_of_another_model():
    assert decide(view(a=active(requests=0), b=model(deadline=NOW + 20), c=model(priority=-1))) == "c"


def test_a_turn_ends_early_enough_for_everyone_behind_it_to_be_within_the_bound():
    waits = {alias: model(oldest=NOW - 1, switch_s=5.0) for alias in "bcd"}
    decision = Policy(SETTINGS).decide(view(credit_s=-3.0, a=active(work_s=500.0), **waits))
    bound, switch_and_turn = NOW - 1 + 0.9 * SETTINGS.max_wait_s, 5.0 + 5.0
    assert decision.until == bound - 2 * switch_and_turn - 5.0


def test_the_overdue_model_goes_before_one_of_better_priority():
    of = view(a=active(requests=0), b=model(priority=-5), c=model(oldest=NOW - 59))
    assert decide(of) == "c"


def test_the_turns_of_resident_models_are_as_short_as_their_switches_are_cheap():
    cheap = {"tier": Tier.RESIDENT, "switch_s": 0.002}
    first = Policy(SETTINGS).decide(view(since=NOW, a=active(), b=model(**cheap), c=model(**cheap)))
    assert first.until is not None
    assert first.until - NOW < 0.15


def test_a_heavier_demand_gets_the_longer_turn():
    policy = Policy(PolicySettings(beside=frozenset()))
    little = policy.decide(view(since=NOW, a=active(work_s=5.0), b=model(work_s=20.0, switch_s=0.5)))
    much = policy.decide(view(since=NOW, a=active(work_s=20.0), b=model(work_s=5.0, switch_s=0.5)))
    assert little.until is not None
    assert much.until is not None
    assert much.until - NOW > 3 * (little.until - NOW)


def turn_s(*, weight: float = 1.0, switch_s: float = 1.0) -> float:
    """The turn of a model against one of the same work and the weight 1."""
    of = view(since=NOW, credit_s=100.0, a=active(weight=weight), b=model(switch_s=switch_s))
    until = Policy(PolicySettings(max_wait_s=600.0, beside=frozenset())).decide(of).until
    assert until is not None
    return until - NOW


def test_turns_are_so_long_that_the_switches_take_their_share_and_no_more():
    assert turn_s() == 1.0 / 0.05 / 2
    assert turn_s(switch_s=0.5) == 0.5 / 0.05 / 2
    assert turn_s(switch_s=100.0) == 600.0 / 2, "nor longer than the bound on waiting"


def test_a_weight_makes_the_turns_longer_and_the_model_more_worth_saving():
    assert turn_s(weight=4.0) == pytest.approx(1.0 / 0.05 * 4 / 5)
    late = {"oldest": NOW - 2, "deadline": NOW + 2.5, "work_s": 30.0}
    assert decide(view(a=active(requests=0), b=model(**late), c=model(weight=2.0, **late))) == "c"
    assert decide(view(a=active(requests=0), b=model(weight=2.0, **late), c=model(**late))) == "b"


def test_the_operators_hold_stands_for_its_time():
    overdue = model(oldest=NOW - 500)
    assert decide(view(a=active(), b=overdue, hold=Hold("a", until=NOW + 1))) == "a"
    assert decide(view(since=NOW - 50, a=active(), b=overdue, hold=Hold("a", until=NOW - 1))) == "b"
    assert decide(view(a=active(), b=overdue, hold=Hold("a"))) == "a"


def test_a_hold_until_drained_stands_as_long_as_it_is_given_though_what_is_left_is_unread():
    hold = Hold("a", drained=True)
    assert decide(view(since=NOW - 500, a=active(), b=model(oldest=NOW - 500), hold=hold)) == "a"
    unread = Policy(PolicySettings()).decide(view(a=active(requests=0), b=model(), hold=hold))
    assert (unread.run, unread.until) == ("a", NOW + 1), "looked at again, for nothing tells when it has been read"


def test_in_manual_mode_only_the_operator_switches():
    settings = PolicySettings(manual=True)
    assert decide(view(a=active(requests=0), b=model(oldest=0.0)), settings) == "a"


def test_a_model_that_has_just_run_dry_is_given_a_moment():
    settings = PolicySettings(wait_and_see=0.5)
    dry = view(a=active(requests=0), b=model())
    moment = View(now=NOW, active="a", since=NOW - 5, models=dry.models, credit_s=3.0, idle_since=NOW)
    decision = Policy(settings).decide(moment)
    assert (decision.run, decision.until) == ("a", NOW + 0.5)


@pytest.mark.parametrize(
    "other",
    [
        model(requests=0, unfinished=2, left=NOW - 5),
        model(deadline=NOW + 2.0 + 1.0),
        model(oldest=NOW - 0.9 * SETTINGS.max_wait_s),
    ],
    ids=["frozen", "due", "overdue"],
)
def test_what_can_not_wait_is_not_kept_waiting_for_what_may_come(other: ModelView):
    dry = view(a=active(requests=0), b=other)
    moment = View(now=NOW, active="a", since=NOW - 5, models=dry.models, credit_s=3.0, idle_since=NOW)
    assert decide(moment) == "b"


@st.composite
def views(draw: st.DrawFn) -> View:
    models = {}
    for alias in draw(st.sets(st.sampled_from("abcdef"), min_size=1)) | {"a"}:
        seen = {
            "requests": draw(st.integers(0, 50)),
            "oldest": NOW - draw(st.floats(0, 120)),
            "deadline": draw(st.one_of(st.just(math.inf), st.floats(NOW, NOW + 400))),
            "priority": draw(st.integers(-2, 2)),
            "work_s": draw(st.floats(0, 200)),
            "unfinished": draw(st.integers(0, 3)),
        }
        if alias == "a":
            models[alias] = active(**seen)
        else:
            models[alias] = model(switch_s=draw(st.floats(0.0001, 5)), left=NOW - draw(st.floats(0, 120)), **seen)
    return view(since=NOW - draw(st.floats(0, 60)), credit_s=draw(st.floats(-3, 3)), **models)


@given(views())
def test_the_same_view_gives_the_same_decision(of: View):
    shuffled = View(
        now=of.now,
        active=of.active,
        since=of.since,
        models=dict(reversed(of.models.items())),
        credit_s=of.credit_s,
    )
    assert Policy(SETTINGS).decide(of) == Policy(SETTINGS).decide(shuffled)


@given(views())
def test_it_is_work_conserving(of: View):
    decision = Policy(SETTINGS).decide(of)
    if any(seen.demand for seen in of.models.values()):
        assert of.models[decision.run].demand


@given(views())
def test_a_decision_to_stay_says_when_to_look_again_and_that_is_never_past(of: View):
    decision = Policy(SETTINGS).decide(of)
    others = [alias for alias, seen in of.models.items() if alias != "a" and seen.demand]
    if decision.run == "a" and others:
        assert decision.until is not None
        assert decision.until > of.now


@given(views())
def test_without_credit_only_the_bound_makes_it_leave_unfinished_work(of: View):
    assume(of.models["a"].demand)
    decision = Policy(SETTINGS).decide(of)
    others = [seen for alias, seen in of.models.items() if alias != "a" and seen.demand]
    if others and of.credit_s < min(seen.switch_s for seen in others) and decision.run != "a":
        soonest = min(seen.waits_since for seen in others) + SETTINGS.max_wait_s
        needed = sum(seen.switch_s + max(seen.switch_s, SETTINGS.min_turn_s) for seen in others)
        assert soonest - needed - 0.1 * SETTINGS.max_wait_s <= of.now


@given(views())
def test_who_is_not_overdue_never_goes_before_a_better_priority(of: View):
    decision = Policy(SETTINGS).decide(of)
    assume(decision.run != "a")
    chosen = of.models[decision.run]
    overdue = chosen.waits_since + 0.9 * SETTINGS.max_wait_s - chosen.switch_s - NOW <= max(0.05, chosen.switch_s)
    if not overdue and chosen.waiting.best_priority is not None:
        rivals = [
            seen for alias, seen in of.models.items() if alias not in {"a", decision.run} and seen.waiting.requests
        ]
        assert all(chosen.waiting.best_priority <= (seen.waiting.best_priority or 0) for seen in rivals)


def test_of_models_that_must_have_their_turn_now_the_one_that_waited_longest_goes_first_whatever_is_due():
    """Both are as near to the bound as a turn is long; the other one's deadline would have it keep this one beyond."""
    waited, due = model(oldest=NOW - 53.9), model(oldest=NOW - 53.5, deadline=NOW + 1)
    assert decide(view(a=active(), b=due, c=waited)) == "c"
    assert decide(view(a=active(), b=due, c=model(oldest=NOW - 20))) == "b"
