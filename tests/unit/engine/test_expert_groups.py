"""The groups that a mixture of experts finds beside a dense first model are those that vLLM would have made for it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.config
from vllm.distributed import parallel_state

from service.engine.versions.vllm_worker import make_expert_groups

GROUPS = ("_TP", "_ETP", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB")
Made = dict[str, tuple[list[list[int]], int, str, bool | None]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """By name, the groups that are made, with their ranks, the process's place, the backend, and the exchange."""
    found: Made = {}

    def make(ranks: list[list[int]], local_rank: int, backend: str, **how: Any) -> Any:
        found[how["group_name"]] = ranks, local_rank, backend, how.get("use_all2all")
        return SimpleNamespace(rank_in_group=0)

    for name in GROUPS:
        monkeypatch.setattr(parallel_state, name, None, raising=False)
    monkeypatch.setattr(parallel_state, "init_model_parallel_group", make)
    world = SimpleNamespace(local_rank=3, device_group="the world")
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: world)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: f"backend of {group}")
    return found


def config(data: int = 1, pipeline: int = 1, context: int = 1, tensor: int = 1, **more: Any) -> Any:
    sizes = {
        "data_parallel_size": data,
        "pipeline_parallel_size": pipeline,
        "prefill_context_parallel_size": context,
        "tensor_parallel_size": tensor,
    }
    if hasattr(vllm.config.ParallelConfig, "use_all2all"):
        sizes["use_all2all"] = True
    chosen = {"enable_elastic_ep": False, "enable_eplb": False, "is_moe": True, **more}
    model = SimpleNamespace(is_moe=chosen.pop("is_moe"), architecture="Qwen3MoeForCausalLM")
    return SimpleNamespace(parallel_config=SimpleNamespace(**sizes, **chosen), model_config=model, engram_config=None)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 2), (2, 2, 1, 2), (2, 3, 2, 2)])
@pytest.mark.parametrize("outside", [1, 2])
def test_the_groups_are_those_that_vllm_makes_where_the_first_model_is_one(
    made: Made, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int, int], outside: int, balanced: bool
) -> None:
    """``outside``: so many engines whose ranks are in one world, as external data parallelism has them."""
    data, pipeline, context, tensor = sizes
    wanted = config(*sizes, enable_eplb=balanced)
    world = outside * data * pipeline * context * tensor
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world)
    monkeypatch.setattr(vllm.config, "get_current_vllm_config", lambda: wanted)
    parallel_state.initialize_model_parallel(tensor, pipeline, context)
    theirs = {name: group for name, group in made.items() if name in {"ep", "eplb"}}
    assert theirs.keys() == ({"ep", "eplb"} if balanced else {"ep"})
    made.clear()
    parallel_state._EP = parallel_state._EPLB = None
    make_expert_groups(wanted)
    assert made == theirs
    assert parallel_state._EP is not None
    assert (parallel_state._EPLB is not None) is balanced


def test_what_is_there_already_is_not_made_again(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    order = []
    for balanced in (False, False, True, True):
        make_expert_groups(config(tensor=2, enable_eplb=balanced))
        order.append(sorted(made))
        made.clear()
    assert order == [["ep"], [], ["eplb"], []]


def test_a_dense_model_makes_none(made: Made) -> None:
    make_expert_groups(config(tensor=2, enable_eplb=True, is_moe=False))
    assert made == {}


def test_elastic_experts_are_refused_beside_another_first_model(made: Made) -> None:
    with pytest.raises(ValueError, match="must be the first one of its engine"):
        make_expert_groups(config(tensor=2, enable_elastic_ep=True))
    assert made == {}
