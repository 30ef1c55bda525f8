"""What the pairs that vllm-gaudi's authors measure come to on its cards: who stays, and with how much cache."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.contexts import Tier
from service.engine.models.residency import give_kv_shares
from service.platforms.hpu import HpuPlatform
from service.scheduling.memory import Budgets, Holding, Move, make_room
from tests.support.gaudi_pairs import CARDS, GIB, GRANITE_GUARDIAN, LLAMA_GUARD, PAIRS, QWEN_INSTRUCT, Shape

STANDIN = Path(__file__).parents[2] / "support" / "habana" / "bin"


def config(folder: Path, shape: Shape) -> Any:
    """A checkpoint of which nothing but its index is here."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(shape.write(folder)), revision=None),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_size=1),
        speculative_config=None,
    )


def test_the_shapes_are_as_large_as_their_models() -> None:
    sizes = [shape.weights_bytes / 1e9 for shape in (LLAMA_GUARD, GRANITE_GUARDIAN, QWEN_INSTRUCT)]
    assert sizes == pytest.approx([24.0, 16.3, 35.5], rel=0.02)


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].name)
def test_a_pair_gets_caches_that_fit_its_card_and_stays_or_takes_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: tuple[Shape, Shape], card: str
) -> None:
    monkeypatch.setenv("PATH", f"{STANDIN}:/usr/bin:/bin")
    monkeypatch.setenv("HPU_STANDIN_BYTES", str(CARDS[card]))
    budget = HpuPlatform().device_budget(None)
    assert budget is not None
    budgets = Budgets(device=budget)
    configs = {shape.name: config(tmp_path / str(at), shape) for at, shape in enumerate(pair)}
    assert give_kv_shares(configs, budgets, {}) == {}
    kv = {name: each.cache_config.kv_cache_memory_bytes for name, each in configs.items()}
    for shape in pair:
        assert kv[shape.name] // shape.kv_bytes_per_token > 32768  # tokens
    first, second = pair
    there = Holding(first.name, Tier.RESIDENT, first.weights_bytes, kv[first.name], overhead=2 * GIB)
    coming = Holding(second.name, Tier.DROPPED, second.weights_bytes, kv[second.name], overhead=2 * GIB)
    turns = pair[0] is QWEN_INSTRUCT and card == "Gaudi 2"
    moves = make_room([there], incoming=coming, budgets=budgets)
    assert moves == ((Move(first.name, Tier.PARKED),) if turns else ())
