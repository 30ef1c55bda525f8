"""What brokers do to a worker: they are away, come back, hand partitions over, refuse. On brokers of our own."""

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import UnknownError

from deploy.local.broker import LocalBroker, free_port
from deploy.local.models import write_models_file
from schemas.base import Outgoing, Record
from schemas.codec import decode_status
from schemas.errors import FailureClass
from schemas.results import Outcome
from schemas.status import Status, StatusState
from service.client import Client
from service.consumer.ledgers_topic import LedgersTopic
from service.consumer.positions import Positions
from service.consumer.requests import RequestConsumer
from service.consumer.transactions import OutcomeUnknown, PartitionTransactions
from service.errors import BrokerUnavailable, RequestFailed, Stalled, TopicError
from service.kafka.announcements import Announcer
from service.kafka.producer import IdempotentProducer
from service.kafka.reader import TopicReader
from service.kafka.topics import ensure_topics
from service.ports import Delivery
from service.settings import Settings
from tests.support.acls import AUTHORIZER, Acl, allow_only
from tests.support.bus import Bus, Member, deliveries, until
from tests.support.fenced_broker import fenced_at_first
from tests.support.flow import Flow
from tests.support.pool import serving, settings_for
from tests.support.process import options_of, started, working
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker
HELLO = [{"role": "user", "content": "hello"}]
LINES_A_MINUTE = 180
"""The most that a worker's log may grow by while no broker answers."""
REPLICATED = {
    "default.replication.factor": "2",
    "offsets.topic.replication.factor": "2",
    "transaction.state.log.replication.factor": "2",
    "min.insync.replicas": "1",
}


@pytest.fixture(scope="module")
def own_broker() -> Iterator[LocalBroker]:
    if reason := LocalBroker.missing():
        pytest.skip(f"needs a broker that may be stopped: {reason}")
    with LocalBroker(AUTHORIZER, say=lambda _line: None) as own:
        yield own


@pytest.fixture
def settings(own_broker: LocalBroker) -> Settings:
    return settings_for(own_broker.bootstrap)


