"""What earlier owners said is found behind the fence, whatever transactions others have open in the same log."""

from collections.abc import Sequence

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition

from schemas.base import Outgoing
from schemas.progress import Begun, Part, Progress, Said
from service.consumer.ledger import Ledger
from service.consumer.progress_topic import PartitionProgress, ProgressTopic
from tests.support.bus import Bus

pytestmark = pytest.mark.broker


def said(count: int) -> Progress:
    begun = Begun(id="r", prompt="p", sequences=(Said(tokens=list(range(count))),))
    return Progress(call="c", engine="e", requests=(begun,))


SESSIONS = "5e" * 32, "0e" * 32


def come_to(parts: int) -> Progress:
    answered = tuple(Part(prompt=[part], said=[7]) for part in range(parts))
    return Progress(call="c", engine="e", parts=answered)


async def send(producer: AIOKafkaProducer, records: Sequence[Outgoing]) -> None:
    for record in records:
        await producer.send_and_wait(record.topic, record.value, record.key)


async def test_one_open_transaction_hides_nothing_that_was_committed_behind_it(bus: Bus) -> None:
    topic = ProgressTopic(settings=bus.all_settings())
    ours, others = (TopicPartition(bus.requests, number) for number in (0, 1))
    progress = PartitionProgress(topic, ours, most=1 << 20)

    ledger = Ledger()
    ledger.pick(5)
    ledger.finish(5)

    def producer(name: str) -> AIOKafkaProducer:
        return AIOKafkaProducer(bootstrap_servers=bus.bootstrap, transactional_id=f"{bus.group}/{name}")

    async with producer("open") as hanging, producer("ours") as owner:
        async with owner.transaction():
            await send(owner, [topic.record(ours, offset, said(1)) for offset in (3, 4, 5)])
            await send(owner, [topic.session(ours, each, come_to(1)) for each in SESSIONS])
        await hanging.begin_transaction()
        await send(hanging, [topic.record(others, 3, said(8))])
        async with owner.transaction():
            await send(owner, [topic.record(ours, 4, said(2)), topic.gone(ours, 5)])
            await send(owner, [topic.session(ours, SESSIONS[0], come_to(2))])
        await owner.begin_transaction()
        await send(owner, [topic.record(ours, 6, said(2)), topic.gone(ours, 3)])
        await send(owner, [topic.session(ours, SESSIONS[1], come_to(2))])
        await owner.abort_transaction()
        await progress.read(ledger)
        sessions = [progress.session(7 + part, name, part) for part, name in ((2, SESSIONS[0]), (1, SESSIONS[1]))]
        found = {offset: progress.take(offset) for offset in (3, 4, 5, 6)}
        await hanging.abort_transaction()
    assert found[4] == said(2)
    assert (found[3], found[5]) == (said(1), None), "whether a request is finished is the ledger's to say"
    assert found[6] == said(2), "aborted or not: its run said it"
    assert sessions == [come_to(2), come_to(1)], "of what may have been aborted, the part that is asked for tells"
