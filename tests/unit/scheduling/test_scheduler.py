"""What the scheduler remembers between decisions, and how it shows it to the policy."""

import math

import pytest

from schemas.contexts import Tier
from service.models_file import Scheduling
from service.scheduling.policy import ModelView, Policy, PolicySettings
from service.scheduling.queues import Waiting
from service.scheduling.scheduler import Context, Scheduler

SETTINGS = PolicySettings(max_wait_s=60.0, switching_share=0.05)


def scheduler(**models: Scheduling) -> Scheduler[str]:
    return Scheduler(policy=Policy(SETTINGS), active="a", now=100.0, models=models)


def wait(of: Scheduler[str], alias: str, at: float, *, deadline: float | None = None) -> None:
    of.queues.admit(Waiting(f"{alias}{at}", alias, "", at, tokens=100, deadline=deadline))


def worked(of: Scheduler[str], alias: str, *, times: int = 3, seconds: float = 1.0, tokens: int = 100) -> None:
    for _ in range(times):
        of.costs.finished(alias, seconds=seconds, tokens=tokens)
        of.costs.worked(alias, seconds=seconds, tokens=tokens, full=True)


def credit_s(of: Scheduler[str], now: float) -> float:
    return of.view(now, ()).credit_s


def seen(of: Scheduler[str], context: Context, now: float = 100.0) -> ModelView:
    return of.view(now, [context]).models[context.alias]


def test_a_switch_away_from_unfinished_work_is_paid_for_by_the_time_after_it():
    of = scheduler()
    most = SETTINGS.switching_share * SETTINGS.max_wait_s
    wait(of, "a", 99.0)
    of.decide(100.0, [Context("a")])
    of.switched("a", "b", Tier.PARKED, 2.0, 102.0)
    assert credit_s(of, 102.0) == pytest.approx(most - 2.0)
    assert credit_s(of, 112.0) == pytest.approx(most - 2.0 + 10 * SETTINGS.switching_share)
    assert credit_s(of, 1e6) == most, "a quiet time is not saved up"


def test_a_switch_away_from_a_model_that_ran_dry_costs_nothing_that_anyone_misses():
    of = scheduler()
    of.decide(100.0, [Context("a")])
    of.switched("a", "b", Tier.PARKED, 2.0, 102.0)
    assert credit_s(of, 102.0) == SETTINGS.switching_share * SETTINGS.max_wait_s


def test_what_a_switch_loses_beside_its_stall_is_part_of_what_switching_costs_and_of_no_promise():
    of, resident = scheduler(), Context("b")
    wait(of, "a", 99.0)
    of.decide(100.0, [Context("a")])
    for to, now in (("b", 102.0), ("a", 103.0)):
        of.switched(of.active, to, Tier.RESIDENT, 0.5, now, refill_s=0.25)
        view = seen(of, Context(to), now)
        assert (of.active, view.loses_s, view.switch_s) == (to, 0.75, 0)
    most = SETTINGS.switching_share * SETTINGS.max_wait_s
    assert credit_s(of, 103.0) == pytest.approx(most - 2 * 0.75 + SETTINGS.switching_share)
    view = seen(of, resident, 103.0)
    assert (view.switch_s, view.loses_s) == (0.5, 0.75)
    assert of.costs.switch(None, "b", Tier.RESIDENT).mean == 0.5


def test_turns_are_as_much_longer_as_a_switch_loses_more_than_its_stall():
    def turn_s(refill_s: float) -> float:
        of = scheduler()
        for alias in "ab":
            worked(of, alias)
            wait(of, alias, 91.0)
            wait(of, alias, 92.0)
        of.decide(100.0, [Context("a")])
        for to, now in (("b", 102.0), ("a", 103.0)):
            of.switched(of.active, to, Tier.RESIDENT, 0.01, now, refill_s=refill_s)
        decision = of.decide(103.0, [Context("a", unfinished=1), Context("b", unfinished=1)])
        assert decision.run == "a"
        assert decision.until is not None
        return decision.until - 103.0

    assert (turn_s(0.0), turn_s(0.01)) == (pytest.approx(0.2), pytest.approx(0.4))


def test_what_has_no_deadline_is_known_to_have_only_its_turn_to_hope_for():
    of = scheduler()
    wait(of, "dated", 99.0, deadline=900.0)
    wait(of, "undated", 99.0)
    assert [seen(of, Context(alias)).undated for alias in ("dated", "undated", "empty")] == [False, True, False]
    assert [seen(of, Context("b", unfinished=1, undated=flag)).undated for flag in (False, True)] == [False, True]


def test_a_request_is_refused_by_what_a_switch_was_seen_to_cost_here_and_not_by_what_is_said_of_it():
    of = scheduler()
    of.costs.adopt({"models": {"b": {"parked": [1e9, 0.0]}}}, {"b"})
    worked(of, "b")
    request, parked = Waiting("1", "b", "", 100.0, tokens=100, deadline=110.0), Context("b", tier=Tier.PARKED)
    assert of.can_meet(request, 100.0, parked)
    for _ in range(3):
        assert of.can_meet(request, 100.0, parked), "one switch may have been a bad moment"
        of.costs.switched("a", "b", Tier.PARKED, 30.0)
    assert not of.can_meet(request, 100.0, parked)


