"""The judge's reader, on a real broker: committed records, and nothing that was taken back or written by hand."""

import uuid

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from deploy.local.broker import Broker
from tests.chaos.mark import marked
from tests.chaos.reader import everything, reading
from tests.support.batches import Raw, bomb, of
from tests.support.raw_producer import RawProducer

pytestmark = pytest.mark.broker


@pytest.fixture
async def topic(broker: Broker) -> str:
    name = f"read-{uuid.uuid4().hex[:6]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(name, 2, 1)])
    await admin.close()
    return name


async def test_what_is_committed_is_read_and_what_was_taken_back_or_made_by_hand_is_not(
    broker: Broker, topic: str
) -> None:
    strange = marked(of(*[Raw(b"strange", b"k", [(b"\xff", None)])] * 3))
    large = marked(bomb(80 << 20, "zstd"))
    ours = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, transactional_id=topic)
    async with ours, RawProducer(broker.bootstrap) as raw:
        assert await raw.partitions(topic) == [0, 1]
        assert await raw.send(topic, 0, strange) == 0
        for n in range(6):
            await ours.begin_transaction()
            await ours.send_and_wait(topic, f"{n}".encode(), partition=n % 2)
            await (ours.abort_transaction() if n in {1, 2} else ours.commit_transaction())
            await raw.send(topic, n % 2, large if n == 3 else strange)
        found = await everything(broker.bootstrap, topic)
        assert sorted(record.value or b"" for record in found) == [b"0", b"3", b"4", b"5"]
        async with reading(broker.bootstrap, topic) as tail:
            while not tail.ended:
                await tail.more()
            await ours.begin_transaction()
            await ours.send_and_wait(topic, b"last", partition=0)
            assert await tail.more() == []
            assert not tail.ended
            await ours.commit_transaction()
            last = []
            while not tail.ended:
                last += await tail.more()
        assert [record.value for record in last] == [b"last"]


async def test_a_broker_refuses_a_batch_that_is_none(broker: Broker, topic: str) -> None:
    broken = bytearray(of(Raw(b"v", b"k")))
    broken[-1] ^= 1
    async with RawProducer(broker.bootstrap) as raw:
        with pytest.raises(KafkaError):
            await raw.send(topic, 0, bytes(broken))
