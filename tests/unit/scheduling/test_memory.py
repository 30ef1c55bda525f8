"""Memory: who gives way, and what is said where nobody can."""

from service.scheduling.memory import Held, Need, idle, plan

GIB = 1 << 30


def held(alias: str, gib: int = 10, **more: object) -> Held:
    return Held(alias=alias, device_bytes=gib * GIB, **more)  # type: ignore[arg-type]


def test_nobody_gives_way_where_there_is_room():
    assert plan(Need("c", 10 * GIB), [held("a"), held("b")], device_budget=30 * GIB).park == ()


def test_the_context_that_runs_again_last_is_parked_first():
    contexts = [held("soon", next_use=0.0), held("later", next_use=3.0), held("next", next_use=1.0)]
    assert plan(Need("new", 10 * GIB), contexts, device_budget=30 * GIB).park == ("later",)


def test_what_is_cheap_to_bring_back_goes_before_what_is_dear():
    contexts = [held("dear", bring_back_s=2.0, next_use=1.0), held("cheap", bring_back_s=0.3, next_use=1.0)]
    assert plan(Need("new", 10 * GIB), contexts, device_budget=20 * GIB).park == ("cheap",)


def test_pinned_and_active_contexts_stay_and_the_problem_is_told_with_its_figures():
    contexts = [held("pinned", pinned=True), held("active", active=True)]
    made = plan(Need("big", 15 * GIB), contexts, device_budget=30 * GIB)
    assert made.park == ()
    assert made.problem == (
        "big does not fit: it needs 15.00 GiB of device memory, the budget is 30.00 GiB; "
        "pinned or active: pinned 10.00 GiB, active 10.00 GiB"
    )


def test_no_more_is_parked_than_is_needed():
    contexts = [held("small", 2, next_use=9.0, bring_back_s=0.1), held("large", 20, next_use=8.0, bring_back_s=3.0)]
    assert plan(Need("new", 15 * GIB), contexts, device_budget=30 * GIB).park == ("large",)


def test_a_context_with_unfinished_requests_is_parked_but_never_dropped():
    busy = Held(alias="busy", host_bytes=10 * GIB, unfinished=3)
    spare = Held(alias="spare", host_bytes=10 * GIB, bring_back_s=99.0)
    need = Need("new", 0, host_bytes=10 * GIB)
    assert plan(need, [busy, spare], device_budget=None, host_budget=20 * GIB).drop == ("spare",)
    assert plan(need, [busy], device_budget=None, host_budget=10 * GIB).problem is not None


def test_an_idle_context_is_parked_and_later_dropped():
    resident = held("resident", idle_s=61.0, idle_ttl=60.0)
    parked = Held(alias="parked", host_bytes=GIB, idle_s=61.0, idle_ttl=60.0)
    fresh = held("fresh", idle_s=10.0, idle_ttl=60.0)
    pinned = held("pinned", idle_s=999.0, idle_ttl=60.0, pinned=True)
    made = idle([resident, parked, fresh, pinned])
    assert (made.park, made.drop) == (("resident",), ("parked",))
