"""A pool's own traffic on one, two and more devices."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.objectives import Objective
from service.platforms.base import Platform
from service.platforms.cpu import CpuPlatform
from service.platforms.cuda import CudaPlatform
from service.platforms.hpu import HpuPlatform
from service.platforms.kv_blocks import Region
from service.scheduling.coarse import Replay, _Model
from service.scheduling.goodput import EARLY
from service.scheduling.machines import CARDS, GAUDI3, ModelCosts, dense_model, gaudi_model
from service.scheduling.plan import Pool, place, plan, resident
from service.scheduling.replay import Part, replay
from service.scheduling.traffic import Traffic

GOAL = Objective(ttft_s=5.0, tpot_s=0.05)
SIZES = (8, 14, 32, 8, 3)


def costs(count: int) -> tuple[ModelCosts, ...]:
    return tuple(
        gaudi_model(f"m{of}", billions=SIZES[of % len(SIZES)], byte_per_weight=2, kv_bytes_per_token=131e3)
        for of in range(count)
    )


def pool_of(rows: Sequence[tuple[float, int, int, int]], models: int, goal: Objective = GOAL) -> Pool:
    traffic = Traffic(tuple(f"m{of}" for of in range(models)))
    for row in rows:
        traffic.add(*row)
    return Pool(traffic, costs(models), (goal,) * models, GAUDI3.device_bytes)


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    models, now, rows = draw(st.integers(1, 6)), 0.0, []
    gap = draw(st.sampled_from((0.01, 0.3, 5.0)))
    for _ in range(draw(st.integers(1, 80))):
        now += draw(st.floats(0, gap))
        of = draw(st.integers(0, models - 1))
        rows.append((now, of, draw(st.integers(1, 3000)), draw(st.integers(1, 600))))
    return pool_of(rows, models)


@pytest.mark.parametrize("exact", [True, False])
@given(pool=pools(), most=st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_more_devices_are_never_worse_and_every_request_is_counted_once(exact: bool, pool: Pool, most: int):
    levels = plan(pool, range(1, most + 1), exact=exact)
    assert [level.devices for level in levels] == list(range(1, most + 2))
    assert all(level.counted == len(pool.traffic) for level in levels)
    assert all(sum(level.met_of.values()) == level.met for level in levels)
    assert all(more.met >= 0.99 * level.met for level, more in pairwise(levels))


@given(pool=pools(), most=st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_no_model_is_without_a_place_and_none_is_twice_on_one_device(pool: Pool, most: int):
    for level in plan(pool, range(1, most + 1), exact=False):
        assert {of for models in level.placement for of in models} == set(range(len(pool.costs)))
        assert all(len(set(models)) == len(models) for models in level.placement)


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=40), st.integers(1, 12), st.randoms())
def test_any_loads_are_placed_and_spread(loads: list[float], devices: int, chance: Random):
    sizes = [chance.uniform(1, 50) for _ in loads]
    placed = place(loads, sizes, room=100.0, devices=devices)
    assert len(placed) == devices
    assert {of for models in placed for of in models} == set(range(len(loads)))
    copies = [sum(of in models for models in placed) for of in range(len(loads))]
    shares = [sum(loads[of] / copies[of] for of in models) for models in placed]
    fair = sum(loads) / devices
    assert max(shares) <= 2 * fair + max(load / many for load, many in zip(loads, copies, strict=True)) + 1e-6


def test_a_model_that_costs_more_than_a_device_has_is_on_several():
    assert [of in models for of in (0, 1) for models in place([9.0, 1.0], [1, 1], room=9, devices=3)].count(True) >= 4
    pool = pool_of([(n / 100, 0, 100, 200) for n in range(1500)], 1, Objective(ttft_s=0.4, tpot_s=0.03))
    one, two, *_ = plan(pool, [1, 2], exact=True)
    assert two.placement == ((0,), (0,))
    assert two.met > 1.2 * one.met


@pytest.mark.timeout(60)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("days", [0.1, 1, 30, 20_000])
def test_sparse_traffic_comes_to_its_end_however_late_it_is(days: float, exact: bool):
    """On a clock of many seconds the end of a step can't be told to the last bit."""
    chance = Random(1)
    moments = sorted(chance.random() * days * 86400 for _ in range(200))
    rows = [(at, chance.randrange(2), chance.randint(1, 3000), chance.randint(1, 600)) for at in moments]
    pool = pool_of([(0.0, 0, 5, 5), *rows], 2)
    part = Part(pool.traffic, ((0, pool.costs[0], GOAL), (1, pool.costs[1], GOAL)), pool.device_bytes, 60.0, exact)
    tally = replay(part)
    assert (tally.met, tally.missed) == (201, 0)


