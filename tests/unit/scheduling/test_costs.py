"""Costs: learnt from what is seen, carried over a restart."""

import json
import math

import pytest

from schemas.contexts import Tier
from service.scheduling.costs import PRIOR_S, Costs


def adopted(known: dict[str, object], *aliases: str) -> Costs:
    costs = Costs()
    costs.adopt(known, aliases or ("a", "b"))
    return costs


def test_before_anything_is_seen_a_switch_costs_what_its_tier_usually_does():
    assert Costs().switch("a", "b", Tier.PARKED).mean == PRIOR_S[Tier.PARKED]
    assert Costs().switch("a", "a", Tier.RESIDENT).mean == 0.0


def test_a_pair_is_learnt_for_itself_and_its_target_for_everyone():
    costs = Costs()
    for _ in range(20):
        costs.switched("a", "b", Tier.PARKED, 0.3)
    costs.switched("c", "b", Tier.PARKED, 2.0)
    assert costs.switch("a", "b", Tier.PARKED).mean == pytest.approx(0.3)
    assert costs.switch("c", "b", Tier.PARKED).mean == pytest.approx(2.0)
    assert 0.3 < costs.switch("d", "b", Tier.PARKED).mean < 2.0
    assert costs.switch("a", "b", Tier.RESIDENT).mean == PRIOR_S[Tier.RESIDENT]
    assert costs.switch("a", "new", Tier.PARKED) == costs.switch("d", "another", Tier.PARKED)
    assert 0.3 < costs.switch("a", "new", Tier.PARKED).mean < 0.9 * PRIOR_S[Tier.PARKED], (
        "of a new model, what its tier cost the others"
    )


def test_the_average_follows_a_change_and_its_spread_says_how_sure_it_is():
    costs = Costs()
    for _ in range(30):
        costs.switched("a", "b", Tier.PARKED, 0.3)
    steady = costs.switch("a", "b", Tier.PARKED)
    for seconds in (1.0, 0.2) * 15:
        costs.switched("a", "b", Tier.PARKED, seconds)
    restless = costs.switch("a", "b", Tier.PARKED)
    assert steady.cautious == pytest.approx(0.3)
    assert 0.4 < restless.mean < 0.8
    assert restless.cautious > restless.mean + 0.2


def test_what_was_learnt_survives_a_restart_as_plain_json():
    costs = Costs()
    costs.switched("a", "b", Tier.PARKED, 0.3)
    costs.finished("b", seconds=2.0, tokens=300)
    costs.worked("b", seconds=10.0, tokens=9000)
    again = adopted(json.loads(json.dumps(costs.export())))
    assert again.export() == costs.export()
    assert again.pace("b") == costs.pace("b")
    assert again.pace("b").work_s(1800) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "known",
    [
        {"models": {"a": {"pace": [[-1.0, 0.0, 1], None, [math.nan, 0.0, 1]], "parked": [math.inf, 0.0, 1]}}},
        {"models": 7, "tiers": []},
        {"models": {"a": {"attic": [1, 0, 1]}, "b": 3}, "tiers": {"attic": [1, 0, 1], "parked": "x"}},
        {"models": {"a": {"pace": [[1.0], [1.0, math.nan, 1], [1.0, -1.0, 1]]}}},
        {"models": {"a": {"pace": ["x", []]}, "b": {"pace": "y"}}},
    ],
)
def test_what_is_not_understood_is_learnt_again(known: dict[str, object]):
    assert adopted(known).export() == Costs().export()


@pytest.mark.parametrize("nth", range(2))
def test_a_number_that_is_too_large_for_a_float_is_learnt_again(nth: int):
    row: list[object] = [1, 1]
    row[nth] = 10**400
    known = {"models": {"a": {"pace": [row] * 3, **dict.fromkeys(Tier, row)}}, "tiers": dict.fromkeys(Tier, row)}
    assert adopted(json.loads(json.dumps(known))).export() == Costs().export()
    costs = adopted({"tiers": {"parked": [10**400, 1], "dropped": [2.0, 1]}})
    assert costs.switch("b", "a", Tier.PARKED).mean == PRIOR_S[Tier.PARKED]
    assert costs.switch("c", "d", Tier.DROPPED).mean == 2.0


def test_what_is_seen_here_replaces_what_another_worker_said() -> None:
    said = {"pace": [[1e9, 1e9, 9], [1e9, 1e9, 9], [1e-9, 1e9, 9]], "parked": [1e9, 1e9, 9]}
    known = {"models": {"a": said}, "tiers": {"parked": [1e9, 1e9, 9]}}
    costs, own = adopted(known), Costs()
    assert costs.pace("a").request_s == costs.switch("b", "a", Tier.PARKED).mean == 1e9
    for each in (costs, own):
        each.switched("b", "a", Tier.PARKED, 0.3)
        each.finished("a", seconds=2.0, tokens=300)
        each.worked("a", seconds=1.0, tokens=100)
    assert costs.export() == own.export()
    assert costs.pace("a") == own.pace("a")


def test_of_models_that_are_not_here_nothing_is_adopted_nor_said_again() -> None:
    costs = adopted({"models": {f"m{n}": {"parked": [1.0, 0.0]} for n in range(1000)}}, "m7")
    assert costs.export()["models"].keys() == {"m7"}


def test_a_thin_batch_does_not_make_a_model_look_slow():
    costs = Costs()
    for _ in range(10):
        costs.worked("a", seconds=1.0, tokens=5000)
        costs.worked("a", seconds=1.0, tokens=50)
    assert costs.pace("a").tokens_s > 4000


def test_what_thin_batches_said_is_forgotten_with_the_first_full_one() -> None:
    costs = Costs()
    costs.finished("a", seconds=1.0, tokens=100)
    for _ in range(20):
        costs.worked("a", seconds=1.0, tokens=100)
    assert (costs.pace("a").tokens_s, costs.pace("a").most_tokens_s) == (100.0, math.inf)
    costs.worked("a", seconds=1.0, tokens=5000, full=True)
    assert costs.pace("a").tokens_s == 5000.0
    costs.worked("a", seconds=1.0, tokens=100)
    assert costs.pace("a").tokens_s > 2500


def test_how_fast_a_model_may_be_is_said_by_several_full_batches_and_by_the_last_ones() -> None:
    costs = Costs()

    def most() -> tuple[float, float]:
        pace = costs.pace("a")
        return pace.most_requests_s, pace.most_tokens_s

    for n in range(2):
        costs.worked("a", seconds=1.0, tokens=100 * (n + 1), requests=8 - n, full=True)
        costs.worked("a", seconds=1.0, tokens=9000, requests=90)
    assert most() == (math.inf, math.inf)
    costs.worked("a", seconds=2.0, tokens=100, requests=2, full=True)
    assert most() == (8.0, 200.0)
    for _ in range(7):
        costs.worked("a", seconds=1.0, tokens=50, requests=3, full=True)
    assert most() == (3.0, 50.0)
