"""``python -m tests.bench.outlive``: long answers whose workers are killed, and what is decoded twice for it.

Two workers with real engines; one of them is killed after every ``KILL_AFTER_S`` in which it decoded. Bodies of every
kind are asked once in peace, then over and over, and compared with that. ``continued``: results that say they were;
``equal``: the share of those that are what they were in peace, in float32; ``equal_bf16``: the same in bfloat16, where
the sums of a batch hang on who else is in it, beside ``equal_undisturbed_bf16`` of those that went on without a kill;
``repeated_tokens_share``: tokens decoded, by vLLM's own count just before each kill, beyond those in results, over
these. ``handover_s``: from SIGTERM with a hundred running answers until the worker has left its group; ``exit_s``:
until its process has ended. ``progress_cost``: results per second of answers that take seconds, with what they say
being kept, over without (the tests' own engine), as many at once as a worker takes by default;
``progress_cost_crowded``: two thousand at once, the processor's last bit.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from deploy.local.broker import find_broker
from deploy.local.models import ensure_models, write_models_file
from deploy.local.setup import home
from schemas.results import Outcome, Result
from service.client import Client
from service.kafka.topics import ensure_topics
from service.settings import Settings
from tests.support.bus import Bus
from tests.support.engine_spec import comparable
from tests.support.pool import delete_topics, settings_for

KILL_AFTER_S = 10.0
AT_ONCE = 40
IN_BF16 = 40
"""Answers that are continued in bfloat16: enough to report how many are what they were."""
RUNNING = 100
LONG = 1500
COST_ANSWERS, COST_WORDS, COST_STEP_S = 2000, 400, 0.01
DEFAULT_RUNNING = 256
_GENERATED = re.compile(r"^vllm:generation_tokens_total\{.*\} (\S+)$", re.MULTILINE)
_WITHIN_S = 600.0

ASKED = [{"role": "user", "content": "Tell me about your day."}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "array", "items": {"type": "integer"}, "minItems": 300, "maxItems": 300}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
GREEDY: Mapping[str, Any] = {"model": "llama", "temperature": 0, "max_tokens": LONG, "ignore_eos": True}
SEEDED: Mapping[str, Any] = {**GREEDY, "temperature": 1.0}
GRAMMAR: Mapping[str, Any] = {**GREEDY, "ignore_eos": False}
RESPONSE = {"model": "llama", "temperature": 0, "input": "Who are you?", "max_output_tokens": LONG, "ignore_eos": True}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "chat": {**GREEDY, "messages": ASKED},
    "completion": {**GREEDY, "prompt": "Once"},
    "response": RESPONSE,
    "stream of a chat": {**GREEDY, "messages": ASKED, "stream": True},
    "stream of a completion": {**GREEDY, "prompt": "Once", "stream": True},
    "stream of a response": {**RESPONSE, "stream": True},
    "seed": {**SEEDED, "messages": ASKED, "seed": 7},
    "seed, streamed": {**SEEDED, "prompt": "Once", "seed": 8, "stream": True},
    "two samples": {**SEEDED, "messages": ASKED, "seed": 9, "n": 2, "max_tokens": LONG // 2},
    "stop strings": {**GREEDY, "prompt": "Once", "stop": ["zzz", "qqq"]},
    "logprobs": {**GREEDY, "messages": ASKED, "logprobs": True, "top_logprobs": 2},
    "penalties": {**GREEDY, "prompt": "Once", "presence_penalty": 1.1, "frequency_penalty": 0.1},
    "JSON schema": {
        **GRAMMAR,
        "messages": ASKED,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    },
    "tool": {**GRAMMAR, "messages": ASKED, "tools": [TOOL], "tool_choice": "required"},
}

Bars = Mapping[str, Any]
BARS: Bars = {
    "continued >= 200": lambda at: at["continued"] >= 200,
    "equal": lambda at: at["equal"] == 1,
    "decoded twice <= 8 %": lambda at: at["repeated_tokens_share"] <= 0.08,
    "progress costs <= 5 %": lambda at: at["progress_cost"] >= 0.95,
    "handed over within 2 s": lambda at: at["handover_s"] <= 2,
    "gone within 5 s": lambda at: at["exit_s"] <= 5,
}


# --- the workers --------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """``gearshift worker`` in a process group of its own: its engine's processes die with it."""

    process: asyncio.subprocess.Process
    address: str

    async def decoded(self) -> float:
        """Tokens that its engine has made."""
        async with httpx.AsyncClient() as http:
            with contextlib.suppress(httpx.HTTPError):
                text = (await http.get(f"{self.address}/metrics")).text
                return sum(map(float, _GENERATED.findall(text)))
        return 0.0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


