"""A topic's id where the broker has none, where it knows of no such topic, and where no broker is known."""

import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import IncompatibleBrokerVersion, KafkaError, NodeNotReadyError, UnknownTopicOrPartitionError

from service.consumer.protocol import topic_id

ID = uuid.UUID(int=7)


class Answering:
    """A client whose broker says this of any topic."""

    def __init__(self, answer: tuple[int, uuid.UUID] | KafkaError, node: int | None = 1) -> None:
        self._answer = answer
        self._node = node

    def get_random_node(self) -> int | None:
        return self._node

    async def send(self, _node: int, _request: Any) -> Any:
        if isinstance(self._answer, KafkaError):
            raise self._answer
        code, found = self._answer
        return SimpleNamespace(topics=[(code, "requests", found, False, [], 0, {})])


async def test_it_is_what_the_broker_says_and_none_of_one_that_is_too_old() -> None:
    assert await topic_id(Answering((0, ID)), "requests") == str(ID)
    assert await topic_id(Answering(IncompatibleBrokerVersion("too old")), "requests") is None


@pytest.mark.parametrize(
    ("client", "error"),
    [
        (Answering((3, uuid.UUID(int=0))), UnknownTopicOrPartitionError),
        (Answering(NodeNotReadyError("away")), NodeNotReadyError),
        (Answering((0, ID), node=None), NodeNotReadyError),
    ],
)
async def test_what_is_not_known_is_an_error_and_no_id(client: Answering, error: type[KafkaError]) -> None:
    with pytest.raises(error):
        await topic_id(client, "requests")
