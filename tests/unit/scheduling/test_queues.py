"""Queues: priority first, tenants by weight, first come first served."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.scheduling.ordered import Ordered
from service.scheduling.queues import Queues, Speed, Standing, Waiting


def waiting(number: int, *, alias: str = "llama", **more: object) -> Waiting[int]:
    return Waiting(str(number), alias, number, float(number), **more)  # type: ignore[arg-type]


def ids(items: list[Waiting[int]]) -> list[str]:
    return [item.id for item in items]


def test_requests_of_one_priority_are_taken_in_the_order_of_their_arrival():
    queues: Queues[int] = Queues()
    for number in range(5):
        queues.admit(waiting(number))
    assert ids(queues.take("llama", 3)) == ["0", "1", "2"]
    assert ids(queues.take("llama", 9)) == ["3", "4"]
    assert len(queues) == 0


def test_a_smaller_priority_goes_first():
    queues: Queues[int] = Queues()
    for number, priority in enumerate((5, 0, -1, 0)):
        queues.admit(waiting(number, priority=priority))
    assert ids(queues.take("llama", 4)) == ["2", "1", "3", "0"]


def test_tenants_share_a_queue_by_their_weights_however_much_one_of_them_sends():
    queues: Queues[int] = Queues(tenant_weights={"gold": 3.0})
    for number in range(400):
        queues.admit(waiting(number, tokens=100, tenant="gold" if number % 2 else "tin"))
    for number in range(400, 1400):
        queues.admit(waiting(number, tokens=100, tenant="tin"))
    first = queues.take("llama", 200)
    assert sum(item.tenant == "gold" for item in first) == pytest.approx(150, abs=2)


def test_a_tenants_share_is_in_tokens_not_in_requests():
    queues: Queues[int] = Queues()
    for number in range(200):
        queues.admit(waiting(number, tokens=300 if number % 2 else 100, tenant="long" if number % 2 else "short"))
    first = queues.take("llama", 80)
    assert sum(item.tenant == "short" for item in first) == pytest.approx(60, abs=1)


def test_a_tenant_that_comes_late_has_saved_nothing_up():
    queues: Queues[int] = Queues()
    for number in range(100):
        queues.admit(waiting(number, tenant="early"))
    queues.take("llama", 60)
    for number in range(100, 140):
        queues.admit(waiting(number, tenant="late"))
    assert sum(item.tenant == "early" for item in queues.take("llama", 40)) == pytest.approx(20, abs=1)


def test_a_tenant_that_withdraws_everything_is_not_held_to_account_for_it():
    queues: Queues[int] = Queues()
    queues.admit(waiting(0, tenant="other"))
    for number in range(1, 50):
        queues.admit(waiting(number, tokens=1000, tenant="fickle"))
    for number in range(1, 50):
        queues.remove(str(number))
    for number in range(50, 60):
        queues.admit(waiting(number, tenant="other"))
    queues.admit(waiting(60, tenant="fickle"))
    assert queues.position("60") == 1


@pytest.mark.parametrize("by_deadline", [False, True])
def test_a_tenant_whose_callers_give_up_has_its_share_of_what_is_taken(by_deadline):
    queues: Queues[int] = Queues()
    for number in range(2000):
        queues.admit(waiting(number, tokens=100, tenant="patient"))
    taken: Counter[str] = Counter()
    for second in range(1000):
        deadline = second + 20.0 if by_deadline else None
        queues.admit(Waiting(f"late{second}", "llama", 0, second, tokens=100, tenant="hasty", deadline=deadline))
        queues.expired(second)
        queues.remove(f"late{second - 20}")
        taken.update(item.tenant for item in queues.take("llama"))
    assert taken["hasty"] == pytest.approx(500, abs=5)


def test_the_one_that_is_left_of_many_waits_for_none_that_were_withdrawn():
    queues: Queues[int] = Queues()
    for number in range(1000):
        queues.admit(waiting(number, tenant="other"))
    for number in range(1000, 2000):
        queues.admit(waiting(number, tenant="fickle"))
    for number in range(1000, 1999):
        queues.remove(str(number))
    assert queues.position("1999") == 1
    assert queues.prospect(waiting(2000, tenant="fickle")).position == 3


def test_nobody_gains_by_what_it_withdraws():
    queues: Queues[int] = Queues()
    for number in range(400):
        queues.admit(waiting(number, tokens=100, tenant="other"))
        queues.admit(waiting(1000 + number, tokens=100, tenant="sly"))
    taken: Counter[str] = Counter()
    for number in range(200):
        for more in range(3):
            queues.admit(waiting(5000 + 3 * number + more, tokens=1000, tenant="sly"))
        taken.update(item.tenant for item in queues.take("llama"))
        for more in range(3):
            queues.remove(str(5000 + 3 * number + more))
    assert taken["sly"] <= 101


_STEPS = st.sampled_from(("admit", "admit", "take", "early", "withdraw", "aside", "back"))


@given(st.lists(st.tuples(_STEPS, st.integers(0, 9), st.sampled_from((1, 1, 7, 40)))))
def test_whatever_goes_or_stands_aside_places_are_whole_and_a_tenants_own_keep_their_order(
    steps: list[tuple[str, int, int]],
) -> None:
    queues: Queues[int] = Queues()
    here: dict[str, bool] = {}
    """Those that wait, and whether they have had their turn all the time."""
    for number, (step, which, tokens) in enumerate(steps):
        chosen = list(here)[which % len(here)] if here else None
        if step == "admit":
            deadline = 60.0 if which % 2 else None
            queues.admit(waiting(number, tokens=tokens, tenant="xyz"[which % 3], deadline=deadline))
            here[str(number)] = True
        elif step in {"take", "early"}:
            speed = Speed(now=0.0, request_s=1.0, tokens_s=1.0) if step == "early" else None
            for item in queues.take("llama", speed=speed, aside=1):
                del here[item.id]
        elif chosen is None:
            continue
        elif step == "withdraw":
            queues.remove(chosen)
            del here[chosen]
        else:
            here[chosen] = False
            queues.place_as(chosen, Standing.IN_TURN if step == "back" else Standing.LATE)
        order = list(queues.waiting("llama"))
        assert ids(order) == [request for _, request in sorted((queues.position(request), request) for request in here)]
        for tenant in "xyz":
            own = [item.arrived for item in order if item.tenant == tenant and here[item.id]]
            assert own == sorted(own)


def test_a_cancelled_request_is_not_taken():
    queues: Queues[int] = Queues()
    for number in range(3):
        queues.admit(waiting(number))
    removed = queues.remove("1")
    assert removed is not None
    assert removed.payload == 1
    assert queues.remove("1") is None
    assert ids(queues.take("llama", 3)) == ["0", "2"]


def test_an_id_can_wait_only_once():
    queues: Queues[int] = Queues()
    queues.admit(waiting(0))
    with pytest.raises(ValueError, match="waits already"):
        queues.admit(waiting(0))


def test_what_is_past_its_deadline_is_handed_out_once():
    queues: Queues[int] = Queues()
    for number, deadline in enumerate((10.0, 5.0, None, 7.0)):
        queues.admit(waiting(number, deadline=deadline))
    assert queues.expired(4.9) == []
    assert ids(queues.expired(7.0)) == ["1", "3"]
    assert queues.expired(7.0) == []
    assert ids(queues.take("llama", 9)) == ["0", "2"]


def test_a_view_leaves_out_deadlines_that_nothing_can_reach():
    queues: Queues[int] = Queues()
    for number, deadline in enumerate((5.0, 20.0, None)):
        queues.admit(waiting(number, tokens=10, priority=number, deadline=deadline))
    view = queues.view("llama", reachable=6.0)
    assert (view.requests, view.tokens, view.oldest, view.best_priority) == (3, 30, 0.0, 0)
    assert (view.nearest_deadline, view.due, view.undated) == (20.0, 1, 1)
    assert queues.view("nobody").nearest_deadline == math.inf


def test_only_an_arrival_that_makes_its_queue_more_urgent_asks_for_a_new_decision():
    queues: Queues[int] = Queues()
    assert queues.admit(waiting(0, deadline=50.0))
    assert not queues.admit(waiting(1, deadline=60.0))
    assert queues.admit(waiting(2, deadline=40.0))
    assert queues.admit(waiting(3, priority=-1))


@st.composite
def arrivals(draw: st.DrawFn) -> list[Waiting[int]]:
    rows = draw(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(-2, 2), st.integers(1, 50), st.sampled_from("xyz")))
    )
    return [
        waiting(n, alias=alias, priority=priority, tokens=tokens, tenant=tenant)
        for n, (alias, priority, tokens, tenant) in enumerate(rows)
    ]


@given(arrivals())
def test_no_priority_is_inverted_and_no_tenant_overtaken_by_itself(items: list[Waiting[int]]):
    queues: Queues[int] = Queues()
    for item in items:
        queues.admit(item)
    for alias in "ab":
        expected = [item.id for item in queues.waiting(alias)]
        assert [queues.position(request) for request in expected] == list(range(len(expected)))
        taken = queues.take(alias, len(items))
        assert ids(taken) == expected
        assert [item.priority for item in taken] == sorted(item.priority for item in taken)
        for tenant in "xyz":
            for priority in range(-2, 3):
                own = [i.arrived for i in taken if (i.tenant, i.priority) == (tenant, priority)]
                assert own == sorted(own)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=200), st.integers(0, 3000))
def test_a_counted_sequence_agrees_with_a_sorted_list(steps: list[tuple[bool, int]], probe: int):
    ordered: Ordered[tuple[float]] = Ordered()
    truth = {(float(key),): key for key in range(0, 3000, 2)}
    for key, size in truth.items():
        ordered.add(key, size)
    for add, number in steps:
        key = (float(number),)
        if add and key not in truth:
            truth[key] = number
            ordered.add(key, number)
        elif not add:
            truth.pop(key, None)
            ordered.discard(key)
    below = [key for key in truth if key < (float(probe),)]
    assert ordered.before((float(probe),)) == (len(below), sum(truth[key] for key in below))
    assert ordered.below((float(probe),)) == max(below, default=None)
    assert ordered.at_least((float(probe),)) == min((key for key in truth if key >= (float(probe),)), default=None)
    assert list(ordered) == sorted(truth)
    assert (len(ordered), ordered.tokens) == (len(truth), sum(truth.values()))


def test_who_a_switch_is_paid_for_is_served_though_others_are_before_it_by_priority_order_or_share() -> None:
    queues: Queues[int] = Queues()
    for n in range(50):
        queues.admit(Waiting(f"old{n}", "llama", 0, arrived=n, tokens=100))
    queues.admit(Waiting("urgent", "llama", 0, arrived=50.0, tokens=100, priority=3, deadline=104.0))
    speed = Speed(now=100.0, request_s=2.0, tokens_s=500.0)
    assert queues.view("llama", reachable=101.0).nearest_deadline == 104.0, "the policy is told that it presses"
    assert ids(queues.take("llama", 4, speed=speed)) == ["urgent", "old0", "old1", "old2"]


def test_a_deadline_that_its_place_meets_or_that_nothing_can_meet_changes_no_order() -> None:
    queues: Queues[int] = Queues()
    speed = Speed(now=100.0, request_s=2.0, tokens_s=500.0)
    for n, deadline in enumerate([None, 100.5, 900.0, None]):
        queues.admit(Waiting(str(n), "llama", 0, arrived=n, tokens=100, deadline=deadline))
    assert ids(queues.take("llama", 4, speed=speed)) == ["0", "1", "2", "3"]


def test_a_tenant_whose_deadlines_always_press_gets_half_at_most_and_pays_for_it_later() -> None:
    queues: Queues[int] = Queues()
    speed = Speed(now=0.0, request_s=1.0, tokens_s=1.0)
    for n in range(100):
        queues.admit(Waiting(f"p{n}", "llama", 0, arrived=n, tokens=10, tenant="pressing", deadline=5.0 + n / 100))
        queues.admit(Waiting(f"q{n}", "llama", 0, arrived=n, tokens=10, tenant="quiet"))
    first = [one for _ in range(60) for one in queues.take("llama", speed=speed)]
    assert sum(item.tenant == "pressing" for item in first) <= 45
    rest = queues.take("llama", 200)
    assert len(first) + len(rest) == 200
    assert max(Counter(item.tenant for item in [*first, *rest[:60]]).values()) <= 75


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=400))
def test_tenants_are_forgotten_though_something_waits_all_the_time(steps: list[tuple[int, bool]]) -> None:
    queues: Queues[int] = Queues()
    queues.admit(Waiting("first", "llama", 0, arrived=0.0, tenant="first"))
    for n, (tenant, take) in enumerate(steps):
        queues.admit(Waiting(str(n), "llama", 0, arrived=n, tenant=f"t{tenant}"))
        if take:
            queues.take("llama")
    level = queues._queues["llama"].levels[0]
    assert sum(account.waiting for account in level.accounts.values()) == level.waiting == len(queues)
    assert all(account.waiting or account.finish > level.now for account in level.accounts.values())


def test_of_a_hundred_thousand_tenants_few_are_remembered() -> None:
    queues: Queues[int] = Queues()
    for n in range(100_000):
        queues.admit(Waiting(str(n), "llama", 0, arrived=n, tokens=10, tenant=f"t{n}"))
        if n > 12:
            queues.take("llama")
    level = queues._queues["llama"].levels[0]
    assert len(queues) == 13
    assert len(level.accounts) < 2000
