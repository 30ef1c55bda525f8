"""``python -m tests.bench.bus``: this worker beside a bare transactional loop and FastStream, on one broker.

Each side runs in its own process, answers a backlog as fast as it can, and then single requests while it is idle.
``*_rps`` are results per second as a read_committed consumer sees them; ``worker_cpu_us`` is all CPU time of the
worker's process per request; latencies are from the producer's send to the consumer's sight, in milliseconds.
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
from dataclasses import dataclass
from pathlib import Path

import psutil
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

REQUEST = json.dumps({"model": "llama", "messages": [{"role": "user", "content": "Say ok " * 20}], "max_tokens": 1})


@dataclass(frozen=True)
class Figures:
    rps: float
    cpu_us: float
    p50_ms: float
    p99_ms: float


async def measure(name: str, bootstrap: str, *, requests: int, singles: int, partitions: int) -> Figures:
    prefix = f"bench-{uuid.uuid4().hex[:8]}-"
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    topics = [f"{prefix}requests", f"{prefix}results"]
    await admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics])
    try:
        async with (
            AIOKafkaProducer(bootstrap_servers=bootstrap, linger_ms=5) as loader,
            AIOKafkaProducer(bootstrap_servers=bootstrap) as producer,
            AIOKafkaConsumer(
                topics[1],
                bootstrap_servers=bootstrap,
                isolation_level="read_committed",
                auto_offset_reset="earliest",
                fetch_max_wait_ms=100,
            ) as results,
            running(name, bootstrap, prefix, partitions) as process,
        ):
            await answer(loader, results, topics[0], 2000)  # warm
            before = cpu_s(process)
            rate = await answer(loader, results, topics[0], requests)
            cpu = cpu_s(process) - before
            latencies = await alone(producer, results, topics[0], singles)
    finally:
        await admin.delete_topics([name for name in await admin.list_topics() if name.startswith(prefix)])
        await admin.close()
    latencies.sort()
    return Figures(rate, 1e6 * cpu / requests, statistics.median(latencies), latencies[int(0.99 * len(latencies))])


@contextlib.asynccontextmanager
async def running(name: str, bootstrap: str, prefix: str, partitions: int) -> AsyncIterator[psutil.Process]:
    """One of the three, until the block ends; yields once it serves."""
    values = {
        "bootstrap_servers": bootstrap,
        "topic_prefix": prefix,
        "group_id": prefix,
        "request_partitions": str(partitions),
        "result_partitions": str(partitions),
        "log_level": "warning",
    }
    commands = {
        "worker": [
            "tests.support.fake_worker",
            "--aliases=llama",
            *(f"--set={key}={value}" for key, value in values.items()),
        ],
        "bare": ["tests.bench.loops", "bare", f"--bootstrap={bootstrap}", f"--prefix={prefix}"],
        "faststream": ["tests.bench.loops", "faststream", f"--bootstrap={bootstrap}", f"--prefix={prefix}"],
    }
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GEARSHIFT_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *commands[name], env=environment, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def answer(producer: AIOKafkaProducer, results: AIOKafkaConsumer, topic: str, count: int) -> float:
    """Put a backlog there, and see its results come; how many per second."""
    sent = [await producer.send(topic, REQUEST.encode(), key=uuid.uuid4().bytes) for _ in range(count)]
    began = time.perf_counter()
    await asyncio.gather(*sent)
    seen = 0
    async with asyncio.timeout(120):
        while seen < count:
            seen += sum(map(len, (await results.getmany(timeout_ms=1000)).values()))
    return count / (time.perf_counter() - began)


async def alone(producer: AIOKafkaProducer, results: AIOKafkaConsumer, topic: str, count: int) -> list[float]:
    """One request after another; milliseconds of each."""
    latencies = []
    for _ in range(count):
        began = time.perf_counter()
        await producer.send(topic, REQUEST.encode(), key=uuid.uuid4().bytes)
        await results.getone()
        latencies.append(1e3 * (time.perf_counter() - began))
    return latencies


async def compare(given: argparse.Namespace) -> dict[str, float]:
    sides = {
        name: await measure(
            name, given.bootstrap, requests=given.requests, singles=given.singles, partitions=given.partitions
        )
        for name in given.only or ("worker", "bare", "faststream")
    }
    print(f"{'':12}{'requests/s':>12}{'CPU µs':>10}{'p50 ms':>10}{'p99 ms':>10}")
    for name, side in sides.items():
        print(f"{name:12}{side.rps:12.0f}{side.cpu_us:10.0f}{side.p50_ms:10.2f}{side.p99_ms:10.2f}")
    figures: dict[str, float] = {}
    for name, side in sides.items():
        figures |= {f"{name}_rps": side.rps, f"{name}_p50_ms": side.p50_ms, f"{name}_p99_ms": side.p99_ms}
        figures[f"{name}_cpu_us"] = side.cpu_us
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", default=os.environ.get("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:9092"))
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--singles", type=int, default=300)
    parser.add_argument("--partitions", type=int, default=12)
    parser.add_argument("--only", action="append", choices=["worker", "bare", "faststream"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    figures = asyncio.run(compare(given))
    if given.json:
        given.json.write_text(json.dumps({"figures": figures}, indent=2))


if __name__ == "__main__":
    main()