@pytest.mark.timeout(60)
def test_a_model_whose_only_request_can_not_be_in_time_gives_its_turn_back_to_who_was_frozen_for_it():
    rows = [
        *((10.6, 0, 100_000, 1), (17.8, 1, 1000, 300), (23.0, 1, 300, 100)),
        *((32.7, 0, 1000, 10), (33.2, 1, 1000, 300), (40.2, 0, 100_000, 10)),
    ]
    goal = Objective(ttft_s=2, tpot_s=0.02)
    pool = pool_of(rows, 2, goal)
    both = tuple(
        dense_model(GAUDI3, f"m{of}", billions=billions, byte_per_weight=2, kv_bytes_per_token=131e3)
        for of, billions in enumerate((8, 32))
    )
    pool = replace(pool, costs=both)
    (level, _) = plan(pool, [1], exact=False)
    assert (level.counted, level.tallies[0].end < 1000) == (6, True)


def test_to_the_coarse_replay_too_a_turn_is_worth_less_where_what_is_left_for_it_is_prefilled_again():
    pool = pool_of([(0.0, 0, 300, 20), (0.0, 1, 300, 20)], 2)
    seconds = []
    for again_s in (0.0, 2.0):
        models = tuple((of, costs, GOAL) for of, costs in enumerate(pool.costs))
        of = Replay(pool.traffic, models, device_bytes=pool.device_bytes, max_wait_s=60.0)
        first, second = of._models.values()
        for model in (first, second):
            model.wait.append((1.0, 300, 20))
        second.debt = again_s
        of._switch(second)
        seconds.append(1 / of._worth(first))
    assert seconds[1] == pytest.approx(seconds[0] + 2.0), "for one request that is due"


def of_one() -> tuple[Replay, _Model]:
    """The coarse replay of one model, of which nothing was asked yet."""
    pool = pool_of([(0.0, 0, 300, 20)], 1)
    models = ((0, pool.costs[0], GOAL),)
    of = Replay(pool.traffic, models, device_bytes=pool.device_bytes, max_wait_s=60.0)
    return of, of._models[0]


@pytest.mark.parametrize(("late_s", "met"), [(-0.01, 1), (0.01, 0)])
def test_to_the_coarse_replay_too_a_first_token_that_is_early_leaves_time_for_the_others(late_s: float, met: int):
    of, model = of_one()
    of._start(model, first_by=5.0, prompt=300, output=20)
    of._now, model.step = 5.0 + 19 * GOAL.tpot_s + late_s, 20.0
    of._finish(model)
    assert (of.tally.met, of.tally.missed) == (met, 1 - met)


def test_to_the_coarse_replay_too_the_next_token_is_due_by_when_the_first_one_was():
    worth = []
    for first_by in (GOAL.ttft_s, 0.1 * GOAL.ttft_s):
        of, model = of_one()
        of._start(model, first_by=first_by, prompt=300, output=20)
        worth.append(of._worth(model))
    assert worth[0] == pytest.approx(EARLY * worth[1])


def test_to_the_coarse_replay_too_one_is_lost_by_its_first_token_or_once_its_next_one_is():
    of, model = of_one()
    of._start(model, first_by=0.001, prompt=300, output=60)
    late = of._worth(model)
    of, model = of_one()
    of._start(model, first_by=1.0, prompt=300, output=60)
    of._now, model.debt, model.step = 2.1, 0.0, 30.0
    assert of._worth(model) / late > 100, "thirty of twenty tokens are there, and the next one is due at 2.5"
    of._now = 2.6
    assert of._worth(model) == pytest.approx(late, rel=0.1)


@pytest.mark.parametrize("exact", [True, False])
def test_short_answers_beside_long_ones_are_not_left_in_their_middle(exact: bool):
    """Of twelve tokens, which may take 0.6 s; without the closing of turns 17 of the 900 miss theirs."""
    chance = Random(1)
    lengths = (12, 12, 12, 12, 12, 12, 12, 400, 400, 400)
    rows = sorted((chance.random() * 60, chance.randrange(2), 300, chance.choice(lengths)) for _ in range(900))
    pool = pool_of(rows, 2)
    part = Part(pool.traffic, ((0, pool.costs[0], GOAL), (1, pool.costs[1], GOAL)), pool.device_bytes, 60.0, exact)
    assert replay(part).missed == 0


