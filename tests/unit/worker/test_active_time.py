"""What a request waited for, by whose turn it was meanwhile."""

from hypothesis import given
from hypothesis import strategies as st

from service.worker.active_time import ActiveTime, waited_for


def test_a_wait_is_divided_into_its_place_in_the_queue_switches_and_the_others_turns():
    turns = ActiveTime("llama", 100.0)
    before = turns.snapshot("qwen", 101.0)
    turns.leave(104.0)
    turns.enter("qwen", 104.5)
    after = turns.snapshot("qwen", 106.5)
    assert waited_for(5.5, before, after) == {"turn": 3.0, "switch": 0.5, "queue": 2.0}
    assert turns.totals(106.5) == ({"llama": 4.0, "qwen": 2.0}, 0.5)


@given(st.lists(st.tuples(st.sampled_from(["llama", "qwen", None]), st.floats(0, 100)), max_size=20))
def test_the_parts_of_a_wait_add_up_to_it(steps: list[tuple[str | None, float]]):
    turns, now = ActiveTime("llama", 0.0), 0.0
    before = turns.snapshot("qwen", now)
    for alias, seconds in steps:
        turns.leave(now) if alias is None else turns.enter(alias, now)
        now += seconds
    parts = waited_for(now, before, turns.snapshot("qwen", now))
    assert abs(sum(parts.values()) - now) < 1e-6
    assert min(parts.values()) >= 0.0
