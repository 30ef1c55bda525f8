"""Where the blocks of a worker's KV cache lie, by what vLLM's layouts say of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from service.engine.versions.vllm_worker import kv_regions
from service.platforms.kv_blocks import Region


def worker(caches: list[Any], *layouts: dict[str, Any], blocks: int = 4) -> Any:
    tensors = [SimpleNamespace(**layout) for layout in layouts]
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_tensors=tensors, num_blocks=blocks),
        model_runner=SimpleNamespace(kv_caches=caches),
    )


def by_layer(layer: str) -> dict[str, Any]:
    """As 0.26 says it."""
    return {"size": 64, "shared_by": [layer], "offset": 0, "block_stride": 0}


def in_one(**changed: Any) -> dict[str, Any]:
    """As 0.32 says it: two layers, their pages of a block side by side."""
    told = {"size": 128, "layers": ["a", "b"], "layer_stride": 16, "block_stride": 32, "offset": 0}
    return {**told, "host_resident": False, **changed}


def test_layers_in_one_allocation_are_a_region() -> None:
    cache = torch.zeros(128, dtype=torch.int8)
    found = kv_regions(worker([cache[:64], cache[64:]], in_one()))
    assert found == (Region(offset=0, blocks=4, layers=2, block_stride=32, layer_stride=16, page=16),)


@pytest.mark.parametrize("size", [64, 0], ids=["there", "parked"])
def test_layers_that_have_a_tensor_each_are_none_also_where_all_have_been_given_back(size: int) -> None:
    """Tensors without memory are all at address 0, as one allocation would be."""
    caches = [torch.zeros(size, dtype=torch.int8) for _ in range(2)]
    assert kv_regions(worker(caches, by_layer("a"), by_layer("b"))) == ()


@pytest.mark.parametrize("layouts", [(), (in_one(host_resident=True),)], ids=["without a cache", "on the host"])
def test_what_is_not_in_one_allocation_of_the_device_is_none(layouts: tuple[dict[str, Any], ...]) -> None:
    assert kv_regions(worker([torch.zeros(128, dtype=torch.int8)], *layouts)) == ()
