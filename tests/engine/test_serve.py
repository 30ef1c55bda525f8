"""``gearshift serve`` as anyone starts it: one process, no broker, models.yaml or ``vllm serve``'s own words."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from huggingface_hub import snapshot_download

from tests.support.held import shared_segments
from tests.support.hub import hub
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

Serving = Callable[..., Awaitable[tuple[str, asyncio.subprocess.Process]]]
HELLO: Any = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    """Start ``gearshift serve --port PORT WORDS``: its address when it is ready or has ended, and the process."""
    with contextlib.ExitStack() as ends:

        async def start(*words: str | Path, **variables: str) -> tuple[str, asyncio.subprocess.Process]:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            command = [Path(sys.executable).parent / "gearshift", "serve", "--port", str(port), *words]
            environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", **variables}
            process = await asyncio.create_subprocess_exec(*command, env=environment)
            ends.callback(lambda: process.returncode is None and process.kill())
            address = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=address, timeout=120) as http:
                while process.returncode is None and not await answered(http, "/ready"):  # noqa: ASYNC110
                    await asyncio.sleep(0.3)
            return address, process

        yield start


def client_of(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


QUICKSTART = """
default_model: llama
models:
  llama:
    model: meta-llama/Llama-3.1-8B-Instruct
    tensor_parallel_size: 1
    max_model_len: 4096
  qwen:
    model: Qwen/Qwen3-0.6B
    tensor_parallel_size: 1
    max_model_len: 4096
"""
"""The file of vllm-gaudi's quickstart for its multi-model server, word for word."""


@pytest.fixture
def online(models: dict[str, Path], tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of a machine whose hub has the models of the quickstart; what they hold is tiny."""
    with hub({"meta-llama/Llama-3.1-8B-Instruct": models["llama"], "Qwen/Qwen3-0.6B": models["qwen"]}) as endpoint:
        yield {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "cache")}


@pytest.mark.parametrize("killed", ["core", pytest.param("worker", marks=pytest.mark.long)])
async def test_the_quickstart_of_the_multi_model_server_and_its_end_and_that_of_its_engine(
    serving: Serving, online: dict[str, str], tmp_path: Path, killed: str
) -> None:
    (tmp_path / "models.yaml").write_text(QUICKSTART)
    # Not compiled: that is another test's.
    online |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    address, process = await serving("--models", tmp_path / "models.yaml", "--inactive", "refuse", **online)
    command = psutil.Process(process.pid)
    async with httpx.AsyncClient(base_url=address, timeout=120) as http, client_of(address) as client:
        (forked_from,) = (child for child in command.children() if child.children())
        assert "serve" in forked_from.cmdline()  # a fork of the command
        assert len(forked_from.children()) == 2  # core and worker

        async def said(model: str) -> str:
            asked = client.chat.completions.create(model=model, messages=HELLO, max_tokens=12, temperature=0)
            return str((await asked).choices[0].message.content)

        listed = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
        assert {alias: (model["active"], model["max_model_len"]) for alias, model in listed.items()} == {
            "llama": (True, 4096),
            "qwen": (False, 4096),
        }
        llamas = await said("llama")
        with pytest.raises(openai.NotFoundError):
            await said("qwen")
        switched = await http.post("/v1/models/switch", json={"model": "qwen", "drain_timeout": 60})
        assert (switched.json()["previous_model"], switched.json()["current_model"]) == ("llama", "qwen")
        assert 0 < switched.json()["memory_before_mb"] < switched.json()["memory_after_unload_mb"]
        assert await said("qwen") != llamas
        with pytest.raises(openai.NotFoundError):
            await said("llama")
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models if model["active"]] == ["qwen"]
        await operated(http)
        await http.post("/v1/models/switch", json={"model": "llama"})
        parts = engine_of(command)
        made = {name for part in parts.values() for name in shared_segments(part.pid)}
        parts[killed].kill()
        while not (renewed(command, parts) and await answered(http, "/ready")):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert await said("llama") == llamas
        assert not any(part.is_running() for part in parts.values())
        assert made
        assert existing(made) == []
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def operated(http: httpx.AsyncClient) -> None:
    """What vLLM's operators ask of a server: of the active model, and of one that is named."""
    for path in ("/health", "/ping", "/load", "/version", "/server_info", "/tokenizer_info?model=llama"):
        assert (await http.get(path)).status_code == 200, path
    for path in ("/reset_prefix_cache", "/reset_mm_cache?model=llama", "/pause", "/resume", "/sleep?model=llama"):
        assert (await http.post(path)).status_code == 200, path
    assert [(await http.get(f"/is_sleeping?model={alias}")).json() for alias in ("llama", "qwen")] == [
        {"is_sleeping": True},
        {"is_sleeping": False},
    ]
    assert (await http.post("/wake_up?model=llama")).status_code == 200
    assert (await http.get("/is_sleeping?model=llama")).json() == {"is_sleeping": False}


def renewed(command: psutil.Process, parts: dict[str, psutil.Process]) -> bool:
    """Whether it has an engine without any of these processes."""
    with contextlib.suppress(ValueError, IndexError, psutil.NoSuchProcess):
        found = engine_of(command)
        return found.keys() == parts.keys() and not set(found.values()) & set(parts.values())
    return False


def existing(names: set[str]) -> list[str]:
    return [name for name in names if Path(name).exists()]


def engine_of(command: psutil.Process) -> dict[str, psutil.Process]:
    """Its engine's processes, which are forks of a fork of the command."""
    (forked_from,) = (child for child in command.children() if child.children())
    return {"core" if "EngineCore" in child.cmdline()[0] else "worker": child for child in forked_from.children()}


async def test_the_command_line_of_vllm_serve_serves_one_model_by_the_name_that_the_hub_has_for_it(
    serving: Serving, online: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """As there, it logs every so often how fast that model is."""
    online |= {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "0.2"}
    words = ("--max-model-len=256", "--dtype", "float32", "--enforce-eager", "--served-model-name", "tiny")
    address, process = await serving("Qwen/Qwen3-0.6B", *words, "--kv-cache-memory-bytes", "64M", **online)
    async with client_of(address) as client:
        (listed,) = (await client.models.list()).data
        assert (listed.id, listed.model_dump()["max_model_len"]) == ("tiny", 256)
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12
    said, wanted = "", ("Avg generation throughput", '"alias": "tiny"')
    async with asyncio.timeout(PATIENCE_S):
        while not any(all(word in line for word in wanted) for line in said.splitlines()):
            await asyncio.sleep(0.1)
            said += capfd.readouterr().err
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0


def test_a_name_that_the_cache_has_is_enough_without_a_hub_and_another_one_is_refused_by_its_alias(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with hub({"some/qwen": models["qwen"]}) as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        snapshot_download("some/qwen", cache_dir=tmp_path / "hub", endpoint=endpoint)
    file = tmp_path / "models.yaml"
    file.write_text("models: {here: {model: some/qwen}, away: {model: some/llama}}")
    done = subprocess.run(
        [Path(sys.executable).parent / "gearshift", "serve", "--port", "0", "--models", file],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, said
    assert f"{file}: models.away.model: some/llama is no folder and not in the hub's cache" in said
    assert "HF_HUB_OFFLINE" in said


async def answered(http: httpx.AsyncClient, path: str) -> bool:
    """Whether it is there and says yes."""
    try:
        return (await http.get(path)).status_code == 200
    except httpx.TransportError:
        return False