def test_a_number_of_devices_gives_the_same_alone_as_in_a_row_of_them():
    chance = Random(3)
    rows = sorted((chance.random() * 60, chance.randrange(5), 500, chance.randint(50, 400)) for _ in range(300))
    pool = pool_of(rows, 5, Objective(ttft_s=1.0, tpot_s=0.05))
    several = plan(pool, range(1, 5), exact=False)
    for level in several[1:-1]:
        assert plan(pool, [level.devices], exact=False)[0] == level


def test_models_without_requests_have_a_place_and_what_is_dear_to_bring_back_is_resident():
    pool = pool_of([(0.0, 0, 10, 10), (1.0, 1, 10, 10)], 9)
    (only, _) = plan(pool, [1], exact=False)
    kept = resident(pool, only.placement[0], pool.loads())
    assert kept[:2] == [1, 0]
    assert sum(pool.costs[of].device_bytes for of in kept) <= pool.device_bytes
    assert len(kept) < 9


@pytest.mark.parametrize("exact", [True, False])
def test_one_request_alone_takes_its_prefill_and_its_steps(exact: bool):
    pool = pool_of([(5.0, 0, 1000, 200)], 1)
    tally = replay(Part(pool.traffic, ((0, pool.costs[0], GOAL),), pool.device_bytes, 60.0, exact))
    assert (tally.met, tally.missed, tally.switches, tally.met_tokens) == (1, 0, 0, 200)
    assert tally.serving_s == pytest.approx(pool.costs[0].alone_s(1000, 200))
    assert tally.end == pytest.approx(5.0 + pool.costs[0].alone_s(1000, 200))


@pytest.mark.parametrize("exact", [True, False])
def test_a_device_without_requests_does_nothing(exact: bool):
    tally = replay(Part(Traffic(()), (), GAUDI3.device_bytes, 60.0, exact))
    assert (tally.met, tally.missed, tally.switches) == (0, 0, 0)


@pytest.mark.parametrize(
    ("models", "rate"),
    [(4, 1.0), pytest.param(4, 4.0, marks=pytest.mark.long), pytest.param(12, 1.0, marks=pytest.mark.long), (12, 3.0)],
)
def test_the_coarse_replay_comes_close_to_the_policy(models: int, rate: float):
    """As close as deploy/PLANNING.md says."""
    dice, now, rows = Random(models), 0.0, []
    for _ in range(1200):
        now += dice.expovariate(rate)
        of = dice.choices(range(models), [1 / (1 + of) for of in range(models)])[0]
        rows.append((now, of, int(dice.lognormvariate(6, 0.8)) + 1, int(dice.lognormvariate(5, 0.7)) + 1))
    pool = pool_of(rows, models, Objective(ttft_s=10.0, tpot_s=0.1))
    part = Part(pool.traffic, tuple(enumerate_of(pool)), pool.device_bytes, 60.0, exact=True)
    policy, coarse = replay(part), replay(replace(part, exact=False))
    assert abs(policy.met - coarse.met) <= 0.1 * len(rows)


@pytest.mark.parametrize(("card", "platform"), [("gaudi3", HpuPlatform), ("h100", CudaPlatform), ("cpu", CpuPlatform)])
def test_a_plan_takes_a_devices_engine_for_what_it_is(card: str, platform: type[Platform]):
    kept = platform().block_bytes([Region(0, 8, 2, 64, 512, 64)])
    costs = dense_model(CARDS[card], "m", billions=8, byte_per_weight=2, kv_bytes_per_token=131e3)
    assert (costs.row_back_s is not None) == (kept > 0)


def enumerate_of(pool: Pool) -> list[tuple[int, ModelCosts, Objective]]:
    return [(of, each, goal) for of, (each, goal) in enumerate(zip(pool.costs, pool.objectives, strict=True))]


@given(pools())
@settings(deadline=None, max_examples=15)
def test_the_same_traffic_gives_the_same_plan(pool: Pool):
    assert plan(pool, [1, 2], exact=False) == plan(pool, [1, 2], exact=False)


def test_dense_models_cost_by_the_device_s_figures():
    slow = replace(GAUDI3, read_s=GAUDI3.read_s / 2, operations_s=GAUDI3.operations_s / 4)
    fast, other = (
        dense_model(card, "m", billions=8, byte_per_weight=2, kv_bytes_per_token=131e3) for card in (GAUDI3, slow)
    )
    assert other.step_s == pytest.approx(2 * fast.step_s)
    assert other.prefill_tokens_s == pytest.approx(fast.prefill_tokens_s / 4)
    assert other.parked_s == fast.parked_s
