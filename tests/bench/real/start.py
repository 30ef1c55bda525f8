"""How long a server of one model needs until it answers, and again when its engine was killed; and its memory."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from deploy.local.broker import free_port
from tests.bench.card.run import Card

_MODEL = "llama"
_ROUNDS = 3
_WITHIN_S = 300.0
_GEARSHIFT = (str(Path(sys.executable).with_name("gearshift")), "serve")
_API_SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
_SPAWNED = {"RAY_JOB_ID": "01000000"}
"""With it vLLM insists on a new interpreter for each process, and so do we."""
BARS = {
    "start_over_vllm": ("<=", 0.5),
    "engine_restart_over_cold": ("<=", 0.15),
    "memory_over_spawned": ("<=", 0.7),
}


async def figures(card: Card) -> dict[str, float]:
    """Medians of three, by turns; each begins when no process of vLLM is there, with its files in the page cache.

    A start of ours brings most of them there; what vLLM's server has beside is read in the first of its three.

    ``start_over_vllm``: from the command ``gearshift serve MODEL`` to its first answer, over the same of vLLM's own
    api_server with the same words. ``memory_over_spawned``: the proportional set size of all its processes once it has
    answered, over that where each process of the engine is a new interpreter. ``engine_restart_over_cold``: from
    killing its engine's core to the next answer of the same process, over the whole start of such a server.
    """
    path = str(card.paths[_MODEL])
    words = [
        *("--served-model-name", _MODEL, "--dtype", card.shape.dtype),
        *("--max-model-len", str(card.shape.max_model_len), "--kv-cache-memory-bytes", str(card.shape.kv_bytes)),
        "--enforce-eager",
    ]
    ours: list[Started] = []
    theirs: list[Started] = []
    spawned: list[Started] = []
    restarts: list[float] = []
    async with _started([*_GEARSHIFT, path, *words]):
        pass
    for _ in range(_ROUNDS):
        async with _started([*_GEARSHIFT, path, *words]) as mine:
            ours.append(mine)
            restarts.append(await _restarted(mine))
        async with _started([*_API_SERVER, path, *words]) as other:
            theirs.append(other)
        async with _started([*_GEARSHIFT, path, *words], **_SPAWNED) as other:
            spawned.append(other)
        card.note(start_s=ours[-1].took_s, vllm_start_s=theirs[-1].took_s, engine_restart_s=restarts[-1])
    start_s = median(each.took_s for each in ours)
    memory = median(each.memory for each in ours)
    cold_s = median(each.took_s for each in spawned)
    card.note(
        spawned_start_s=cold_s,
        memory_mib=memory / 2**20,
        vllm_memory_mib=median(each.memory for each in theirs) / 2**20,
    )
    return {
        "start_over_vllm": start_s / median(each.took_s for each in theirs),
        "engine_restart_over_cold": median(restarts) / cold_s,
        "memory_over_spawned": memory / median(each.memory for each in spawned),
    }


@dataclass
class Started:
    """A server that has answered."""

    tree: psutil.Process
    process: asyncio.subprocess.Process
    address: str
    took_s: float
    memory: int
    """Bytes, proportional set size, of all its processes."""


@contextlib.asynccontextmanager
async def _started(command: list[str], **variables: str) -> AsyncIterator[Started]:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(*command, "--port", str(port)), env={**os.environ, **variables}, start_new_session=True
    )
    try:
        await _answered(address, process)
        took_s = time.perf_counter() - began
        tree = psutil.Process(process.pid)
        memory = sum(each.memory_full_info().pss for each in (tree, *tree.children(recursive=True)))
        yield Started(tree, process, address, took_s, memory)
    finally:
        if process.returncode is None:
            left = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            await process.wait()
            psutil.wait_procs(left, timeout=60)


async def _answered(address: str, process: asyncio.subprocess.Process) -> None:
    """Return with the first answer of a token. Raises RuntimeError where the server has ended."""
    ask: dict[str, Any] = {"model": _MODEL, "prompt": [3, 14, 25], "max_tokens": 1, "ignore_eos": True}
    async with asyncio.timeout(_WITHIN_S), httpx.AsyncClient(timeout=_WITHIN_S) as http:
        while process.returncode is None:
            with contextlib.suppress(httpx.TransportError):
                if (await http.post(f"{address}/v1/completions", json=ask)).status_code == 200:
                    return
            await asyncio.sleep(0.02)
    raise RuntimeError(f"the server has ended with {process.returncode}")


async def _restarted(server: Started) -> float:
    """Kill its engine's core; the time until the next answer."""
    (core,) = (each for each in server.tree.children(recursive=True) if "EngineCore" in " ".join(each.cmdline()))
    began = time.perf_counter()
    core.kill()
    psutil.wait_procs([core], timeout=60)
    await _answered(server.address, server.process)
    return time.perf_counter() - began
