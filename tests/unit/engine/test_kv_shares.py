"""Who gets how much KV cache, where models.yaml says it in one way or in none."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.models.checkpoint import _remote_bytes, checkpoint_bytes, in_pieces
from service.engine.models.residency import give_kv_shares, require_utilization, said_utilization, weights_of
from service.engine.versions.vllm_kv import plan_of
from service.errors import ConfigError
from service.scheduling.memory import Budgets
from tests.support.hub import hub as at_hub

MIB = 1 << 20
BUFFERED = 3 * MIB + MIB // 16
"""What a model of 2 MiB is taken for where KV memory is lent: with its buffers."""


def config(folder: Path, *, weights: int, kv: int | None = None, workers: int = 1, ranks: int = 1) -> Any:
    """What the shares read of a VllmConfig, over a checkpoint of ``weights`` MiB."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\0" * (weights * MIB))
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), revision=None),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=kv, num_gpu_blocks_override=None),
        parallel_config=SimpleNamespace(world_size=workers, data_parallel_size=ranks),
        kv_transfer_config=None,
        speculative_config=None,
    )


def drafted(config: Any, by: Any) -> Any:
    """``config`` with a drafter, whose checkpoint is that of another one."""
    config.speculative_config = SimpleNamespace(draft_model_config=by.model_config)
    return config


def kv(config: Any) -> float:
    return config.cache_config.kv_cache_memory_bytes / MIB


def test_those_that_say_nothing_share_what_the_others_leave(tmp_path: Path) -> None:
    configs = {name: config(tmp_path / name, weights=2) for name in ("a", "b")}
    configs["c"] = config(tmp_path / "c", weights=2, kv=10 * MIB)
    assert give_kv_shares(configs, Budgets(device=100 * MIB), {}) == {}
    assert [kv(each) for each in configs.values()] == [37, 37, 10]  # a tenth of the device is for graphs


def test_an_alias_own_memory_holds_its_weights_and_its_cache(tmp_path: Path) -> None:
    configs = {name: config(tmp_path / name, weights=2) for name in ("a", "b")}
    assert give_kv_shares(configs, Budgets(device=100 * MIB), {"a": 30 * MIB}) == {}
    assert [kv(each) for each in configs.values()] == [28, 58]


def test_where_the_named_ones_take_it_all_the_silent_ones_take_turns(tmp_path: Path) -> None:
    configs = {name: config(tmp_path / name, weights=2) for name in ("a", "b")}
    give_kv_shares(configs, Budgets(device=100 * MIB), {"a": 99 * MIB})
    assert kv(configs["b"]) == 44


def test_workers_divide_a_cache_and_ranks_repeat_the_weights(tmp_path: Path) -> None:
    configs = {"a": config(tmp_path / "a", weights=2, workers=2, ranks=2)}
    give_kv_shares(configs, Budgets(device=None), {"a": 44 * MIB})
    assert kv(configs["a"]) == (44 - 2 * 2) / 4


def plans(configs: dict[str, Any]) -> dict[str, tuple[float, float] | None]:
    found = {name: plan_of(each) for name, each in configs.items()}
    return {name: each and (each.total / MIB, each.spare / MIB) for name, each in found.items()}


def test_where_all_fit_at_once_those_that_share_may_borrow_from_each_other_and_nobody_else(tmp_path: Path) -> None:
    configs = {name: config(tmp_path / name, weights=2) for name in ("a", "b", "c")}
    configs["said"] = config(tmp_path / "said", weights=2, kv=10 * MIB)
    give_kv_shares(configs, Budgets(device=100 * MIB + 4 * BUFFERED, shared=True), {}, lend=True)
    assert [kv(each) for each in configs.values()] == [30, 30, 30, 10]
    assert plans(configs) == {"a": (90, 60), "b": (90, 60), "c": (90, 60), "said": (90, 0)}


