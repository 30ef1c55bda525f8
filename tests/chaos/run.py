"""One chaos run: producers at a steady rate, three workers, what the plan has in store for them, and a verdict."""

import asyncio
import json
import random
import signal
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.structs import ConsumerRecord

from deploy.local.broker import LocalBroker
from schemas.base import Outgoing
from schemas.codec import encode_control, encode_request
from schemas.control import Cancel, Control, Switch
from service.kafka.topics import ensure_topics
from service.settings import load
from tests.chaos.check import LATE_S, Asked, Recovery, judge, recovery
from tests.chaos.plan import Fault, Kind, plan
from tests.chaos.reader import everything, reading
from tests.chaos.workers import Workers
from tests.support.fake_engine import POISON

ALIASES = ("llama", "qwen")
SESSION_TIMEOUT_S = 10.0
SETTLE_WITHIN_S = 180.0
POISON_WITHIN_S = 30.0
"""In which a poisonous request has killed its three engines."""
HELD_S = 6.0
"""How long a switch of Kind.HOLD stands."""
JUDGED = ("lost", "repeated", "unasked", "wrong_model", "wrong")


@dataclass(frozen=True)
class Scale:
    requests: int
    faults: int
    seed: int
    rate: float
    workers: int
    kinds: frozenset[Kind]
    hold_s: float
    park_after_s: float


