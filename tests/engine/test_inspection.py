"""What vLLM asks of a model's class is asked in a fork of the process that has vLLM imported, and says the same."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm import AsyncEngineArgs
from vllm.model_executor.models import registry

from service.engine import MultiModelEngine
from service.engine.processes import inspection, launch
from service.engine.processes.fork_server import ForkServer
from service.engine.processes.inspection import asked_in_forks

pytestmark = pytest.mark.engine
CLASS = ("vllm.model_executor.models.llama", "LlamaForCausalLM")
theirs = registry._run_in_subprocess


@pytest.fixture(scope="module")
def imported() -> Iterator[ForkServer]:
    """A fork server with its imports, for all tests of this file."""
    own = ForkServer()
    with own.kept(), own.lent():
        yield own


@pytest.fixture
def own(imported: ForkServer, monkeypatch: pytest.MonkeyPatch) -> ForkServer:
    """A fork server that there is, and a vLLM whose own way to ask is broken."""
    use(imported, monkeypatch)
    return imported


def use(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inspection, launch):
        monkeypatch.setattr(module, "server", server)
    monkeypatch.setattr(
        registry, "_SUBPROCESS_COMMAND", [sys.executable, "-c", "raise SystemExit('a new interpreter')"]
    )


def asked(question: Callable[[], Any]) -> Any:
    with asked_in_forks():
        return registry._run_in_subprocess(question)


def test_a_fork_of_a_server_that_there_is_says_what_vllm_would_and_leaves_nothing(own: ForkServer) -> None:
    module, name = CLASS
    with own.lent() as context:
        server = psutil.Process(context.server.pid)
        known = registry._LazyRegisteredModel(module_name=module, class_name=name)
        parent, found, loaded = asked(
            lambda: (
                os.getppid(),
                registry._ModelInfo.from_model_cls(known.load_model_cls()),
                __import__("sys").modules.keys() >= {module},
            )
        )
        assert parent == server.pid
        assert loaded
        assert found == registry._ModelInfo.from_model_cls(known.load_model_cls())
        assert server.children() == []
    assert registry._run_in_subprocess is theirs


def test_what_goes_wrong_there_is_said_as_vllm_says_it(own: ForkServer) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Error raised in subprocess.*no such class here"):
        asked(lambda: {}["no such class here"])
    with pytest.raises(RuntimeError, match="ended: 7"):
        asked(lambda: os._exit(7))
    assert asked(os.getppid) > 0


def test_none_is_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use(ForkServer(), monkeypatch)
    with pytest.raises(RuntimeError, match="a new interpreter"):
        asked(os.getppid)


def test_a_model_whose_class_no_cache_knows_costs_no_interpreter(
    own: ForkServer, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry._LazyRegisteredModel, "_load_modelinfo_from_cache", lambda *_: None)
    monkeypatch.setattr(registry._LazyRegisteredModel, "_save_modelinfo_to_cache", lambda *_: None)
    registry._try_inspect_model_cls.cache_clear()
    small = {"max_model_len": 256, "dtype": "float32"}
    engine = MultiModelEngine({alias: AsyncEngineArgs(model=str(path), **small) for alias, path in models.items()})
    for alias in models:
        assert engine._catalog.config(alias).model_config.max_model_len == 256
    registry._try_inspect_model_cls.cache_clear()


def test_one_that_read_another_environment_or_died_is_not_asked(
    own: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own.lent() as context:
        with monkeypatch.context() as other:
            other.setenv("VLLM_LOGGING_PREFIX", "another ")
            with pytest.raises(RuntimeError, match="a new interpreter"):
                asked(os.getppid)
        assert asked(os.getppid) == context.server.pid, "it is the same one still"
        psutil.Process(context.server.pid).kill()
        psutil.Process(context.server.pid).wait(30)
        with pytest.raises(RuntimeError, match="a new interpreter"):
            asked(os.getppid)
