"""Memory: who gives way when it is full, and what is said where nobody can."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.contexts import Tier
from service.scheduling.memory import (
    Budgets,
    Holding,
    Idle,
    Keep,
    Move,
    NoRoom,
    make_room,
    overdue,
    room_to_keep,
    share_of,
)


def resident(alias: str, *, used: float = 0.0, weights: int = 10, kv: int = 10, **more: object) -> Holding:
    return Holding(alias, Tier.RESIDENT, weights, kv, used, **more)  # type: ignore[arg-type]


NEW = Holding("new", Tier.DROPPED, 10, 10)


def test_nothing_goes_while_there_is_room() -> None:
    assert make_room([resident("a")], incoming=NEW, budgets=Budgets(device=40)) == ()
    assert make_room([resident("a")], incoming=NEW, budgets=Budgets()) == ()


def test_the_least_recently_used_is_parked_first() -> None:
    moves = make_room([resident("a", used=2), resident("b", used=1)], incoming=NEW, budgets=Budgets(device=45))
    assert moves == (Move("b", Tier.PARKED),)


def test_the_one_that_runs_again_last_is_parked_first() -> None:
    holdings = [
        resident("soon", next_use=0.0),
        resident("later", next_use=3.0),
        resident("next", next_use=1.0),
        resident("nobody's", used=9.0),
    ]
    assert make_room(holdings, incoming=NEW, budgets=Budgets(device=80)) == (Move("nobody's", Tier.PARKED),)
    assert make_room(holdings[:3], incoming=NEW, budgets=Budgets(device=60)) == (Move("later", Tier.PARKED),)


def test_what_is_cheap_to_bring_back_goes_before_what_is_dear() -> None:
    holdings = [
        resident("dear", bring_back_s=2.0, next_use=1.0),
        resident("cheap", bring_back_s=0.3, next_use=1.0),
    ]
    assert make_room(holdings, incoming=NEW, budgets=Budgets(device=40)) == (Move("cheap", Tier.PARKED),)


def test_what_has_requests_frozen_in_it_stays_before_what_has_none() -> None:
    holdings = [resident("busy", used=1, next_use=1.0, unfinished=3), resident("idle", used=2, next_use=1.0)]
    assert make_room(holdings, incoming=NEW, budgets=Budgets(device=40)) == (Move("idle", Tier.PARKED),)


def test_no_more_is_parked_than_is_needed() -> None:
    small = resident("small", weights=2, kv=0, next_use=9.0, bring_back_s=0.01)
    large = resident("large", weights=20, kv=0, next_use=8.0, bring_back_s=3.0)
    big = Holding("big", Tier.DROPPED, 10, 5)
    assert make_room([small, large], incoming=big, budgets=Budgets(device=30)) == (Move("large", Tier.PARKED),)


def test_the_problem_is_told_with_its_figures() -> None:
    mib = 1 << 20
    kept = Holding("kept", Tier.RESIDENT, 8 * mib, 2 * mib, pinned=True)
    incoming = Holding("big", Tier.DROPPED, 10 * mib, 5 * mib)
    with pytest.raises(NoRoom) as problem:
        make_room([kept], incoming=incoming, budgets=Budgets(device=20 * mib))
    assert str(problem.value) == "big needs 15 MiB of the device's 20 MiB; what may not go: kept 10 MiB"


def test_an_idle_context_is_parked_and_later_dropped() -> None:
    found = overdue(
        [
            Idle("resident", Tier.RESIDENT, 61.0, park_after=60.0),
            Idle("fresh", Tier.RESIDENT, 10.0, park_after=60.0),
            Idle("parked", Tier.PARKED, 61.0, park_after=60.0),
            Idle("old", Tier.PARKED, 601.0, park_after=60.0, drop_after=600.0),
            Idle("straight", Tier.RESIDENT, 601.0, drop_after=600.0),
            Idle("gone", Tier.DROPPED, 9e9, park_after=60.0, drop_after=600.0),
            Idle("kept for ever", Tier.RESIDENT, 9e9),
        ]
    )
    assert found == (Move("resident", Tier.PARKED), Move("old", Tier.DROPPED), Move("straight", Tier.DROPPED))


def test_pinned_contexts_stay() -> None:
    holdings = [resident("a", used=1, pinned=True), resident("b", used=2)]
    assert make_room(holdings, incoming=NEW, budgets=Budgets(device=45)) == (Move("b", Tier.PARKED),)


def test_the_one_that_the_newcomer_is_loaded_beside_stays() -> None:
    with pytest.raises(NoRoom, match="needs 1 MiB"):
        make_room([resident("a")], incoming=NEW, budgets=Budgets(device=30), beside="a")


def test_where_host_and_device_are_one_parking_frees_the_kv_cache_only() -> None:
    shared = Budgets(device=35, shared=True)
    assert make_room([resident("a")], incoming=NEW, budgets=shared) == (Move("a", Tier.PARKED),)
    tight = Budgets(device=25, shared=True)
    assert make_room([resident("a")], incoming=NEW, budgets=tight) == (Move("a", Tier.DROPPED),)


def test_a_full_host_drops_the_one_without_requests_first() -> None:
    holdings = [
        Holding("waiting", Tier.PARKED, 10, 10, 1.0, unfinished=3),
        Holding("idle", Tier.PARKED, 10, 10, 2.0),
        resident("a", used=3),
    ]
    moves = make_room(holdings, incoming=NEW, budgets=Budgets(device=20, host=20))
    assert set(moves) == {Move("a", Tier.PARKED), Move("idle", Tier.DROPPED)}


def test_a_context_whose_requests_have_to_go_hands_them_back() -> None:
    holdings = [Holding("waiting", Tier.PARKED, 10, 10, 1.0, unfinished=3), resident("a", used=3, unfinished=1)]
    moves = make_room(holdings, incoming=NEW, budgets=Budgets(device=20, host=10))
    assert Move("waiting", Tier.DROPPED, hand_back=True) in moves


@given(
    st.lists(
        st.tuples(
            st.sampled_from(Tier),
            st.integers(0, 50),
            st.integers(0, 50),
            st.booleans(),
            st.integers(0, 3),
            st.integers(0, 50),
        ),
        max_size=6,
    ),
    st.integers(0, 200),
    st.integers(0, 200),
    st.booleans(),
)
def test_after_the_moves_everything_fits_or_there_is_no_room(
    found: list[tuple[Tier, int, int, bool, int, int]], device: int, host: int, shared: bool
) -> None:
    holdings = [
        Holding(f"m{index}", tier, weights, kv, float(index), unfinished, pinned, kept=kept * (tier is Tier.PARKED))
        for index, (tier, weights, kv, pinned, unfinished, kept) in enumerate(found)
    ]
    budgets = Budgets(device=device, host=host, shared=shared)
    try:
        moves = {move.alias: move for move in make_room(holdings, incoming=NEW, budgets=budgets)}
    except NoRoom:
        return
    after = [
        Holding(h.alias, moves[h.alias].tier, h.weights, h.kv)
        if h.alias in moves
        else Holding(h.alias, h.tier, h.weights, h.kv, kept=h.kept)
        for h in holdings
    ]
    assert sum(map(budgets.on_device, after)) + 20 <= device
    for alias, move in moves.items():  # one after another, each keeps as much as it may
        keep = room_to_keep(after, alias, budgets=budgets, incoming=NEW, moves=tuple(moves.values()))
        assert keep.most is not None
        after = [
            replace(each, kept=keep.most if move.tier is Tier.PARKED else 0) if each.alias == alias else each
            for each in after
        ]
        assert sum(map(budgets.on_device, after)) + 20 <= device
    assert not {h.alias for h in holdings if h.pinned} & set(moves)


def test_models_that_say_nothing_of_their_kv_cache_share_what_the_weights_leave() -> None:
    assert share_of(Budgets(device=1000), weights=[100, 200], models=2) == 300  # a tenth is for graphs


def test_where_the_weights_do_not_fit_together_each_gets_half_of_what_it_leaves_alone() -> None:
    assert share_of(Budgets(device=1000), weights=[600, 600], models=2) == 150


def test_where_host_and_device_are_one_nothing_is_left_to_graphs() -> None:
    assert share_of(Budgets(device=1000, shared=True), weights=[100, 200], models=2) == 350


def test_copies_on_the_host_count_wherever_their_model_is() -> None:
    """Pinned memory rounds up, and a copy is kept when its model is back."""
    budgets = Budgets(device=1000, host=30)
    parked = Holding("parked", Tier.PARKED, 10, 10, host=16)
    back = resident("back", host=16)
    assert make_room([parked, back], incoming=NEW, budgets=budgets) == (Move("parked", Tier.DROPPED),)
    assert make_room([parked], incoming=NEW, budgets=budgets) == ()


def test_what_parking_will_take_of_the_host_counts_before_it_is_done() -> None:
    """Ten bytes of weights would fit; their pinned copies, of which it was measured what they will be, do not."""
    budgets = Budgets(device=30, host=12)
    guessed, measured = resident("new to it"), resident("measured", copies=16)
    assert make_room([guessed], incoming=NEW, budgets=budgets) == (Move("new to it", Tier.PARKED),)
    assert make_room([measured], incoming=NEW, budgets=budgets) == (Move("measured", Tier.DROPPED),)


def test_what_can_not_be_parked_is_dropped_and_its_requests_go_back() -> None:
    stuck = resident("stuck", parks=False, unfinished=1)
    moves = make_room([stuck], incoming=NEW, budgets=Budgets(device=30))
    assert moves == (Move("stuck", Tier.DROPPED, hand_back=True),)


def test_a_parked_models_graphs_stay_on_the_device_and_go_when_nothing_else_helps() -> None:
    holdings = [Holding("parked", Tier.PARKED, 10, 10, overhead=5), resident("resident", overhead=5)]
    assert make_room(holdings, incoming=NEW, budgets=Budgets(device=50)) == ()
    assert make_room(holdings, incoming=NEW, budgets=Budgets(device=49)) == (Move("resident", Tier.PARKED),)
    moves = make_room(holdings, incoming=NEW, budgets=Budgets(device=25))
    assert {move.alias for move in moves if move.tier is Tier.DROPPED}


def test_parked_contexts_let_their_kv_caches_go_before_any_is_dropped() -> None:
    shared = Budgets(device=45, shared=True)
    holdings = [
        Holding("big", Tier.PARKED, 5, 10, 1.0, kept=12),
        Holding("small", Tier.PARKED, 5, 10, 2.0, kept=6),
    ]
    assert make_room(holdings, incoming=NEW, budgets=shared) == (Move("big", Tier.PARKED),)
    copied = [replace(each, host=each.weights + each.kept) for each in holdings]
    assert make_room(copied, incoming=NEW, budgets=Budgets(host=20)) == (Move("big", Tier.PARKED),)


@pytest.mark.parametrize(
    ("budgets", "keep"),
    [
        (Budgets(), Keep(None)),
        (Budgets(device=40), Keep(None)),
        (Budgets(device=40, host=50), Keep(22, cached=True)),  # beside its weights and another one's copies
        (Budgets(host=9), Keep(0, cached=True)),
        (Budgets(device=60, shared=True), Keep(12)),  # beside its weights, another one's, and the newcomer
        (Budgets(device=60, host=10, shared=True), Keep(2, cached=True)),
    ],
)
def test_as_much_of_a_kv_cache_is_kept_as_the_budgets_leave(budgets: Budgets, keep: Keep) -> None:
    holdings = [resident("left"), Holding("there", Tier.PARKED, 10, 10, kept=8)]
    moves = (Move("left", Tier.PARKED),)
    assert room_to_keep(holdings, "left", budgets=budgets, incoming=NEW, moves=moves) == keep


def test_who_is_to_be_dropped_once_the_newcomer_is_there_keeps_nothing() -> None:
    moves = (Move("left", Tier.DROPPED),)
    assert room_to_keep([resident("left")], "left", budgets=Budgets(), incoming=NEW, moves=moves) == Keep(0)
