"""A walk over vLLM's signatures: no public name, property or parameter of its engine classes is missing here.

It looks at the vLLM that is installed, so it holds for every version that the tests run on.
"""

import inspect
from typing import Any

import pytest

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
