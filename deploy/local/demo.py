"""The main job before one's eyes: broker, worker, two models, and switches between them in the middle of an answer.

Everything is real: Apache Kafka, ``gearshift worker`` as a process of its own, a vLLM engine, small trained models.
Exit code 0 means that all was shown and is true; 2 that there is no broker to be had; 1 anything else.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from rich.console import Console
from rich.table import Table

from deploy.local.apache_kafka import NoBroker
from deploy.local.broker import Broker, ContainerBroker, GivenBroker, LocalBroker, find_broker
from deploy.local.models import ensure_models, write_models_file
from deploy.local.setup import home
from schemas.contexts import Tier
from schemas.results import Outcome, Result
from schemas.status import Status, StatusState
from service.client import Client
from service.kafka.connection import client_options, close_client, start
from service.settings import load

CAUGHT_AFTER_CHUNKS = 3
CATCHES = 3
"""The switch is published when chunks have come; on a machine that stands still the answer may be faster yet."""
LONG = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0.0}
SHORT = {"max_tokens": 32, "temperature": 0.0}
ENGINE_WITHIN_S = 900.0
FEWEST_SWITCHES = 3

console = Console(highlight=False)


class DemoFailed(Exception):
    """Something was not as it should be."""


@dataclass
class Seen:
    """What the demo saw, for the closing table and for ``--json``."""

    engine_start_s: float = 0.0
    switches: list[Status] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    before: int = 0
    after: int = 0
    equal: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "engine_start_s": self.engine_start_s,
            "switches": [
                {"from": s.from_model, "to": s.to_model, "mode": s.mode, "tier": s.tier_found, "ms": s.ms}
                for s in (status.switch for status in self.switches)
                if s is not None
            ],
            "results": [
                {
                    "id": result.id,
                    "model": result.model,
                    "tokens": tokens_of(result),
                    "latency_s": result.timing.latency_s,
                    "text": text_of(result),
                }
                for result in self.results
            ],
            "frozen": {"tokens_before": self.before, "tokens_after": self.after, "text_equal": self.equal},
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description="The main job, from nothing to a closing table.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    parser.add_argument("--keep", action="store_true", help="leave broker and worker running")
    chosen = parser.parse_args()
    try:
        seen = asyncio.run(demo(keep=chosen.keep))
        if chosen.json:
            chosen.json.write_text(json.dumps(seen.as_json(), indent=2) + "\n")
        report(seen)
        judge(seen)
    except NoBroker as reason:
        console.print(str(reason), style="red", markup=False)
        return 2
    except DemoFailed as reason:
        console.print(f"demo: {reason}", style="red", markup=False)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped")
        return 130
    return 0


async def demo(*, keep: bool) -> Seen:
    """Open broker, worker and client, show the story, and close them in the reverse order."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    seen = Seen()
    async with contextlib.AsyncExitStack() as stack:
        heading("broker")
        broker = find_broker(outlive=keep, say=tell)
        # On somebody's broker the demo has topics of its own.
        left = Left(broker, f"demo-{uuid.uuid4().hex[:8]}-" if isinstance(broker, GivenBroker) else "")
        with console.status("starting Kafka"):
            began = time.monotonic()
            broker.start()
        stack.callback(left.tell if keep else broker.close)
        tell(f"{kind_of(broker)} at {broker.bootstrap} after {time.monotonic() - began:.1f} s")
        heading("models")
        with console.status("small models: made here, once"):
            models = ensure_models(home() / "models")
        pair = {alias: models[alias] for alias in ("llama", "qwen")}
        tell(", ".join(f"{alias}: {path}" for alias, path in pair.items()))
        heading("engine")
        worker = left.worker = Worker(bootstrap=broker.bootstrap, prefix=left.prefix, models=pair)
        if not keep:
            stack.push_async_callback(delete_topics, broker.bootstrap, left.prefix)
        worker.start(outlive=keep)
        if not keep:
            stack.push_async_callback(worker.stop)
        seen.engine_start_s = await worker.ready()
        client = await stack.enter_async_context(Client(broker.bootstrap, topic_prefix=left.prefix, timeout_s=120.0))
        await stack.enter_async_context(watching(client, seen))
        await story(client, seen)
        heading("end")
    if not keep:
        tell("worker and broker stopped")
    return seen


