"""A walk over vLLM's signatures: no public name, property or parameter of its engine classes is missing here.

It looks at the vLLM that is installed, so it holds for every version that the tests run on; and at what was recorded
of it, of those before it and of vllm-gaudi, so that what they drop does not go from here unnoticed.
"""

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded import Surface, record, surfaces

pytestmark = [pytest.mark.engine, pytest.mark.parity]
OF_ALL = {"check_health", "do_log_stats", "do_log_stats_with_interval", "shutdown", "step"}
"""Operations on the engine as a whole, which take no model."""
CONSTRUCTORS = {"from_engine_args", "from_vllm_config"}
"""They take models by alias."""


def pairs() -> list[tuple[type, type]]:
    from vllm.engine.protocol import EngineClient
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    from service.engine import MultiModelEngine, MultiModelLLM

    return [(AsyncLLM, MultiModelEngine), (LLMEngine, MultiModelLLM), (EngineClient, MultiModelEngine)]


def public(owner: type) -> dict[str, Any]:
    declared = {name for each in owner.__mro__ for name in vars(each).get("__annotations__", {})}
    members = {name: value for name, value in inspect.getmembers(owner) if not name.startswith("_")}
    return {**dict.fromkeys(name for name in declared if not name.startswith("_")), **members}


def lacking(name: str, theirs: Any, ours: Any) -> list[str]:
    """What ``ours`` lacks of an operation: parameters by name, the positional ones in their order, and a model."""
    wanted = [each for each in inspect.signature(theirs).parameters.values() if each.name != "self"]
    taken = {each.name: each for each in inspect.signature(ours).parameters.values() if each.name != "self"}
    found = [f"{name}({each.name})" for each in wanted if each.name not in taken]
    common = [(each, taken[each.name]) for each in wanted if each.name in taken]
    found += [f"{name}({each.name}) is {own.kind.description}" for each, own in common if each.kind is not own.kind]
    positional = [each.name for each in wanted if each.kind is not each.KEYWORD_ONLY]
    if not found and list(taken)[: len(positional)] != positional:
        found.append(f"{name}: another order")
    if "model" not in taken and name not in OF_ALL | CONSTRUCTORS:
        found.append(f"{name}(model)")
    return found


def missing(theirs: type, ours: type) -> list[str]:
    found = []
    for name, value in public(theirs).items():
        if not hasattr(ours, name):
            found.append(name)
        elif callable(value) and not isinstance(value, property):
            found += lacking(name, value, getattr(ours, name))
    return found


@pytest.mark.parametrize("number", [0, 1], ids=["AsyncLLM", "LLMEngine"])
def test_no_public_name_property_or_parameter_is_missing(number: int) -> None:
    assert missing(*pairs()[number]) == []


def test_vllms_engine_client_is_satisfied_as_far_as_async_llm_satisfies_it() -> None:
    from service.engine import MultiModelEngine

    (async_llm, _), _, (client, ours) = pairs()
    assert set(missing(client, ours)) <= set(missing_of_models(client, async_llm))
    engine = MultiModelEngine({"some": None})
    assert isinstance(engine, client)


def missing_of_models(theirs: type, ours: type) -> list[str]:
    return [each for each in missing(theirs, ours) if not each.endswith("(model)")]


def test_what_is_hidden_behind_keywords_counts_as_missing() -> None:
    class Theirs:
        def add(self, first: int, *, second: int = 0) -> None: ...

        @property
        def state(self) -> int: ...

    class Hiding:
        def add(self, *args: Any, model: str | None = None, **kwargs: Any) -> None: ...

    class Turned:
        state = 0

        def add(self, second: int = 0, first: int = 0, *, model: str | None = None) -> None: ...

    assert missing(Theirs, Hiding) == ["add(first)", "add(second)", "state"]
    assert missing(Theirs, Turned) == ["add(second) is positional or keyword"]
    assert missing(Theirs, Theirs) == ["add(model)"]


def installed() -> str:
    import vllm

    return str(vllm.__version__.partition("+")[0])


def forgotten(theirs: Surface, ours: Any) -> set[str]:
    """What of a recorded surface ``ours``, an instance or a class, does not have."""
    found = {name for name in theirs if name not in dir(ours)}
    for name in theirs.keys() - found:
        if (wanted := theirs[name]) is not None:
            taken = inspect.signature(getattr(ours, name)).parameters
            first = wanted[: wanted.index("*")] if "*" in wanted else wanted
            found |= {f"{name}({each})" for each in wanted if each not in taken and each != "*"}
            if (kept := [each for each in taken if each in first]) != [each for each in first if each in kept]:
                found.add(f"{name}: another order")
    return found


@pytest.mark.parametrize("source", ["AsyncLLM", "LLMEngine", "MultiModelAsyncLLM"])
def test_what_any_version_up_to_this_one_had_is_here(source: str) -> None:
    from packaging.version import Version

    from service.engine import MultiModelEngine, MultiModelLLM

    ours = MultiModelLLM if source == "LLMEngine" else MultiModelEngine({"some": None})
    versions = [version for version in record()[source] if Version(version) <= Version(installed())]
    assert "0.26.0" in versions
    for version in versions:
        surface = record()[source][version]
        if source != "MultiModelAsyncLLM":
            del surface["__init__"]  # models come by alias
        assert forgotten(surface, ours) == set(), version


def test_the_record_has_the_version_that_is_installed() -> None:
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    there = dict(surfaces(Path(found.origin).parent))
    assert there == {source: record()[source].get(installed()) for source in ("AsyncLLM", "LLMEngine")}


def test_what_a_record_has_and_we_have_not_is_named() -> None:
    class Ours:
        def add(self, *, first: int, second: int) -> None: ...

    recorded: Surface = {"add": ["first", "*", "second", "third"], "state": None}
    assert forgotten(recorded, Ours()) == {"add(third)", "state"}
    assert forgotten({"add": ["second", "first"]}, Ours()) == {"add: another order"}


def test_what_users_of_the_gaudi_engine_know_is_called_the_same() -> None:
    from service.engine import MultiModelEngine

    parameters = {
        "__init__": (
            "model_configs",
            "usage_context",
            "disable_log_stats",
            "enable_log_requests",
            "model_quant_configs",
        ),
        "initialize": ("model_name",),
        "switch_model": ("model_name", "drain_timeout"),
        "generate": ("prompt", "sampling_params", "request_id"),
        "encode": ("prompt", "pooling_params", "request_id"),
        "abort": ("request_id",),
        "get_vllm_config": ("model_name",),
        "get_all_vllm_configs": (),
        "shutdown": (),
    }
    for name, wanted in parameters.items():
        signature = inspect.signature(getattr(MultiModelEngine, name))
        assert tuple(signature.parameters)[1 : len(wanted) + 1] == wanted, name
        signature.bind(object(), *wanted)
    for name in ("current_model", "available_models", "engine"):
        assert isinstance(getattr(MultiModelEngine, name), property)
    configs: dict[str, Any] = {"some": None}
    engine = MultiModelEngine(configs, disable_log_stats=True, model_quant_configs={"some": None})
    assert (engine.model_configs, engine.model_quant_configs) == (configs, {"some": None})
    assert (engine.available_models, engine.current_model) == (["some"], None)
    assert (engine.disable_log_stats, engine.enable_log_requests) == (True, False)
    assert engine.usage_context is not None