def test_slow_loads_of_another_model_refuse_nothing_and_those_of_its_own_not_for_good():
    of = scheduler()
    worked(of, "b")
    dropped = Context("b", tier=Tier.DROPPED)

    def let_in(now: float) -> bool:
        return of.can_meet(Waiting("1", "b", "", now, tokens=100, deadline=now + 60.0), now, dropped)

    for to, seconds in (("c", 300.0), ("c", 300.0), ("c", 300.0), ("b", 300.0), ("b", 290.0)):
        of.costs.switched("a", to, Tier.DROPPED, seconds)
        assert let_in(100.0)
    of.costs.switched("a", "b", Tier.DROPPED, 300.0)
    assert [let_in(now) for now in (100.0, 400.0, 699.0, 700.0, 701.0, 1299.0, 1300.0)] == [
        *(False, False, False, True, False, False, True)
    ]
    of.costs.finished("b", seconds=1.0, tokens=100)
    assert not let_in(1950.0), "what was seen meanwhile speaks against it as well"
    of.costs.switched("a", "b", Tier.DROPPED, 5.0)
    assert let_in(1951.0)


def test_a_bad_moment_refuses_nobody() -> None:
    """As at a start beside others: a full batch had ended one request in a second, and hundreds waited."""
    of = scheduler()
    for n in range(400):
        wait(of, "a", 100.0 + n / 1000)
    request = Waiting("1", "a", "", 100.0, tokens=100, deadline=130.0)
    worked(of, "a", times=2)
    assert of.can_meet(request, 100.0, Context("a")), "too little was seen"
    worked(of, "a", seconds=0.05)
    worked(of, "a", times=5, seconds=10.0)
    assert of.can_meet(request, 100.0, Context("a")), "it was seen to work off 20 of them in a second"
    worked(of, "a", times=3, seconds=10.0)
    assert not of.can_meet(request, 100.0, Context("a")), "that is long ago"


def test_a_model_that_was_slow_for_a_while_is_tried_again_though_nothing_can_be_met_by_its_pace():
    of = scheduler()
    worked(of, "a", seconds=100.0)
    wait(of, "a", 99.0)

    def let_in(now: float, ttl: float = 30.0) -> bool:
        return of.can_meet(Waiting("1", "a", "", now, tokens=100, deadline=now + ttl), now, Context("a"))

    assert [let_in(100.0), let_in(701.0, ttl=-1.0), let_in(702.0), let_in(703.0)] == [False, False, True, False]


def test_what_waits_for_a_paused_model_asks_for_no_turn_and_what_it_has_begun_does():
    of = scheduler()
    wait(of, "b", 30.0)
    both = [Context("a"), Context("b")]
    assert of.decide(100.0, both).run == "b"
    of.pauses.say("b", paused=True)
    assert of.decide(100.0, both).run == "a"
    assert of.decide(100.0, [Context("a"), Context("b", unfinished=1)]).run == "b"
    of.pauses.say("b", paused=False)
    assert of.decide(100.0, both).run == "b"


def test_a_preload_under_way_makes_the_switch_cheaper_but_not_the_bringing():
    of = scheduler()
    of.costs.switched("a", "b", Tier.PARKED, 5.0)
    coming = seen(of, Context("b", tier=Tier.PARKED, ready_at=101.0))
    assert coming.switch_s == pytest.approx(1.0, abs=0.1)
    assert coming.bring_s == 5.0
    assert seen(of, Context("b", tier=Tier.PARKED)).switch_s == 5.0


def test_a_deadline_that_no_switch_can_meet_any_more_presses_nobody():
    of = scheduler()
    of.costs.switched("a", "b", Tier.PARKED, 5.0)
    wait(of, "b", 99.0, deadline=104.0)
    assert seen(of, Context("b", tier=Tier.PARKED)).waiting.nearest_deadline == math.inf
    assert seen(of, Context("b")).waiting.nearest_deadline == 104.0


def test_models_yaml_gives_a_model_its_weight_and_its_slots():
    of = scheduler(b=Scheduling(weight=3.0, max_concurrency=2))
    assert [(seen(of, Context(alias)).weight, seen(of, Context(alias)).slots) for alias in "ab"] == [
        (1.0, 256),
        (3.0, 2),
    ]


def test_a_model_that_has_just_run_dry_is_kept_for_a_moment_and_no_longer():
    of = scheduler()
    wait(of, "b", 99.9)
    contexts = [Context("a"), Context("b", tier=Tier.PARKED)]
    moment = of.decide(100.0, contexts)
    assert (moment.run, moment.until) == ("a", 100.0 + SETTINGS.wait_and_see * 1.0)
    assert moment.until is not None
    assert of.decide(moment.until, contexts).run == "b"


@pytest.mark.parametrize("refill_s", [0.0, 1.0])
def test_a_turn_lasts_at_least_as_long_as_it_took_to_get_there(refill_s: float):
    of = scheduler()
    of.decide(100.0, [Context("a")])
    of.switched("a", "b", Tier.PARKED, 4.0, 104.0, refill_s=refill_s)
    for alias in "bc":
        wait(of, alias, 0.0)
    decision = of.decide(104.0, [Context("b"), Context("c", tier=Tier.PARKED)])
    assert (decision.run, decision.until) == ("b", 108.0 + refill_s)