@asynccontextmanager
async def admin_of(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


# --- away ---------------------------------------------------------------------------------------------------------


async def test_a_broker_that_is_away_at_the_start_is_named() -> None:
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
        async with Bus("127.0.0.1:1").intake():
            pass


async def test_a_worker_waits_for_a_broker_that_comes_late_and_says_so(
    own_broker: LocalBroker, settings: Settings
) -> None:
    await asyncio.to_thread(own_broker.stop)
    async with started(*options_of(settings)) as worker:
        line = await worker.until("broker.awaited")
        assert line["broker"] == own_broker.bootstrap
        assert "Connection refused" in line["reason"]
        await asyncio.to_thread(own_broker.start)
        await worker.until("worker.ready")
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.ended() == 0


async def test_a_worker_that_starts_while_the_only_broker_is_fenced_waits_for_it(own_broker: LocalBroker) -> None:
    """The machine stood still for longer than the broker's session: what is asked then names no broker."""
    async with (
        fenced_at_first(own_broker.bootstrap) as address,
        serving(settings_for(address)) as settings,
        Client(settings=settings) as client,
    ):
        assert await client.chat(model="llama", messages=HELLO, max_tokens=3)


async def test_statuses_do_not_wait_for_each_other_while_a_broker_takes_its_time(
    own_broker: LocalBroker, settings: Settings
) -> None:
    """One round trip each would make a worker that switches often tell of it minutes later."""
    await ensure_topics(settings, [])
    said = [Status(worker="w", state=StatusState.COMPLETED, kind="switch", at=n) for n in range(1000)]
    async with Announcer(settings=settings) as announcer:
        await announcer.status(said[0])
        (node,) = psutil.Process(own_broker.pid).children()
        node.suspend()
        try:
            for status in said[1:]:
                await announcer.status(status)
        finally:
            node.resume()
    async with TopicReader(kafka=settings.kafka, topics=[settings.topics.named("status")]) as tail:
        assert [decode_status(record).at for record in [one async for one in tail.backlog()]] == list(range(1000))


async def test_a_record_is_not_refused_for_a_topic_that_nobody_could_be_asked_for(
    own_broker: LocalBroker, settings: Settings
) -> None:
    """One that has come since it last asked for those that there are. Where it has just asked, the record is on its way
    instead, and is perhaps written once the broker goes on.
    """
    topics = settings_for(own_broker.bootstrap).topics
    later = Outgoing(topics.named("status"), b"k", b"v")
    impatient = settings.kafka.model_copy(update={"request_timeout_s": 1.0})
    async with IdempotentProducer(kafka=impatient, max_record_bytes=1 << 20, within_s=5) as outlet:
        await outlet.send(Outgoing(settings.topics.named("status"), b"k", b"v"))
        await ensure_topics(settings.model_copy(update={"topics": topics}), [])
        (node,) = psutil.Process(own_broker.pid).children()
        node.suspend()
        try:
            with pytest.raises(BrokerUnavailable, match=later.topic):
                await outlet.send(later)
        finally:
            node.resume()
    async with IdempotentProducer(kafka=settings.kafka, max_record_bytes=1 << 20, within_s=60) as outlet:
        assert (await outlet.send(later)).offset in {0, 1}


async def test_nothing_is_lost_or_repeated_when_the_broker_restarts_while_serving(own_broker: LocalBroker) -> None:
    bus = await Bus(own_broker.bootstrap).create()
    origins = await bus.produce(*(f"before {n}" for n in range(200)))
    member = Member(bus, "one")
    away = asyncio.Event()

    async def wait_for_the_broker_to_be_away(_delivery: object) -> None:
        if len(member.settled) > 50:
            await away.wait()

    member.hold = wait_for_the_broker_to_be_away
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(member.run())
        await until(lambda: len(member.settled) > 50)
        await asyncio.to_thread(own_broker.stop)
        away.set()
        await asyncio.to_thread(own_broker.start)
        origins += await bus.produce(*(f"after {n}" for n in range(50)))
        await until(lambda: len(member.settled) + len(member.refused) >= len(origins))
        member.stop()
    assert await bus.answered() == {str(origin): 1 for origin in origins}


async def disconnected(probes: httpx.AsyncClient) -> bool:
    state: str = (await probes.get("/health")).json()["state"]
    return state == "disconnected"


async def kept(probes: httpx.AsyncClient) -> list[str]:
    """Since when its engine is there, and what it holds in which tier, as its metrics say."""
    lines = (await probes.get("/metrics")).text.splitlines()
    return [line for line in lines if line.startswith(("gearshift_start_time_seconds ", "gearshift_context_tier{"))]


async def is_ready(probes: httpx.AsyncClient) -> bool:
    return (await probes.get("/ready")).status_code == 200


async def all_is_committed(settings: Settings) -> bool:
    async with Positions(settings=settings) as positions:
        return not any(position.lag for position in await positions.show())


@pytest.fixture
def real_models(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """A models.yaml where a test wants a real engine; None: the fake one will do."""
    if not request.param:
        return None
    return write_models_file(tmp_path / "models.yaml", request.getfixturevalue("models"), default="llama")


FOR_LONG = [pytest.mark.long, pytest.mark.timeout(1300)]


@pytest.mark.parametrize(
    ("minutes", "real_models"),
    [(0.4, False), pytest.param(10, False, marks=FOR_LONG), pytest.param(10, True, marks=FOR_LONG)],
    ids=["moments", "ten-minutes", "ten-minutes-of-a-real-engine"],
    indirect=["real_models"],
)
async def test_a_worker_without_a_broker_is_alive_and_not_ready_and_goes_on_when_there_is_one(
    own_broker: LocalBroker, settings: Settings, minutes: float, real_models: Path | None
) -> None:
    """Nothing is being committed when the broker goes: one that is alone may forget how a transaction ended (4.3)."""
    await ensure_topics(settings, ["llama", "qwen"])
    port = free_port()
    probes = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)
    stall_s = 6 if real_models is None else 60
    given = {"stall_after_s": stall_s, "exit_after_stall_s": 2.5 * stall_s, "http_port": port}
    async with working(settings, models=real_models, **given) as worker, probes:
        pid = worker.pid
        async with Flow(settings) as before:
            await before.answered(50)
            assert await before.answers() == before.once_each()
        await until(lambda: all_is_committed(settings))
        models = await kept(probes)
        await asyncio.to_thread(own_broker.stop)
        try:
            until_back, said_before = time.monotonic() + 60 * minutes, len(worker.process.lines)
            await until(lambda: worker.said("bus.brokers_away") != [], within_s=60 + stall_s)
            await until(lambda: disconnected(probes))
            while time.monotonic() < until_back:
                alive, ready = await probes.get("/health"), await probes.get("/ready")
                assert (alive.status_code, ready.status_code) == (200, 503), alive.text
                assert "no broker has answered for" in alive.json()["trouble"]
                await asyncio.sleep(1)
            said = len(worker.process.lines) - said_before
        finally:
            await asyncio.to_thread(own_broker.start)
        assert said <= 60 + LINES_A_MINUTE * minutes, "it says that it is away, and fills no disk"
        async with Flow(settings) as after:
            await after.more(within_s=90)
            answers = await after.answers()
            assert {id_: answers[id_] for id_ in after.asked} == after.once_each()
        await until(lambda: is_ready(probes))
        assert (worker.pid, await kept(probes)) == (pid, models)
        worker.process.process.send_signal(signal.SIGTERM)
        assert await worker.process.process.wait() == 0


# --- moving -------------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_nothing_is_lost_or_repeated_when_leaders_move() -> None:
    if reason := LocalBroker.missing():
        pytest.skip(f"needs brokers that may be stopped: {reason}")
    with ExitStack() as stack:
        first = await asyncio.to_thread(stack.enter_context, LocalBroker(REPLICATED, say=lambda _line: None))
        second = LocalBroker(REPLICATED, join=first, say=lambda _line: None)
        await asyncio.to_thread(stack.enter_context, second)
        both = settings_for(f"{first.bootstrap},{second.bootstrap}", replication_factor=2, session_timeout_s=10)
        async with serving(both, step_s=0.001), Flow(both) as flow:
            await flow.answered(50)
            assert await leaders(first, both) == {1, 2}
            async with admin_of(first.bootstrap) as admin:
                await admin.create_topics([NewTopic("of-one", -1, -1, replica_assignments={0: [2]})])
            for take_away in (second.stop, second.kill):
                await asyncio.to_thread(take_away)
                await flow.more(within_s=90)
                assert await leaders(first, both) == {1}
                await nothing_is_begun_without_a_leader(both)
                await asyncio.to_thread(second.start)
                await flow.more(within_s=90)
            assert await flow.answers() == flow.once_each()


async def nothing_is_begun_without_a_leader(settings: Settings) -> None:
    """Whoever has nothing to do with that partition would wait for the transaction's end."""
    worker = settings.worker.model_copy(update={"group_id": "another"})
    another = settings.model_copy(update={"worker": worker})
    partition = TopicPartition(settings.topics.named(settings.topics.requests), 0)
    ledgers = LedgersTopic(settings=another)
    transactions = PartitionTransactions(settings=another, partition=partition, ledgers_topic=ledgers)
    await transactions.fence()
    with pytest.raises(OutcomeUnknown, match="of-one/0 has no leader"):
        await transactions.commit([Outgoing(topic="of-one", key=None, value=b"x")], 0, "")
    await transactions.close()


async def leaders(broker: LocalBroker, settings: Settings) -> set[int]:
    """Who leads the partitions of requests and results."""
    topics = settings.topics
    async with admin_of(broker.bootstrap) as admin:
        described = await admin.describe_topics([topics.named(topics.requests), topics.named(topics.results)])
    return {partition["leader"] for topic in described for partition in topic["partitions"]}


# --- refusing -----------------------------------------------------------------------------------------------------


async def test_topics_that_are_missing_and_may_not_be_created_end_the_start_with_the_commands(
    settings: Settings,
) -> None:
    forbidden = settings.model_copy(update={"topics": settings.topics.model_copy(update={"create_topics": False})})
    with pytest.raises(BaseExceptionGroup) as caught:
        async with serving(forbidden):
            pass
    assert caught.group_contains(TopicError, match="kafka-topics.sh .* --create")


async def test_a_result_too_large_for_the_broker_fails_alone(own_broker: LocalBroker, settings: Settings) -> None:
    small = {"max.message.bytes": "3000"}
    async with admin_of(own_broker.bootstrap) as admin:
        results = settings.topics.named(settings.topics.results)
        await admin.create_topics([NewTopic(results, 1, 1, topic_configs=small)])
    async with serving(settings), Client(settings=settings) as client:
        asked = [client.chat(model="llama", messages=HELLO, max_tokens=600 if n == 5 else 5) for n in range(10)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
    failed = answers.pop(5)
    assert isinstance(failed, RequestFailed)
    assert (failed.result.outcome, failed.result.failure) == (Outcome.FAILED, FailureClass.TOO_LARGE)
    assert [str(answer.choices[0].message.content).split()[-1] for answer in answers] == ["llama4"] * 9


@pytest.mark.parametrize(
    ("what", "allowed", "error", "named"),
    [
        ("results", ("describe", "read"), Stalled, "refuses every result of .*: .*results"),
        ("requests", ("describe", "write"), BrokerUnavailable, "reading requests: .*TopicAuthorization"),
        ("transactions", ("describe",), Stalled, "not taken over .*uthoriz"),
        ("group", ("describe",), BrokerUnavailable, "GroupAuthorization"),
    ],
)
async def test_a_worker_that_may_not_do_its_work_ends_and_names_what(
    own_broker: LocalBroker, what: str, allowed: tuple[str, ...], error: type[Exception], named: str
) -> None:
    settings = settings_for(own_broker.bootstrap, stall_after_s=1, exit_after_stall_s=8)
    topics, group = settings.topics, settings.worker.group_id
    await ensure_topics(settings, ["llama", "qwen"])
    acl = {
        "results": Acl.topic(topics.named(topics.results), *allowed),
        "requests": Acl.topic(topics.named(topics.requests), *allowed),
        "transactions": Acl.transactions(group, *allowed),
        "group": Acl.group(group, *allowed),
    }[what]
    await allow_only(own_broker.bootstrap, acl)
    with pytest.raises(BaseExceptionGroup) as caught:
        await serve_to_the_end(settings)
    assert caught.group_contains(error, match=named)


async def serve_to_the_end(settings: Settings) -> None:
    """Serve one request, and on until the worker ends by itself."""
    async with asyncio.timeout(PATIENCE_S), serving(settings), Client(settings=settings) as client:
        await client.submit({"model": "llama", "messages": HELLO})
        await asyncio.Event().wait()


# --- stuck --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stuck_intake(bootstrap: str) -> AsyncIterator[tuple[Bus, RequestConsumer]]:
    """An intake that has one request in hand."""
    bus = await Bus(bootstrap).create()
    await bus.produce("request", partition=0)
    async with bus.intake() as intake:
        await deliveries(intake, 1)
        async with being_read(intake):
            await until(lambda: intake.state().stuck_s < 2)  # all of its partitions are taken over
        yield bus, intake


@asynccontextmanager
async def being_read(intake: RequestConsumer) -> AsyncIterator[None]:
    """Meanwhile its loop turns; to its end, for a turn is never cancelled."""
    enough = asyncio.Event()

    async def read() -> None:
        while not enough.is_set():
            await intake.receive()

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        enough.set()
        await asyncio.wait([reading])


async def complaint(intake: RequestConsumer, about: str, *, read: bool = True) -> str:
    """What has been stuck for three seconds, once that is about this: a slow machine has other reasons, too."""
    said: list[str] = []

    def complains() -> bool:
        state = intake.state()
        said[:] = [state.stuck]
        return state.stuck_s >= 3 and about in state.stuck

    async with being_read(intake) if read else nullcontext():
        await until(complains)
    return said[0]


@pytest.mark.long
async def test_brokers_that_stay_away_are_complained_of(own_broker: LocalBroker) -> None:
    async with stuck_intake(own_broker.bootstrap) as (_, intake):
        await asyncio.to_thread(own_broker.kill)
        try:
            assert await complaint(intake, "no broker") == "no broker answers a fetch"
        finally:
            await asyncio.to_thread(own_broker.start)


@pytest.mark.delicate
@pytest.mark.parametrize("asked", ["JoinGroupRequest", "SyncGroupRequest", "HeartbeatRequest"])
async def test_a_coordinator_without_a_quorum_ends_no_worker(
    own_broker: LocalBroker, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """It answers that something is unknown (-1). Seen with three brokers, one of them killed."""
    send = GroupCoordinator._send_req
    refused: list[str] = []
    refusing = True

    async def without_a_quorum(coordinator: GroupCoordinator, request: Any) -> Any:
        response = await send(coordinator, request)
        if refusing and type(request).__name__.startswith(asked):
            refused.append(asked)
            response.error_code = UnknownError.errno
        return response

    async with stuck_intake(own_broker.bootstrap) as (bus, intake):
        monkeypatch.setattr(GroupCoordinator, "_send_req", without_a_quorum)
        intake._consumer._coordinator.request_rejoin()
        if asked == "HeartbeatRequest":
            while len(refused) < 3:
                await intake.receive()
        else:
            assert "the group gives no assignment" in await complaint(intake, "assignment")
        refusing = False
        await bus.produce("after", partition=0)
        assert b"after" in {one.record.value for one in await deliveries(intake, 1)}


@pytest.mark.delicate
async def test_a_poll_loop_that_does_not_turn_is_complained_of(own_broker: LocalBroker) -> None:
    async with stuck_intake(own_broker.bootstrap) as (_, intake):
        assert "the poll loop does not turn" in await complaint(intake, "poll loop", read=False)


@pytest.mark.delicate
async def test_a_partition_with_lag_that_is_not_read_is_complained_of(own_broker: LocalBroker) -> None:
    async with stuck_intake(own_broker.bootstrap) as (bus, intake):
        here = TopicPartition(bus.requests, 0)
        intake._consumer.pause(here)
        await bus.produce("behind", partition=0)
        intake._consumer.seek(here, 2)  # as a consumer that lost its place
        intake._consumer.resume(here)
        assert "has lag and is not read" in await complaint(intake, "has lag")


async def test_a_partition_that_can_not_be_taken_over_is_complained_of_with_the_reason(own_broker: LocalBroker) -> None:
    bus = await Bus(own_broker.bootstrap).create()
    await allow_only(own_broker.bootstrap, Acl.transactions(bus.group, "describe"))
    async with bus.intake() as intake:
        assert re.search(r"is assigned and not taken over \(.*uthoriz", await complaint(intake, "taken over"))


async def test_what_has_moved_since_the_loop_turned_last_is_not_complained_of(own_broker: LocalBroker) -> None:
    async with stuck_intake(own_broker.bootstrap) as (bus, intake):
        writer = intake._owned.writers[TopicPartition(bus.requests, 0)]
        writer.ready = False
        await complaint(intake, "not taken over")
        writer.ready = True  # and nobody looks any more
        assert f"{bus.requests}/0" not in intake.state().stuck


async def test_transactions_that_never_succeed_are_complained_of_with_the_reason(own_broker: LocalBroker) -> None:
    async with stuck_intake(own_broker.bootstrap) as (bus, intake):
        writer = intake._owned.writers[TopicPartition(bus.requests, 0)]
        writer._transactions = Unanswered(writer._transactions)
        one = Delivery(Record(bus.requests, 0, 0, 0.0, None, b"x"))
        settling = asyncio.create_task(intake.settle(one.record.origin, bus.result(one)))
        assert await complaint(intake, "committed") == f"{bus.requests}/0 can't be committed to (no answer)"
        settling.cancel()


class Unanswered:
    """Real transactions whose commits are never answered; all the rest works."""

    def __init__(self, real: PartitionTransactions) -> None:
        self._real = real

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    async def commit(self, *_: object) -> None:
        raise OutcomeUnknown("no answer")
