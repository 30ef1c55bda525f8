"""A topic's id where the broker has none, where it knows of no such topic, and where no broker is known."""

import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import (
    IncompatibleBrokerVersion,
    KafkaConnectionError,
    KafkaError,
    NodeNotReadyError,
    UnknownTopicOrPartitionError,
)
from aiokafka.structs import BrokerMetadata

from service.consumer.protocol import topic_id

ID = uuid.UUID(int=7)


class Answering:
    """A client whose brokers say this of any topic, each its own."""

    def __init__(self, *answers: tuple[int, uuid.UUID] | KafkaError) -> None:
        self._answers = answers
        self.cluster = self
        self.asked: set[int] = set()

    def brokers(self) -> list[BrokerMetadata]:
        return [BrokerMetadata(node, "here", 9092, None) for node in range(len(self._answers))]

    async def send(self, node: int, _request: Any) -> Any:
        self.asked.add(node)
        answer = self._answers[node]
        if isinstance(answer, KafkaError):
            raise answer
        code, found = answer
        return SimpleNamespace(topics=[(code, "requests", found, False, [], 0, {})])


async def test_it_is_what_the_broker_says_and_none_of_one_that_is_too_old() -> None:
    assert await topic_id(Answering((0, ID)), "requests") == str(ID)
    assert await topic_id(Answering(IncompatibleBrokerVersion("too old")), "requests") is None


@pytest.mark.parametrize(
    ("client", "error"),
    [
        (Answering((3, uuid.UUID(int=0))), UnknownTopicOrPartitionError),
        (Answering(NodeNotReadyError("away")), NodeNotReadyError),
        (Answering(), NodeNotReadyError),
    ],
)
async def test_what_is_not_known_is_an_error_and_no_id(client: Answering, error: type[KafkaError]) -> None:
    with pytest.raises(error):
        await topic_id(client, "requests")


async def test_brokers_that_have_gone_are_passed_over() -> None:
    for _ in range(30):
        client = Answering(NodeNotReadyError("away"), KafkaConnectionError("away"), (0, ID))
        assert await topic_id(client, "requests") == str(ID)
        assert 2 in client.asked
    gone = Answering(NodeNotReadyError("away"), NodeNotReadyError("away"))
    with pytest.raises(NodeNotReadyError, match="away"):
        await topic_id(gone, "requests")
    assert gone.asked == {0, 1}
