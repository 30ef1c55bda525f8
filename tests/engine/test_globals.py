"""What vLLM keeps in modules of a worker process belongs to one model here: each finds its own again."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from service.engine.versions import vllm_worker

pytestmark = [pytest.mark.engine, pytest.mark.parity]


@pytest.fixture
def found() -> Iterator[Any]:
    """This process's own, put back afterwards."""
    for module, _ in vllm_worker.WORKER_GLOBALS:
        import_module(module)
    before = vllm_worker.model_globals()
    yield before
    vllm_worker.set_model_globals(before)


@pytest.mark.parametrize(("module", "name"), vllm_worker.WORKER_GLOBALS)
def test_a_new_model_finds_nothing_of_the_others_who_find_theirs_again(found: Any, module: str, name: str) -> None:
    owner = import_module(module)
    mine, its = object(), object()
    setattr(owner, name, mine)
    kept = vllm_worker.model_globals()
    vllm_worker.unset_model_globals()
    assert getattr(owner, name) is not mine
    setattr(owner, name, its)
    other = vllm_worker.model_globals()
    vllm_worker.set_model_globals(kept)
    assert getattr(owner, name) is mine
    vllm_worker.set_model_globals(other)
    assert getattr(owner, name) is its


@pytest.mark.parametrize(("module", "name"), vllm_worker.WORKER_GLOBALS)
def test_vllm_still_has_each_of_them(module: str, name: str) -> None:
    assert hasattr(import_module(module), name)


def test_each_model_has_its_own_choice_of_kernels(found: Any) -> None:
    from vllm.ir.op import IrOp

    operation = next(iter(IrOp.registry.values()))
    native = [operation.impls["native"]]
    operation._priority_impls = native
    kept = vllm_worker.model_globals()
    operation._priority_impls = []
    vllm_worker.set_model_globals(kept)
    assert operation._priority_impls is native


def test_each_model_has_its_own_layout_of_the_kv_cache(found: Any) -> None:
    utils = import_module("vllm.v1.attention.backends.utils")
    if not hasattr(utils, "set_kv_cache_layout"):
        pytest.skip("since 0.32 the layout is part of a model's own configuration")
    utils.set_kv_cache_layout("HND")
    assert utils.get_kv_cache_layout() == "HND"
    first = vllm_worker.model_globals()
    vllm_worker.unset_model_globals()
    utils.set_kv_cache_layout("NHD")
    assert utils.get_kv_cache_layout() == "NHD"
    vllm_worker.set_model_globals(first)
    assert utils.get_kv_cache_layout() == "HND"