async def started(settings: Settings, models: Path) -> Worker:
    """A worker that is ready."""
    values = {
        "bootstrap_servers": settings.kafka.bootstrap_servers,
        "topic_prefix": settings.topics.topic_prefix,
        "group_id": settings.worker.group_id,
        "worker_id": f"w-{uuid.uuid4().hex[:6]}",
        "session_timeout_s": 6,
        "shutdown_timeout_s": 0,
        "presence_interval_s": 0.5,
        "http_port": 0,
        "log_format": "json",
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    variables = {f"GEARSHIFT_{name.upper()}": str(value) for name, value in values.items()}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GEARSHIFT_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service.cli", "worker", "--models", str(models)),
        env={**kept, **variables, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=1 << 22,
    )
    assert process.stderr is not None
    address = ""
    async with asyncio.timeout(_WITHIN_S):
        async for line in process.stderr:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                address = said["address"] if said["event"] == "http.open" else address
                if said["event"] == "worker.ready":
                    break
    _drain(process.stderr)
    return Worker(process, address)


_DRAINS: set["asyncio.Task[None]"] = set()


def _drain(stream: asyncio.StreamReader) -> None:
    """Read what nobody looks at, so that who writes it goes on."""

    async def drain() -> None:
        while await stream.read(1 << 16):
            pass

    task = asyncio.create_task(drain())
    _DRAINS.add(task)
    task.add_done_callback(_DRAINS.discard)


@contextlib.asynccontextmanager
async def pool(settings: Settings, models: Path, count: int) -> AsyncIterator[list[Worker]]:
    """Workers; whoever is in the list at the end is killed."""
    workers: list[Worker] = []
    try:
        while len(workers) < count:
            workers.append(await started(settings, models))
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            await worker.process.wait()


# --- killed over and over -----------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What the results say."""

    peace: dict[str, Any]
    continued: int = 0
    equal: int = 0
    tokens: int = 0
    wrong: int = 0
    undisturbed: int = 0

    def take(self, kind: str, result: Result) -> None:
        assert result.outcome is Outcome.COMPLETED, (kind, result.error)
        same = comparable(result.body) == self.peace[kind]
        self.tokens += used(result)
        self.wrong += not same
        if result.continued:
            self.continued += 1
            self.equal += same
        else:
            self.undisturbed += 1
        if not same:
            print(f"  {kind} is another one; continued at {result.continued}", flush=True)


def used(result: Result) -> int:
    usage = (result.body or {})["usage"]
    return int(usage["output_tokens"] if "output_tokens" in usage else usage["completion_tokens"])


async def ask(client: Client, kind: str) -> Result:
    return await client.result(await client.submit(KINDS[kind]), timeout_s=_WITHIN_S)


async def killing(settings: Settings, models: Path, *, seconds: float, wanted: int) -> dict[str, float]:
    """Answers that are asked over and over, until so many were continued."""
    async with pool(settings, models, 2) as workers, Client(settings=settings, timeout_s=_WITHIN_S) as client:
        seen = Seen({})
        for kind, result in zip(KINDS, await asyncio.gather(*(ask(client, kind) for kind in KINDS)), strict=True):
            assert result.outcome is Outcome.COMPLETED, (kind, result.error)
            seen.peace[kind] = comparable(result.body)
            print(f"  {kind}: {used(result)} tokens", flush=True)
        before = sum([await worker.decoded() for worker in workers])
        until, decoded = time.monotonic() + seconds, 0.0

        async def asking(number: int) -> None:
            kinds = list(KINDS)[number % len(KINDS) :] + list(KINDS)[: number % len(KINDS)]
            while seen.continued < wanted and time.monotonic() < until:
                for kind in kinds:
                    seen.take(kind, await ask(client, kind))
                    if seen.continued >= wanted or time.monotonic() >= until:
                        return

        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(asking(number)) for number in range(AT_ONCE)]
            while not all(task.done() for task in asked):
                await asyncio.wait(asked, timeout=KILL_AFTER_S)
                if not any(task.done() for task in asked) and time.monotonic() < until:
                    worker = workers.pop(0)
                    decoded += await worker.decoded()
                    worker.kill()
                    print(f"killed; {seen.continued} continued, {seen.wrong} wrong", flush=True)
                    workers.append(await started(settings, models))
        decoded += sum([await worker.decoded() for worker in workers]) - before
    return {
        "continued": seen.continued,
        "equal": seen.equal / max(1, seen.continued),
        "equal_undisturbed": 1 - (seen.wrong - seen.continued + seen.equal) / max(1, seen.undisturbed),
        "wrong": seen.wrong,
        "repeated_tokens_share": (decoded - seen.tokens) / seen.tokens,
    }


# --- handed over --------------------------------------------------------------------------------------------------