def test_where_one_is_fixed_elsewhere_nothing_is_promised_twice(tmp_path: Path) -> None:
    configs = {name: config(tmp_path / name, weights=2) for name in ("a", "b", "c")}
    configs["c"].cache_config.num_gpu_blocks_override = 10
    give_kv_shares(configs, Budgets(device=100 * MIB + 4 * BUFFERED, shared=True), {}, lend=True)
    assert plans(configs) == {"a": None, "b": None, "c": None}


def test_several_workers_lend_each_their_part(tmp_path: Path) -> None:
    configs = {name: config(tmp_path / name, weights=2, workers=2) for name in ("a", "b")}
    give_kv_shares(configs, Budgets(device=40 * MIB + 2 * (BUFFERED + MIB), shared=True), {}, lend=True)
    assert plans(configs) == {"a": (20, 10), "b": (20, 10)}


def test_models_that_take_turns_or_come_later_or_may_not_lend_nothing(tmp_path: Path) -> None:
    configs = {name: config(tmp_path / name, weights=2) for name in ("a", "b")}
    give_kv_shares(configs, Budgets(device=100 * MIB, shared=True), {"a": 99 * MIB}, lend=True)
    assert plans(configs) == {"a": None, "b": None}
    configs = {name: config(tmp_path / f"{name}2", weights=2) for name in ("a", "b")}
    give_kv_shares(configs, Budgets(device=100 * MIB, shared=True), {})
    assert plans(configs) == {"a": None, "b": None}


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
    assert [kv(each) for each in configs.values()] == [43, 43]


def test_a_drafters_checkpoint_counts_beside_its_models_and_not_twice_where_both_are_one(tmp_path: Path) -> None:
    small = config(tmp_path / "small", weights=3)
    configs = {"a": drafted(config(tmp_path / "a", weights=10, ranks=2), by=small)}
    configs["mtp"] = drafted(config(tmp_path / "mtp", weights=10), by=SimpleNamespace(model_config=None))
    configs["mtp"].speculative_config.draft_model_config = SimpleNamespace(**vars(configs["mtp"].model_config))
    configs["medusa"] = drafted(config(tmp_path / "medusa", weights=10), by=SimpleNamespace(model_config=None))
    assert [weights_of(each) // MIB for each in configs.values()] == [26, 10, 10]
    give_kv_shares(configs, Budgets(device=None), {"a": 50 * MIB})
    assert kv(configs["a"]) == (50 - 26) / 2


def test_memory_of_a_model_whose_drafters_size_nothing_tells_is_refused(tmp_path: Path) -> None:
    unknown = config(tmp_path / "unknown", weights=0)
    (tmp_path / "unknown" / "model.safetensors").unlink()
    configs = {"a": drafted(config(tmp_path / "a", weights=2), by=unknown)}
    refused = give_kv_shares(configs, Budgets(device=100 * MIB), {"a": 50 * MIB})
    assert "kv_cache_memory_bytes" in str(refused["a"])


def test_memory_of_a_model_whose_size_nothing_tells_is_refused(tmp_path: Path) -> None:
    configs = {"a": config(tmp_path / "a", weights=0)}
    (tmp_path / "a" / "model.safetensors").unlink()
    refused = give_kv_shares(configs, Budgets(device=100 * MIB), {"a": 50 * MIB})
    assert "kv_cache_memory_bytes" in str(refused["a"])


# --- what the weights of a checkpoint are ----------------------------------------------------------------------------


def index(folder: Path, *files: str, size: int) -> None:
    content = {"metadata": {"total_size": size}, "weight_map": {f"w{n}": name for n, name in enumerate(files)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_a_consolidated_copy_is_not_counted_beside_the_shards(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(bytes(100))
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(200))
    assert checkpoint_bytes(str(tmp_path)) == 200
    index(tmp_path, "model-1.safetensors", "model-2.safetensors", size=190)
    assert checkpoint_bytes(str(tmp_path)) == 200
    for name in ("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).unlink()
    assert checkpoint_bytes(str(tmp_path)) == 200


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache with one model, of which nothing but its configuration was downloaded."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--some--model"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_hubs_model_is_sized_from_its_index_before_its_weights_are_here(hub: Path) -> None:
    assert checkpoint_bytes("some/model") == 0
    index(hub, "a.safetensors", "b.safetensors", size=300)
    assert checkpoint_bytes("some/model") == 300
    (hub / "a.safetensors").write_bytes(bytes(100))
    assert checkpoint_bytes("some/model") == 300  # half of it is here
    (hub / "b.safetensors").write_bytes(bytes(150))
    assert checkpoint_bytes("some/model") == 250
    assert checkpoint_bytes("some/other") == 0


_INDEX = json.dumps({"metadata": {"total_size": 140}, "weight_map": {"a": "a-1.safetensors"}}).encode()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"model.safetensors": 300, "pytorch_model.bin": 310}, 300),
        ({"a-1.safetensors": 100, "a-2.safetensors": 50, "consolidated.safetensors": 150}, 150),
        ({"consolidated.safetensors": 150}, 150),
        ({"pytorch_model.bin": 310, "onnx/model.safetensors": 40}, 310),
        ({"config.json": 20}, 0),
        ({"a-1.safetensors": 100, "a-2.safetensors": 50, "model.safetensors.index.json": _INDEX}, 140),
        ({"pytorch_model.bin": 310, "pytorch_model.bin.index.json": _INDEX}, 140),
        ({"model.safetensors": 300, "model.safetensors.index.json": b"{}"}, 0),
    ],
)
def test_one_of_which_nothing_is_here_is_sized_by_the_hubs_list_of_its_files(
    hub: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, sizes: Any, expected: int
) -> None:
    from huggingface_hub import constants

    _remote_bytes.cache_clear()
    made = tmp_path_factory.mktemp("there")
    for name, size in sizes.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(bytes(size) if isinstance(size, int) else size)
    with at_hub({"some/model": made}) as endpoint:
        files = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert checkpoint_bytes("some/model") == expected
        assert checkpoint_bytes("some/stranger") == 0


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"metadata": {"total_size": "x"}, "weight_map": {}}', "null"])
def test_an_index_that_is_none_says_nothing(hub: Path, content: str) -> None:
    (hub / "model.safetensors.index.json").write_text(content)
    assert checkpoint_bytes("some/model") == 0


