"""Doing what the plan has in store: to the workers, to the brokers, and on the topics."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from deploy.local.cluster import LocalCluster
from schemas.control import Cancel, Control, Switch
from schemas.marks import Keys
from service.kafka.control import outgoing
from service.settings import Settings
from tests.chaos.asking import ALIASES, Asking, send
from tests.chaos.check import Strange
from tests.chaos.hostile import shapes
from tests.chaos.plan import Fault, Kind
from tests.chaos.shape import ASKING, Role, Seen, Shape
from tests.support.raw_producer import RawProducer
from tests.support.workers import Workers

POISON_WITHIN_S = 30.0
"""In which a poisonous request has killed its three engines."""
HELD_S = 6.0
"""How long a switch of Kind.HOLD stands."""
BROKER_AWAY_S = 8.0
"""How long a killed broker stays away."""


class Wrecker:
    """Does faults, and notes what each of them explains."""

    def __init__(
        self,
        *,
        settings: Settings,
        cluster: LocalCluster,
        workers: Workers,
        asking: Asking,
        keys: Keys,
        seed: int,
        largest: float,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._workers = workers
        self._asking = asking
        self._dice = random.Random(seed)
        self._keys = keys
        self._largest = largest
        self._brokers_alone = asyncio.Lock()
        self.deaths: list[float] = []
        self.disturbances: list[tuple[Kind, float, float]] = []
        """From when to when a worker, a broker or a model's turn was away."""
        self.strange: dict[str, Strange] = {}
        """The hostile requests, by their origins."""
        self.hostile: Counter[str] = Counter()
        """Hostile records that were written, by what their topic is for."""
        self.refused: Counter[str] = Counter()
        """Batches that the broker would not take, by shape."""

    async def all(self, faults: Sequence[Fault]) -> None:
        """Each at its time."""
        began = time.time()
        async with self._asking.producer() as producer, asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(max(0.0, began + fault.at_s - time.time()))
                print(f"{time.time() - began:7.1f} s  {fault.kind} {fault.worker}", flush=True)
                tasks.create_task(self._do(fault, producer))

    async def _do(self, fault: Fault, producer: AIOKafkaProducer) -> None:
        began = time.time()
        session_s = self._settings.worker.session_timeout_s
        match fault.kind:
            case Kind.SIGKILL:
                self.deaths.append(began)
                self._workers.kill(fault.worker, back_after_s=fault.back_after_s)
            case Kind.SIGSTOP:
                self._workers.send(fault.worker, signal.SIGSTOP)
                await asyncio.sleep(session_s + 3)
                self._workers.send(fault.worker, signal.SIGCONT)
                self._disturbed(Kind.SIGSTOP, began, time.time() + session_s)
            case Kind.LEAVE:
                self._workers.send(fault.worker, signal.SIGTERM)
            case Kind.ENGINE:
                await (await self._asking.ask(producer, fatal=True))
                self._disturbed(Kind.ENGINE, began, began + POISON_WITHIN_S)
            case Kind.BROKER | Kind.BROKER_KILL:
                await self._take_a_broker_away(fault)
                self._disturbed(fault.kind, began, time.time() + session_s)
            case Kind.SWITCH:
                await self._control(producer, Switch(model=self._dice.choice(ALIASES)))
            case Kind.HOLD:
                await self._control(producer, Switch(model=self._dice.choice(ALIASES), hold=HELD_S))
                self._disturbed(Kind.HOLD, began, began + HELD_S + session_s)
            case Kind.CANCEL:
                if unlucky := self._asking.recent():
                    self._asking.asked[unlucky].cancelled = True
                    await self._control(producer, Cancel(request=unlucky))
            case Kind.HOSTILE:
                async with self._brokers_alone:
                    await self._write_everything_strange()

    async def _take_a_broker_away(self, fault: Fault) -> None:
        """One at a time, and not while a stranger writes, who could not tell what was written."""
        async with self._brokers_alone:
            broker = self._dice.choice(self._cluster.brokers)
            if fault.kind is Kind.BROKER:
                await asyncio.to_thread(broker.stop)
            else:
                await asyncio.to_thread(broker.kill)
                await asyncio.sleep(BROKER_AWAY_S)
            await asyncio.to_thread(broker.start)

    async def _write_everything_strange(self) -> None:
        topics = self._settings.topics
        roles = {
            topics.requests: Role.REQUESTS,
            **{f"{topics.requests}.{alias}": Role.REQUESTS_OF_ONE for alias in ALIASES},
            topics.throttled: Role.THROTTLED,
            topics.control: Role.CONTROL,
            topics.commands: Role.COMMANDS,
            topics.workers: Role.WORKERS,
            topics.ledgers: Role.LEDGERS,
            topics.progress: Role.PROGRESS,
            topics.results: Role.RESULTS,
            topics.chunks: Role.CHUNKS,
            topics.dead_letters: Role.DEAD_LETTERS,
            topics.status: Role.STATUS,
            topics.calls: Role.CALLS,
            topics.answers: Role.ANSWERS,
            topics.usage: Role.USAGE,
            topics.files: Role.FILES,
            topics.batches: Role.BATCHES,
        }
        of = tuple(filter(None, (self._asking.recent() for _ in range(5)))) or ("nobody",)
        asking = [topics.named(topic) for topic, role in roles.items() if role in ASKING]
        async with RawProducer(self._cluster.bootstrap) as producer:
            ids = {name: await producer.topic_id(name) for name in asking}
            seen = Seen(topics.topic_prefix, self._settings.worker.group_id, self._workers.ids, of, ids)
            for topic, role in roles.items():
                for shape in shapes(role, seen):
                    await self._write(producer, topics.named(topic), role, shape)

    async def _write(self, producer: RawProducer, topic: str, role: Role, shape: Shape) -> None:
        batch = await asyncio.to_thread(lambda: shape.batch)
        if len(batch) > self._largest and role is not Role.REQUESTS:
            return
        partition = self._dice.choice(await producer.partitions(topic))
        try:
            first = await producer.send(topic, partition, batch)
        except KafkaError as error:
            self.refused[f"{role.name}: {shape.name}: {type(error).__name__}"] += 1
            return
        self.hostile[role.name] += len(shape.records)
        if role in ASKING:
            one = Strange(shape.name, shape.answered, once=role is Role.CALLS)
            self.strange |= {f"{topic}/{partition}/{first + n}": one for n in range(len(shape.records))}

    def _disturbed(self, kind: Kind, began: float, ended: float) -> None:
        self.disturbances.append((kind, began, ended))

    async def _control(self, producer: AIOKafkaProducer, event: Control) -> None:
        await (await send(producer, outgoing(event, self._settings.topics, self._keys)))
