"""One specification of the tests' own broker, over every source of one. What this machine lacks is skipped, visibly."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from deploy.local.broker import SOURCES, Broker, LocalBroker, NotOurs, ensure_classes, is_whole, open_broker
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=list(SOURCES))
def source(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    reason = SOURCES[name]()
    if reason is not None:
        pytest.skip(f"broker source {name!r}: {reason}")
    return name


@pytest.fixture(scope="module")
def running(source: str) -> Iterator[Broker]:
    with open_broker(source) as broker:
        yield broker


async def written(broker: Broker, topic: str, value: bytes, **options: object) -> int:
    async with AIOKafkaProducer(bootstrap_servers=broker.bootstrap, max_request_size=16 << 20, **options) as producer:
        if "transactional_id" in options:
            async with producer.transaction():
                return (await producer.send_and_wait(topic, value, partition=0)).offset
        return (await producer.send_and_wait(topic, value, partition=0)).offset


async def read(broker: Broker, topic: str, number: int) -> list[bytes]:
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=broker.bootstrap,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        max_partition_fetch_bytes=16 << 20,
    )
    async with consumer:
        return [(await consumer.getone()).value for _ in range(number)]


async def with_topic(broker: Broker, topic: str, **configs: str) -> str:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        if topic not in await admin.list_topics():
            await admin.create_topics([NewTopic(topic, 1, 1, topic_configs=configs)])
    finally:
        await admin.close()
    return topic


async def test_what_is_written_is_read(running: Broker) -> None:
    topic = await with_topic(running, f"sources-{os.urandom(4).hex()}")
    await written(running, topic, b"one")
    await written(running, topic, b"two")
    assert await read(running, topic, 2) == [b"one", b"two"]


async def test_transactions_work(running: Broker) -> None:
    topic = await with_topic(running, f"sources-{os.urandom(4).hex()}")
    await written(running, topic, b"whole", transactional_id=topic)
    assert await read(running, topic, 1) == [b"whole"]


async def test_a_record_of_ten_mebibytes_passes(running: Broker, source: str) -> None:
    if source == "given":
        pytest.skip("the limits of a given broker are its owner's")
    topic = await with_topic(running, f"sources-{os.urandom(4).hex()}", **{"max.message.bytes": str(16 << 20)})
    await written(running, topic, bytes(10 << 20))
    assert [len(value) for value in await read(running, topic, 1)] == [10 << 20]


@pytest.mark.long
async def test_records_outlive_a_restart_and_a_kill_at_the_same_address(running: Broker, source: str) -> None:
    if source == "given":
        with pytest.raises(NotOurs):
            running.restart()
        return
    address = running.bootstrap
    topic = await with_topic(running, f"sources-{os.urandom(4).hex()}")
    await written(running, topic, b"before", acks="all")
    running.restart()
    await written(running, topic, b"between", acks="all")
    running.kill()
    running.start()
    assert running.bootstrap == address
    assert await read(running, topic, 2) == [b"before", b"between"]


@pytest.mark.long
def test_two_at_once_do_not_collide(source: str) -> None:
    if source == "given":
        pytest.skip("there is one given broker")
    with ExitStack() as stack:
        both = [stack.enter_context(open_broker(source)) for _ in range(2)]
        assert both[0].bootstrap != both[1].bootstrap


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_when_the_process_that_started_it_is_ended(source: str, number: signal.Signals) -> None:
    if source != "local":
        pytest.skip("a given broker stays; containers are their reaper's")
    program = (
        "from deploy.local.broker import open_broker\n"
        "import signal\n"
        "broker = open_broker('local'); broker.start()\n"
        "print('guard', broker.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as owner:
        assert owner.stdout is not None
        guard = psutil.Process(next(int(line.split()[1]) for line in owner.stdout if line.startswith("guard ")))
        everything = [guard, *guard.children(recursive=True)]
        assert len(everything) == 2, "the guard and Java"
        owner.send_signal(number)
    _, alive = psutil.wait_procs(everything, timeout=PATIENCE_S)
    assert alive == []


def test_a_machine_with_nothing_is_told_its_choices() -> None:
    program = (
        "from deploy.local.apache_kafka import NoBroker\n"
        "from deploy.local.broker import find_broker\n"
        "import sys\n"
        "try:\n    find_broker()\n"
        "except NoBroker as reason:\n    print(reason)\n    sys.exit(2)\n"
    )
    bare = {"PATH": "/nowhere", "GEARSHIFT_HOME": "/nowhere", "DOCKER_HOST": "unix:///nowhere"}
    told = subprocess.run([sys.executable, "-c", program], env=bare, capture_output=True, text=True, check=False)
    assert told.returncode == 2, told.stderr
    assert all(word in told.stdout for word in ("KAFKA_BOOTSTRAP_SERVERS", "Docker", "Maven"))


@pytest.mark.long
def test_kafkas_classes_are_read_once_for_all_brokers_that_start_later(tmp_path: Path) -> None:
    if reason := SOURCES["local"]():
        pytest.skip(reason)
    said: list[str] = []
    with LocalBroker(say=said.append) as broker:
        options = " ".join(broker.java_options)
        if not options:
            pytest.skip(f"{broker.java} has no class data sharing")
        archive = Path(options.removeprefix("-XX:SharedArchiveFile="))
        assert archive.stat().st_size > 1 << 20
        mapped = {Path(each.path) for java in psutil.Process(broker.pid).children() for each in java.memory_maps()}
        assert archive in mapped
        assert is_whole(archive, broker.java, broker.jars)
    for kept in (0, 100, 1 << 20, archive.stat().st_size - (1 << 16)):
        cut = tmp_path / f"{kept}.jsa"
        cut.write_bytes(archive.read_bytes()[:kept])
        assert not is_whole(cut, broker.java, broker.jars)
    again = LocalBroker(say=said.append)
    again.close()
    assert again.java_options == broker.java_options
    assert len(said) <= 1


def test_a_java_that_shares_no_classes_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one that PyPI has."""
    if reason := SOURCES["local"]():
        pytest.skip(reason)
    broker = LocalBroker()
    broker.close()
    (jars := tmp_path / "jars").symlink_to(broker.jars)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xshare:off")
    assert [ensure_classes(broker.java, jars, print) for _ in range(2)] == [[], []]
