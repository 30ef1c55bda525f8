"""Who gets how much KV cache, where models.yaml says it in one way or in none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.models.residency import give_kv_shares
from service.scheduling.memory import Budgets

MIB = 1 << 20


def config(folder: Path, *, weights: int, kv: int | None = None, workers: int = 1, ranks: int = 1) -> Any:
    """What the shares read of a VllmConfig, over a checkpoint of ``weights`` MiB."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\0" * (weights * MIB))
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder)),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=kv, num_gpu_blocks_override=None),
        parallel_config=SimpleNamespace(world_size=workers, data_parallel_size=ranks),
    )


def kv(config: Any) -> float:
    return config.cache_config.kv_cache_memory_bytes / MIB


def test_those_that_say_nothing_share_what_the_others_leave(tmp_path: Path) -> None:
    configs = {name: config(tmp_path / name, weights=2) for name in ("a", "b")}
    configs["c"] = config(tmp_path / "c", weights=2, kv=10 * MIB)
    assert give_kv_shares(configs, Budgets(device=100 * MIB), {}) == {}
    assert [kv(each) for each in configs.values()] == [42, 42, 10]


def test_an_alias_own_memory_holds_its_weights_and_its_cache(tmp_path: Path) -> None:
    configs = {name: config(tmp_path / name, weights=2) for name in ("a", "b")}
    assert give_kv_shares(configs, Budgets(device=100 * MIB), {"a": 30 * MIB}) == {}
    assert [kv(each) for each in configs.values()] == [28, 68]


def test_where_the_named_ones_take_it_all_the_silent_ones_take_turns(tmp_path: Path) -> None:
    configs = {name: config(tmp_path / name, weights=2) for name in ("a", "b")}
    give_kv_shares(configs, Budgets(device=100 * MIB), {"a": 99 * MIB})
    assert kv(configs["b"]) == 49


def test_workers_divide_a_cache_and_ranks_repeat_the_weights(tmp_path: Path) -> None:
    configs = {"a": config(tmp_path / "a", weights=2, workers=2, ranks=2)}
    give_kv_shares(configs, Budgets(device=None), {"a": 44 * MIB})
    assert kv(configs["a"]) == (44 - 2 * 2) / 4


def test_no_device_is_no_share(tmp_path: Path) -> None:
    configs = {"a": config(tmp_path / "a", weights=1)}
    give_kv_shares(configs, Budgets(), {})
    assert configs["a"].cache_config.kv_cache_memory_bytes is None


@pytest.mark.parametrize(
    ("said", "memory", "complaint"),
    [(None, 2 * MIB, "memory is 2.0 MiB, of which its weights take 2.0 MiB"), (5 * MIB, 9 * MIB, "remove what else")],
)
def test_memory_that_can_not_be_is_refused_by_its_alias(
    tmp_path: Path, said: int | None, memory: int, complaint: str
) -> None:
    configs = {"a": config(tmp_path / "a", weights=2, kv=said)}
    refused = give_kv_shares(configs, Budgets(device=100 * MIB), {"a": memory})
    assert str(refused["a"]).startswith("a: ")
    assert complaint in str(refused["a"])


def test_one_that_says_blocks_is_given_bytes_too_so_that_vllm_does_not_measure(tmp_path: Path) -> None:
    """Measuring, vLLM 0.32 drops the graphs of every model in the process."""
    configs = {name: config(tmp_path / name, weights=2) for name in ("a", "b")}
    configs["a"].cache_config.num_gpu_blocks_override = 64
    assert give_kv_shares(configs, Budgets(device=100 * MIB), {}) == {}
    assert [kv(each) for each in configs.values()] == [48, 48]