async def delete_topics(bootstrap: str, prefix: str) -> None:
    """Those that the demo made on somebody's broker."""
    if not prefix:
        return
    admin = AIOKafkaAdminClient(**client_options(load(bootstrap_servers=bootstrap).kafka))
    try:
        await start(admin)
        if made := [name for name in await admin.list_topics() if name.startswith(prefix)]:
            await admin.delete_topics(made)
    except (KafkaError, OSError, TimeoutError) as error:
        tell(f"the topics {prefix}* are left: {error}")
    finally:
        await close_client(admin.close())


async def story(client: Client, seen: Seen) -> None:
    """What is shown once broker and worker are there."""
    heading("requests for two models")
    asked = [
        await client.submit(chat(alias, text, SHORT), request_id=f"{alias}-{number}")
        for number, text in enumerate(("Where are you?", "What do you see?"), 1)
        for alias in ("llama", "qwen")
    ]
    tell(f"produced {len(asked)} to `requests`: {', '.join(asked)}")
    for request in asked:
        arrived(await client.result(request), seen)

    heading("control.switch, to models whose contexts are resident")
    for model in ("llama", "qwen", "llama"):
        await switch(client, model)

    heading("a long answer, uninterrupted")
    question = "Tell me everything, at length."
    whole = await client.result(await client.submit(chat("llama", question, LONG), request_id="llama-whole"))
    arrived(whole, seen)

    heading("the same, with a switch in the middle")
    for attempt in range(1, CATCHES + 1):
        frozen = await interrupted(client, chat("llama", question, LONG), seen, name=f"llama-frozen-{attempt}")
        freezes = frozen.timing.freezes
        if freezes:
            break
        tell("the answer was complete before the switch came: once more")
    else:
        raise DemoFailed("the long request was not caught by the switch")
    arrived(frozen, seen)
    seen.before = freezes[0].tokens
    seen.after = tokens_of(frozen) - freezes[-1].tokens
    seen.equal = text_of(frozen) == text_of(whole)
    tell(
        f"{seen.before} tokens before the freeze, {freezes[0].seconds:.2f} s frozen while {freezes[0].model} ran, "
        f"{seen.after} tokens after it; text {'equal to' if seen.equal else 'DIFFERENT from'} the uninterrupted one"
    )


async def interrupted(client: Client, body: dict[str, Any], seen: Seen, *, name: str) -> Result:
    """Stream an answer; once it has begun to come, go to the other model, ask it something, and come back."""

    async def meanwhile() -> None:
        await switch(client, "qwen")
        asked = await client.submit(chat("qwen", "And you?", SHORT), request_id=f"{name}-meanwhile")
        arrived(await client.result(asked), seen)
        await switch(client, "llama")

    stream = client.stream(**body, request_id=name)
    chunks = 0
    async with asyncio.TaskGroup() as group:
        async for _ in stream:
            chunks += 1
            if chunks == CAUGHT_AFTER_CHUNKS:
                tell(f"{chunks} chunks have come")
                group.create_task(meanwhile(), name="meanwhile")
    if stream.result is None:
        raise DemoFailed("the stream ended without a result")
    return stream.result


async def switch(client: Client, model: str) -> None:
    """Publish a switch, and print each status event as it comes, with the time since it was published."""
    began = time.monotonic()

    def on_status(status: Status) -> None:
        report_ = f", {status.switch.ms:.2f} ms" if status.switch else ""
        tell(f"status {(time.monotonic() - began) * 1000:6.1f} ms: {status.state.value}{report_}")

    tell(f"control.switch to {model}")
    await client.switch(model, on_status=on_status)


