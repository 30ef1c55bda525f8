"""``python -m tests.bench.bus``: this worker beside a bare transactional loop and FastStream, on one broker.

Each side is a process of its own. They answer backlogs by turns, each as fast as it can, then single requests, one
side after the other: what the machine does meanwhile, it does to all three. Figures are medians over the rounds.

``*_rps`` are results per second as a read_committed consumer sees them; ``worker_cpu_us`` is all CPU time of the
worker's process per request; latencies are from the producer's send to the consumer's sight, in milliseconds;
``real_engine_over_direct`` is in ``bus_engine``.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from deploy.local.broker import find_broker
from tests.bench import bus_engine

REQUEST = json.dumps({"model": "llama", "messages": [{"role": "user", "content": "Say ok " * 20}], "max_tokens": 1})
SIDES = ("worker", "bare", "faststream")
PARTS = (*SIDES, "engine")


@dataclass
class Side:
    """One of those compared, with its own topics, and what was measured of it so far."""

    name: str
    process: psutil.Process
    loader: AIOKafkaProducer
    producer: AIOKafkaProducer
    results: AIOKafkaConsumer
    topic: str
    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)

    async def answer(self, count: int) -> None:
        """Put a backlog there, and see its results come."""
        before = self._cpu_s()
        sent = [await self.loader.send(self.topic, REQUEST.encode(), key=uuid.uuid4().bytes) for _ in range(count)]
        began = time.perf_counter()
        await asyncio.gather(*sent)
        seen = 0
        async with asyncio.timeout(120):
            while seen < count:
                seen += sum(map(len, (await self.results.getmany(timeout_ms=1000)).values()))
        self.rates.append(count / (time.perf_counter() - began))
        self.cpu_us.append(1e6 * (self._cpu_s() - before) / count)

    async def answer_one(self) -> None:
        began = time.perf_counter()
        await self.producer.send(self.topic, REQUEST.encode(), key=uuid.uuid4().bytes)
        await self.results.getone()
        self.latencies_ms.append(1e3 * (time.perf_counter() - began))

    def _cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def forget(self) -> None:
        """What was measured while everything warmed up."""
        self.rates.clear()
        self.cpu_us.clear()
        self.latencies_ms.clear()

    def figures(self) -> dict[str, float]:
        latencies = sorted(self.latencies_ms)
        return {
            f"{self.name}_rps": statistics.median(self.rates),
            f"{self.name}_cpu_us": statistics.median(self.cpu_us),
            f"{self.name}_p50_ms": statistics.median(latencies),
            f"{self.name}_p99_ms": latencies[int(0.99 * len(latencies))],
        }


@contextlib.asynccontextmanager
async def opened(name: str, bootstrap: str, partitions: int) -> AsyncIterator[Side]:
    """A side with its topics and its process, until the block ends."""
    prefix = f"bench-{uuid.uuid4().hex[:8]}-"
    topics = [f"{prefix}requests", f"{prefix}results"]
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics])
    results = AIOKafkaConsumer(
        topics[1],
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        fetch_max_wait_ms=100,
    )
    try:
        async with (
            AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5) as loader,
            AIOKafkaProducer(bootstrap_servers=bootstrap) as producer,
            results,
            running(name, bootstrap, prefix, partitions) as process,
        ):
            yield Side(name, process, loader, producer, results, topics[0])
    finally:
        await admin.delete_topics([name for name in await admin.list_topics() if name.startswith(prefix)])
        await admin.close()


@contextlib.asynccontextmanager
async def running(name: str, bootstrap: str, prefix: str, partitions: int) -> AsyncIterator[psutil.Process]:
    """The process of a side."""
    values = {
        "bootstrap_servers": bootstrap,
        "topic_prefix": prefix,
        "group_id": prefix,
        "request_partitions": str(partitions),
        "result_partitions": str(partitions),
        "log_level": "warning",
    }
    settings = (f"--set={key}={value}" for key, value in values.items())
    loop = ["tests.bench.loops", name, f"--bootstrap={bootstrap}", f"--prefix={prefix}"]
    command = ["tests.support.fake_worker", "--aliases=llama", *settings] if name == "worker" else loop
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GEARSHIFT_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *command, env=environment, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def compare(bootstrap: str, names: Sequence[str], given: argparse.Namespace) -> dict[str, float]:
    async with contextlib.AsyncExitStack() as stack:
        sides = [await stack.enter_async_context(opened(name, bootstrap, given.partitions)) for name in names]
        for side in sides:  # the broker, too, is slow until it is warm
            await side.answer(2000)
            await side.answer_one()
        for side in sides:
            side.forget()
        for _ in range(given.rounds):
            for side in sides:
                await side.answer(given.requests // given.rounds)
        for _ in range(given.singles):
            for side in sides:
                await side.answer_one()
    figures: dict[str, float] = {}
    for side in sides:
        figures |= side.figures()
    return figures


def show(figures: dict[str, float], names: Sequence[str]) -> None:
    if names:
        print(f"{'':12}{'requests/s':>12}{'CPU µs':>10}{'p50 ms':>10}{'p99 ms':>10}")
    for name in names:
        rps, cpu, p50, p99 = (figures[f"{name}_{what}"] for what in ("rps", "cpu_us", "p50_ms", "p99_ms"))
        print(f"{name:12}{rps:12.0f}{cpu:10.0f}{p50:10.2f}{p99:10.2f}")
    if "real_engine_over_direct" in figures:
        print(f"real engine, from requests to results, over direct: {figures['real_engine_over_direct']:.3f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--singles", type=int, default=300)
    parser.add_argument("--partitions", type=int, default=12)
    parser.add_argument("--only", action="append", choices=PARTS, help="not all of it")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    parts = given.only or PARTS
    sides = [name for name in SIDES if name in parts]
    figures: dict[str, float] = {}
    with find_broker() as broker:
        if sides:
            figures |= asyncio.run(compare(broker.bootstrap, sides, given))
        if "engine" in parts:
            figures |= asyncio.run(bus_engine.measure(broker.bootstrap, pairs=5))
    show(figures, sides)
    if given.json:
        given.json.write_text(json.dumps({"figures": figures}, indent=2))


if __name__ == "__main__":
    main()