# --- gpu_memory_utilization ------------------------------------------------------------------------------------------


def utilizing(share: float) -> Any:
    return SimpleNamespace(cache_config=SimpleNamespace(gpu_memory_utilization=share))


def test_gpu_memory_utilization_is_the_whole_engines_or_refused_with_the_key_to_use() -> None:
    from vllm.config import CacheConfig

    default = utilizing(CacheConfig.gpu_memory_utilization)
    assert said_utilization(default) is None
    assert said_utilization(utilizing(0.5)) == 0.5
    for budgets in (Budgets(), Budgets(device=5), Budgets(device=5, utilization=0.5)):
        require_utilization("a", default, budgets)
    require_utilization("a", utilizing(0.5), Budgets(device=5, utilization=0.5))
    with pytest.raises(ConfigError, match=r"a: gpu_memory_utilization is 0.4, but .* said as 0.5; .* memory"):
        require_utilization("a", utilizing(0.4), Budgets(device=5, utilization=0.5))
    with pytest.raises(ConfigError, match="device_memory_bytes"):
        require_utilization("a", utilizing(0.4), Budgets(device=5))


@pytest.mark.parametrize(
    ("files", "load_format", "expected"),
    [
        (["model.safetensors"], "auto", True),
        (["model.safetensors", "pytorch_model.bin"], "auto", True),
        (["pytorch_model.bin"], "auto", False),
        (["pytorch_model.bin"], "dummy", True),
        ([], "auto", False),
    ],
)
def test_weights_come_in_pieces_where_they_are_mapped_or_made_up(
    tmp_path: Path, files: list[str], load_format: str, expected: bool
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"weights")
    model = SimpleNamespace(model=str(tmp_path), revision=None)
    config = SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format=load_format))
    assert in_pieces(config) is expected
