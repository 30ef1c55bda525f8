"""``gearshift serve`` as anyone starts it: one process, no broker, and no answer for a model that is not active."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]

HELLO: Any = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture
async def server(models_path: Path) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [Path(sys.executable).parent / "gearshift", "serve", "--models", models_path, "--port", str(port)]
    process = await asyncio.create_subprocess_exec(
        *command, "--inactive", "refuse", env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_it_serves_the_active_model_switches_and_ends_with_a_signal(
    server: tuple[str, asyncio.subprocess.Process],
) -> None:
    address, process = server
    ended = asyncio.create_task(process.wait())
    async with (
        httpx.AsyncClient(base_url=address, timeout=120) as http,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        while not await answered(http, "/ready") and not ended.done():
            await asyncio.wait({ended}, timeout=0.3)
        (forked_from,) = (child for child in psutil.Process(process.pid).children() if child.children())
        assert "serve" in forked_from.cmdline()  # a fork of the command
        assert len(forked_from.children()) == 2  # core and worker

        async def said(model: str) -> str:
            asked = client.chat.completions.create(model=model, messages=HELLO, max_tokens=12, temperature=0)
            return str((await asked).choices[0].message.content)

        llamas = await said("llama")
        with pytest.raises(openai.NotFoundError):
            await said("qwen")
        switched = await http.post("/v1/models/switch", json={"model": "qwen", "drain_timeout": 5})
        assert (switched.json()["previous_model"], switched.json()["current_model"]) == ("llama", "qwen")
        assert await said("qwen") != llamas
        with pytest.raises(openai.NotFoundError):
            await said("llama")
        listed = {model["id"]: model["active"] for model in (await http.get("/v1/models")).json()["data"]}
        assert [alias for alias, active in listed.items() if active] == ["qwen"]
        process.send_signal(signal.SIGTERM)
        assert await ended == 0


async def answered(http: httpx.AsyncClient, path: str) -> bool:
    """Whether it is there and says yes."""
    try:
        return (await http.get(path)).status_code == 200
    except httpx.TransportError:
        return False