async def members(settings: Settings) -> int:
    async with Bus(settings.kafka.bootstrap_servers).admin() as admin:
        (description,) = await admin.describe_consumer_groups([settings.worker.group_id])
        return len(description.groups[0][5])


async def handing_over(settings: Settings, models: Path) -> dict[str, float]:
    """SIGTERM to the only worker, with a hundred answers under way; another one finishes them."""
    async with Client(settings=settings, timeout_s=_WITHIN_S) as client:
        async with pool(settings, models, 1) as workers:
            asked = [await client.submit({**GREEDY, "prompt": f"Story {number}: once"}) for number in range(RUNNING)]
            (worker,) = workers
            while await worker.decoded() < 100 * RUNNING:
                pass
            began = time.monotonic()
            worker.process.send_signal(signal.SIGTERM)
            while await members(settings):
                pass
            handover_s = time.monotonic() - began
            await worker.process.wait()
            exit_s = time.monotonic() - began
        async with pool(settings, models, 1):
            results = [await client.result(one, timeout_s=_WITHIN_S) for one in asked]
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    handed_over = sum(bool(result.continued) for result in results)
    return {"handover_s": handover_s, "exit_s": exit_s, "handed_over": handed_over}


# --- what keeping it costs ----------------------------------------------------------------------------------------


async def rate(bootstrap: str, interval_s: float, running: int) -> float:
    """Results per second of many long answers at once, by the tests' own engine."""
    settings = settings_for(bootstrap)
    values = {
        "bootstrap_servers": bootstrap,
        "topic_prefix": settings.topics.topic_prefix,
        "group_id": settings.worker.group_id,
        "request_partitions": 12,
        "max_running": running,
        "progress_interval_s": interval_s,
        "log_level": "warning",
    }
    options = [f"--set={name}={value}" for name, value in values.items()]
    worker = ["-m", "tests.support.fake_worker", "--aliases=llama", f"--step-s={COST_STEP_S}", *options]
    await ensure_topics(settings, ["llama"])
    process = await asyncio.create_subprocess_exec(sys.executable, *worker, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with Client(settings=settings, timeout_s=_WITHIN_S) as client:
            await client.result(await client.submit({"model": "llama", "prompt": "x", "max_tokens": 1}))
            began = time.monotonic()
            body = {"model": "llama", "prompt": "x", "max_tokens": COST_WORDS}
            asked = await asyncio.gather(*(client.submit(body) for _ in range(COST_ANSWERS)))
            await asyncio.gather(*(client.result(one, timeout_s=_WITHIN_S) for one in asked))
            return COST_ANSWERS / (time.monotonic() - began)
    finally:
        process.terminate()
        await process.wait()
        await delete_topics(settings)


async def cost(bootstrap: str) -> dict[str, float]:
    async def over(running: int) -> float:
        pairs = [[await rate(bootstrap, every, running) for every in (1.0, float("inf"))] for _ in range(3)]
        return statistics.median(kept / without for kept, without in pairs)

    return {"progress_cost": await over(DEFAULT_RUNNING), "progress_cost_crowded": await over(COST_ANSWERS)}


async def measure(bootstrap: str, given: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {"llama": ensure_models(home() / "models")["llama"]}
        write = partial(write_models_file, models=paths, default="llama", kv_cache_bytes=256 << 20)
        models = write(Path(folder) / "models.yaml")
        for part in given.only or PARTS:
            settings = settings_for(bootstrap)
            await ensure_topics(settings, ["llama"])
            try:
                if part == "cost":
                    figures |= await cost(bootstrap)
                elif part == "handover":
                    figures |= await handing_over(settings, models)
                elif part == "kill":
                    figures |= await killing(settings, models, seconds=given.seconds, wanted=given.continued)
                else:
                    rounded = write(Path(folder) / "bf16.yaml", dtype="bfloat16")
                    found = await killing(
                        settings, rounded, seconds=given.seconds, wanted=min(given.continued, IN_BF16)
                    )
                    figures |= {f"{name}_bf16": found[name] for name in ("continued", "equal", "equal_undisturbed")}
            finally:
                await delete_topics(settings)
            print("  ".join(f"{name} {value:.3f}" for name, value in figures.items()), flush=True)
    return figures


PARTS = ("cost", "handover", "kill", "bf16")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of the part with kills, at the most")
    parser.add_argument("--continued", type=int, default=200, help="after so many the part with kills ends")
    parser.add_argument("--only", action="append", choices=PARTS, help="not all of it")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    with find_broker() as broker:
        figures = asyncio.run(measure(broker.bootstrap, given))
    missed = [name for name, bar in BARS.items() if given.only is None and not bar(figures)]
    if given.json:
        given.json.write_text(json.dumps({"figures": figures, "missed": missed}, indent=2))
    for name in missed:
        print(f"FAIL {name}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