class Run:
    """From an empty broker to figures. ``folder`` is for the workers' logs."""

    def __init__(self, scale: Scale, broker: LocalBroker, folder: Path) -> None:
        self.scale = scale
        self.broker = broker
        self.folder = folder
        self.dice = random.Random(scale.seed)
        self.asked: dict[str, Asked] = {}
        self.deaths: list[float] = []
        self.disturbances: list[tuple[Kind, float, float]] = []
        """From when to when a worker, the broker or a model's turn was away."""
        prefix = f"chaos-{uuid.uuid4().hex[:6]}"
        values = {
            "bootstrap_servers": broker.bootstrap,
            "topic_prefix": f"{prefix}-",
            "group_id": prefix,
            "request_partitions": "6",
            "result_partitions": "6",
            "session_timeout_s": str(SESSION_TIMEOUT_S),
            "rebalance_timeout_s": "20",
            "shutdown_timeout_s": "5",
            "hold_s": str(scale.hold_s),
            "park_after_s": str(scale.park_after_s),
            "max_wait_s": str(LATE_S / 2),  # who waits longer than LATE_S is held up by a fault, not by the schedule
            "log_level": "info",
        }
        self.settings = load(**values)
        self.topics = self.settings.topics
        self.one_restart = asyncio.Lock()
        self.workers = Workers(count=scale.workers, folder=folder, aliases=ALIASES, settings=values)

    async def __call__(self) -> dict[str, Any]:
        await ensure_topics(self.settings, list(ALIASES))
        scale = self.scale
        faults = plan(
            seed=scale.seed,
            faults=scale.faults,
            over_s=scale.requests / scale.rate,
            workers=scale.workers,
            kinds=scale.kinds,
        )
        async with self.workers:
            await self._wait_until_served()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._produce())
                tasks.create_task(self._wreck(faults))
            await self._wait_for_results()
        return await self._figures(len(faults))

    async def _figures(self, faults: int) -> dict[str, Any]:
        bootstrap = self.broker.bootstrap
        results = await everything(bootstrap, self.topics.named(self.topics.results))
        dead = await everything(bootstrap, self.topics.named(self.topics.dead_letters))
        self._note(results)
        verdict = judge(self.asked, results, dead)
        recoveries = self._recoveries(results)
        return {
            "sent": verdict.sent,
            "results": verdict.results,
            **{name: len(getattr(verdict, name)) for name in JUDGED},
            "outcomes": dict(verdict.outcomes),
            "parked": sum([len(await everything(bootstrap, self.topics.for_alias(alias))) for alias in ALIASES]),
            "faults": faults,
            "worker_ends": self.workers.ends,
            "recovery_max_s": max((one.took_s for one in recoveries if not one.disturbed), default=0.0),
            "recovery_disturbed_max_s": max((one.took_s for one in recoveries if one.disturbed), default=0.0),
            "recoveries_s": [one.took_s for one in recoveries if not one.disturbed],
            "good": verdict.good,
            "examples": {name: getattr(verdict, name)[:5] for name in JUDGED},
        }

    def _note(self, results: Sequence[ConsumerRecord]) -> None:
        """When each request was asked and answered, beside the workers' logs: for whoever looks for a delay."""
        began = min(request.at for request in self.asked.values())
        with (self.folder / "answers.csv").open("w") as table:
            table.write("id,asked_s,answered_s,partition\n")
            for record in results:
                id_ = record.key.decode()
                if id_ in self.asked:
                    times = self.asked[id_].at - began, record.timestamp / 1000 - began
                    table.write(
                        f"{id_},{times[0]:.3f},{times[1]:.3f},{json.loads(record.value)['origin']['partition']}\n"
                    )

    def _recoveries(self, results: Sequence[ConsumerRecord]) -> list[Recovery]:
        away = [(began, ended) for _, began, ended in self.disturbances]
        away += [(death, death + 2 * SESSION_TIMEOUT_S) for death in self.deaths]
        return [recovery(self.asked, results, death, [one for one in away if one[0] != death]) for death in self.deaths]

    # --- producing ---

    async def _produce(self) -> None:
        began = time.time()
        async with self._producer() as producer:
            pending: set[asyncio.Future[Any]] = set()
            for n in range(self.scale.requests):
                if (early := began + n / self.scale.rate - time.time()) > 0:
                    await asyncio.sleep(early)
                pending.add(await self._ask(producer))
                pending = {future for future in pending if not future.done()}
            await asyncio.gather(*pending)

    async def _ask(self, producer: AIOKafkaProducer, *, fatal: bool = False) -> "asyncio.Future[Any]":
        id_ = uuid.UUID(int=self.dice.getrandbits(128)).hex
        model, words = self.dice.choice(ALIASES), self.dice.randint(1, 20)
        content = f"{POISON} {id_}" if fatal else f"request {id_}"
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": words}
        self.asked[id_] = Asked(model=model, at=time.time(), words=words, fatal=fatal)
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
        began = time.time()
        match fault.kind:
            case Kind.SIGKILL:
                self.deaths.append(began)
                self.workers.kill(fault.worker, back_after_s=fault.back_after_s)
            case Kind.SIGSTOP:
                self.workers.send(fault.worker, signal.SIGSTOP)
                await asyncio.sleep(SESSION_TIMEOUT_S + 3)
                self.workers.send(fault.worker, signal.SIGCONT)
                self._disturbed(Kind.SIGSTOP, began, time.time() + SESSION_TIMEOUT_S)
            case Kind.LEAVE:
                self.workers.send(fault.worker, signal.SIGTERM)
            case Kind.ENGINE:
                await (await self._ask(producer, fatal=True))
                self._disturbed(Kind.ENGINE, began, began + POISON_WITHIN_S)
            case Kind.BROKER:
                async with self.one_restart:
                    await asyncio.to_thread(self.broker.restart)
                self._disturbed(Kind.BROKER, began, time.time() + SESSION_TIMEOUT_S)
            case Kind.SWITCH:
                await self._control(producer, Switch(model=self.dice.choice(ALIASES)))
            case Kind.HOLD:
                await self._control(producer, Switch(model=self.dice.choice(ALIASES), hold=HELD_S))
                self._disturbed(Kind.HOLD, began, began + HELD_S + SESSION_TIMEOUT_S)
            case Kind.CANCEL:
                recent = [id_ for id_, request in list(self.asked.items())[-50:] if not request.fatal]
                if recent:
                    unlucky = self.dice.choice(recent)
                    self.asked[unlucky].cancelled = True
                    await self._control(producer, Cancel(request=unlucky))

    def _disturbed(self, kind: Kind, began: float, ended: float) -> None:
        self.disturbances.append((kind, began, ended))

    async def _control(self, producer: AIOKafkaProducer, event: Control) -> None:
        await (await _send(producer, encode_control(self.topics.named(self.topics.control), event)))

    # --- watching ---

    async def _wait_until_served(self) -> None:
        """One request through, so that the clock starts when somebody serves."""
        async with self._producer() as producer:
            await (await self._ask(producer))
        await self._wait_for_results()

    async def _wait_for_results(self) -> None:
        """Until as many requests are answered as were sent, or too long."""
        answered: set[bytes] = set()
        deadline = time.time() + SETTLE_WITHIN_S
        async with reading(self.broker.bootstrap, self.topics.named(self.topics.results)) as consumer:
            while len(answered) < len(self.asked) and time.time() < deadline:
                for batch in (await consumer.getmany(timeout_ms=500)).values():
                    answered.update(record.key for record in batch)


async def _send(producer: AIOKafkaProducer, record: Outgoing) -> "asyncio.Future[Any]":
    return await producer.send(record.topic, record.value, record.key, headers=list(record.headers))