@contextlib.asynccontextmanager
async def watching(client: Client, seen: Seen) -> AsyncIterator[None]:
    """Keep every completed switch that the status topic tells of, the scheduler's own included."""

    async def watch() -> None:
        async for status in client.statuses(past=True):
            if status.state is StatusState.COMPLETED and status.switch is not None:
                seen.switches.append(status)

    task = asyncio.create_task(watch(), name="statuses")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


# --- the worker -----------------------------------------------------------------------------------------------------


class Worker:
    """``gearshift worker`` as a process of its own; its log is a file, from which its progress is read."""

    def __init__(self, *, bootstrap: str, prefix: str, models: dict[str, Path]) -> None:
        self.folder = home() / "demo" / uuid.uuid4().hex[:8]
        self.folder.mkdir(parents=True)
        self.models_file = write_models_file(self.folder / "models.yaml", models, default="llama")
        self.log = self.folder / "worker.log"
        self._command = ["gearshift", "worker", "--models", str(self.models_file), "--topic-prefix", prefix]
        self._command += ["--group-id", f"{prefix}gearshift"]
        self._variables = {
            **os.environ,
            "KAFKA_BOOTSTRAP_SERVERS": bootstrap,
            "GEARSHIFT_LOG_FORMAT": "json",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, outlive: bool) -> None:
        def end_with_the_demo() -> None:
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # Linux' PR_SET_PDEATHSIG

        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours: the worker is told in its turn
                preexec_fn=None if outlive else end_with_the_demo,  # noqa: PLW1509 - one thread yet
            )

    async def ready(self) -> float:
        """Wait until the worker serves, showing what it is at; the seconds that its engine took to start."""
        assert self._process is not None
        began, engine_s = time.monotonic(), 0.0
        with console.status("starting the worker") as line, self.log.open() as log:
            while time.monotonic() - began < ENGINE_WITHIN_S:
                passed = f"{time.monotonic() - began:5.1f} s"
                for event in events_in(log):
                    if event["event"] == "engine.progress":
                        tell(f"{passed}  {event['phase']}")
                    elif event["event"] == "engine.started":
                        engine_s = float(event["engine_start_s"])
                        tell(f"{passed}  engine started")
                    elif event["event"] == "worker.ready":
                        tell(f"{passed}  worker ready, active model: {event['active']}")
                        return engine_s
                if self._process.poll() is not None:
                    raise DemoFailed(f"the worker ended with {self._process.returncode}; its log ends:\n{self.tail()}")
                line.update(f"engine starting, {passed}")
                await asyncio.sleep(0.1)
        raise DemoFailed(f"the worker was not ready within {ENGINE_WITHIN_S:.0f} s; its log ends:\n{self.tail()}")

    async def stop(self) -> None:
        """As an orchestrator would: SIGTERM, and exit code 0 in return."""
        assert self._process is not None
        self._process.terminate()
        try:
            code = await asyncio.to_thread(self._process.wait, 60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise DemoFailed(f"the worker did not stop within 60 s; its log ends:\n{self.tail()}") from None
        if code:
            raise DemoFailed(f"the worker ended with {code}; its log ends:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


def events_in(log: Any) -> list[dict[str, Any]]:
    """The JSON lines that have come since the last call. A line that is not ours is passed over."""
    events = []
    while line := log.readline():
        if not line.endswith("\n"):  # half written: it is read again when it is whole
            log.seek(log.tell() - len(line.encode()))
            break
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                events.append(event)
    return events


# --- telling --------------------------------------------------------------------------------------------------------


def chat(model: str, text: str, rest: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **rest}


def tokens_of(result: Result) -> int:
    return int(((result.body or {}).get("usage") or {}).get("completion_tokens", 0))


def text_of(result: Result) -> str:
    return str((result.body or {})["choices"][0]["message"]["content"])


def heading(text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]")


def tell(text: str) -> None:
    console.print(f"  {text}", markup=False, soft_wrap=True)


def arrived(result: Result, seen: Seen) -> None:
    if result.outcome is not Outcome.COMPLETED:
        reason = result.error.message if result.error else "no reason given"
        raise DemoFailed(f"request {result.id}: {result.outcome.value}: {reason}")
    seen.results.append(result)
    tell(f"result {result.id}: {text_of(result).splitlines()[0]} ... ({tokens_of(result)} tokens)")


def report(seen: Seen) -> None:
    """The closing tables."""
    answers = Table("request", "model", "tokens", "latency", "text", title="results")
    for result in seen.results:
        first = text_of(result).replace("\n", " ")[:60]
        answers.add_row(
            result.id, result.model, str(tokens_of(result)), f"{result.timing.latency_s:.2f} s", f"{first}..."
        )
    switches = Table("from", "to", "mode", "found", "ms", "engine start takes", title="switches")
    for status in seen.switches:
        if (made := status.switch) is not None:
            times = seen.engine_start_s * 1000 / made.ms if made.ms else 0.0
            switches.add_row(
                made.from_model,
                made.to_model,
                made.mode,
                made.tier_found,
                f"{made.ms:.2f}",
                f"{times:,.0f} times as long",
            )
    console.print()
    console.print(answers)
    console.print(switches)
    back = [one.switch.ms for one in seen.switches if one.switch and one.switch.tier_found is Tier.RESIDENT]
    if back:
        slowest = max(back)
        console.print(
            f"The engine took {seen.engine_start_s:.1f} s to start; the slowest of {len(back)} switches back to a "
            f"resident context took {slowest:.2f} ms, {seen.engine_start_s * 1000 / slowest:,.0f} times less."
        )


def judge(seen: Seen) -> None:
    """Raises DemoFailed where what was seen is not what was promised."""
    if not seen.equal:
        raise DemoFailed("the text of the frozen request differs from the uninterrupted one")
    if seen.before <= 0 or seen.after <= 0:
        raise DemoFailed(f"the freeze did not fall inside the answer: {seen.before} tokens before, {seen.after} after")
    if {result.model for result in seen.results} != {"llama", "qwen"}:
        raise DemoFailed("there are not results of both models")
    if len(seen.switches) < FEWEST_SWITCHES:
        raise DemoFailed(f"only {len(seen.switches)} switches were seen")


def kind_of(broker: GivenBroker | ContainerBroker | LocalBroker) -> str:
    return {GivenBroker: "yours,", ContainerBroker: "a container,", LocalBroker: "Apache Kafka"}[type(broker)]


@dataclass
class Left:
    """What runs on after a demo that was to keep it, however that ended."""

    broker: Broker
    prefix: str
    worker: "Worker | None" = None

    def tell(self) -> None:
        """How to go on with it, and how to end it."""
        more = f" --topic-prefix {self.prefix}" if self.prefix else ""
        served = self.worker is not None and self.worker.runs
        lines = [f"export KAFKA_BOOTSTRAP_SERVERS={self.broker.bootstrap}"]
        if served:
            lines += [
                f'deploy/local/run gearshift send llama "Hello" --max-tokens 32{more}',
                f"deploy/local/run gearshift switch qwen{more}",
                f"deploy/local/run gearshift status{more}",
            ]
        if self.worker is not None:
            lines.append(f"tail -f {self.worker.log}")
        ends = [f"kill {self.worker.pid}"] if self.worker is not None and served else []
        ends += [self.broker.ended_by] if self.broker.ended_by else []
        if self.prefix and self.worker is not None:
            ends.append(
                f"kafka-topics.sh --bootstrap-server {self.broker.bootstrap} --delete --topic '{self.prefix}.*'"
            )
        if not ends:
            return
        tell(f"{'broker and worker go' if served else 'the broker goes'} on. Talk to {'them' if served else 'it'}:")
        for line in (*lines, "# when you have seen enough:", *ends):
            tell(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
