"""``python -m tests.chaos``: producers at a steady rate, three workers, random faults; then everything is counted.

Exits 1 when a result is lost, repeated, by a wrong model, not asked for, or failed without a reason.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.structs import ConsumerRecord

from deploy.local.broker import LocalBroker
from schemas.base import Outgoing
from schemas.codec import encode_control, encode_request
from schemas.control import Cancel, Control, Switch
from service.bus.topics import ensure_topics
from service.settings import load
from tests.chaos.check import Asked, judge, recovery_s
from tests.chaos.plan import Fault, Kind, plan
from tests.chaos.workers import Workers
from tests.support.fake_engine import POISON

ALIASES = ("llama", "qwen")
SESSION_TIMEOUT_S = 10.0
SETTLE_WITHIN_S = 180.0
JUDGED = ("lost", "repeated", "unasked", "wrong_model", "failed", "blamed")


class Run:
    """One chaos run, from an empty broker to a verdict."""

    def __init__(self, given: argparse.Namespace, broker: LocalBroker, folder: Path) -> None:
        self.given = given
        self.broker = broker
        self.folder = folder
        self.dice = random.Random(given.seed)
        self.asked: dict[str, Asked] = {}
        self.deaths: list[float] = []
        self.absences: list[tuple[float, float]] = []
        """When the broker was away."""
        prefix = f"chaos-{uuid.uuid4().hex[:6]}"
        self.values = {
            "bootstrap_servers": broker.bootstrap,
            "topic_prefix": f"{prefix}-",
            "group_id": prefix,
            "request_partitions": "6",
            "result_partitions": "6",
            "session_timeout_s": str(SESSION_TIMEOUT_S),
            "rebalance_timeout_s": "20",
            "shutdown_timeout_s": "5",
            "hold_s": "1",
            "log_level": "info",
        }
        self.settings = load(**self.values)
        self.topics = self.settings.topics
        self.one_restart = asyncio.Lock()
        self.workers = Workers(count=given.workers, folder=folder, aliases=ALIASES, settings=self.values)

    async def __call__(self) -> dict[str, Any]:
        await ensure_topics(self.settings, list(ALIASES))
        over_s = self.given.requests / self.given.rate
        kinds = frozenset(Kind(kind) for kind in self.given.kinds.split(",")) if self.given.kinds else frozenset(Kind)
        faults = plan(
            seed=self.given.seed,
            faults=self.given.faults,
            over_s=over_s,
            workers=self.given.workers,
            kinds=kinds,
        )
        async with self.workers:
            await self._wait_until_served()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._produce())
                tasks.create_task(self._wreck(faults))
            await self._wait_for_results()
        records = await self._results()
        verdict = judge(self.asked, records)
        return {
            "sent": verdict.sent,
            "results": verdict.results,
            "lost": len(verdict.lost),
            "repeated": len(verdict.repeated),
            "wrong_model": len(verdict.wrong_model),
            "unasked": len(verdict.unasked),
            "failed": len(verdict.failed),
            "blamed": len(verdict.blamed),
            "outcomes": dict(verdict.outcomes),
            "faults": len(faults),
            "worker_ends": self.workers.deaths,
            **self._recoveries(records),
            "good": verdict.good,
            "examples": {name: getattr(verdict, name)[:5] for name in JUDGED},
        }

    def _recoveries(self, records: Sequence[ConsumerRecord]) -> dict[str, float]:
        """The longest recovery from a SIGKILL; those that the broker's absence lengthened are apart."""
        longest = {"recovery_max_s": 0.0, "recovery_without_broker_max_s": 0.0}
        for death in self.deaths:
            took = recovery_s(self.asked, records, death)
            overlaps = any(began < death + took and death < ended + SESSION_TIMEOUT_S for began, ended in self.absences)
            name = "recovery_without_broker_max_s" if overlaps else "recovery_max_s"
            longest[name] = max(longest[name], round(took, 2))
        return longest

    # --- producing ---

    async def _produce(self) -> None:
        began = time.time()
        async with self._producer() as producer:
            pending: set[asyncio.Future[Any]] = set()
            for n in range(self.given.requests):
                if (early := began + n / self.given.rate - time.time()) > 0:
                    await asyncio.sleep(early)
                pending.add(await self._ask(producer))
                pending = {future for future in pending if not future.done()}
            await asyncio.gather(*pending)

    async def _ask(self, producer: AIOKafkaProducer, *, fatal: bool = False) -> "asyncio.Future[Any]":
        id_ = uuid.UUID(int=self.dice.getrandbits(128)).hex
        model = self.dice.choice(ALIASES)
        content = f"{POISON} {id_}" if fatal else f"request {id_}"
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.dice.randint(1, 20),
        }
        self.asked[id_] = Asked(model=model, at=time.time(), fatal=fatal)
        record = encode_request(self.topics.named(self.topics.requests), body, id_=id_)
        return await _send(producer, record)

    def _producer(self) -> AIOKafkaProducer:
        return AIOKafkaProducer(bootstrap_servers=self.broker.bootstrap, enable_idempotence=True)

    # --- wrecking ---

    async def _wreck(self, faults: Sequence[Fault]) -> None:
        began = time.time()
        async with self._producer() as producer, asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(max(0.0, began + fault.at_s - time.time()))
                print(f"{time.time() - began:7.1f} s  {fault.kind} {fault.worker}", flush=True)
                tasks.create_task(self._do(fault, producer))

    async def _do(self, fault: Fault, producer: AIOKafkaProducer) -> None:
        match fault.kind:
            case Kind.SIGKILL:
                self.deaths.append(time.time())
                self.workers.send(fault.worker, signal.SIGKILL)
            case Kind.SIGSTOP:
                self.workers.send(fault.worker, signal.SIGSTOP)
                await asyncio.sleep(SESSION_TIMEOUT_S + 3)
                self.workers.send(fault.worker, signal.SIGCONT)
            case Kind.LEAVE:
                self.workers.send(fault.worker, signal.SIGTERM)
            case Kind.ENGINE:
                await (await self._ask(producer, fatal=True))
            case Kind.BROKER:
                async with self.one_restart:
                    began = time.time()
                    await asyncio.to_thread(self.broker.restart)
                    self.absences.append((began, time.time()))
            case Kind.SWITCH:
                await self._control(producer, Switch(model=self.dice.choice(ALIASES)))
            case Kind.CANCEL:
                recent = [id_ for id_, request in list(self.asked.items())[-50:] if not request.fatal]
                if recent:
                    await self._control(producer, Cancel(request=self.dice.choice(recent)))

    async def _control(self, producer: AIOKafkaProducer, event: Control) -> None:
        await (await _send(producer, encode_control(self.topics.named(self.topics.control), event)))

    # --- watching ---

    async def _wait_until_served(self) -> None:
        """One request through, so that the clock starts when somebody serves."""
        async with self._producer() as producer:
            await (await self._ask(producer))
        await self._wait_for_results()

    async def _wait_for_results(self) -> None:
        """Until the results are as many as the requests and stay so, or too long."""
        deadline = time.time() + SETTLE_WITHIN_S
        while time.time() < deadline:
            if len({record.key for record in await self._results()}) >= len(self.asked):
                return
            await asyncio.sleep(1)

    async def _results(self) -> list[ConsumerRecord]:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.broker.bootstrap,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        await consumer.start()
        try:
            topic = self.topics.named(self.topics.results)
            partitions = [TopicPartition(topic, n) for n in range(self.topics.result_partitions)]
            consumer.assign(partitions)
            ends = await consumer.end_offsets(partitions)
            records: list[ConsumerRecord] = []
            while any([await consumer.position(one) < ends[one] for one in partitions]):
                for batch in (await consumer.getmany(timeout_ms=200)).values():
                    records.extend(batch)
            return records
        finally:
            await consumer.stop()


async def _send(producer: AIOKafkaProducer, record: Outgoing) -> "asyncio.Future[Any]":
    return await producer.send(record.topic, record.value, record.key, headers=list(record.headers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=80.0, help="requests per second")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kinds", default="", help="only these kinds of fault, separated by commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="a folder for the workers' logs; a temporary one otherwise")
    given = parser.parse_args()
    folder = given.logs or Path(tempfile.mkdtemp(prefix="gearshift-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    with LocalBroker() as broker:
        figures = asyncio.run(Run(given, broker, folder)())
    print(json.dumps(figures, indent=2))
    if given.json:
        given.json.write_text(json.dumps({"figures": figures}, indent=2))
    if not figures["good"]:
        print(f"the workers' logs are in {folder}")
    return 0 if figures["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
