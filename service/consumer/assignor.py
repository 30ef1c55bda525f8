"""Placement by the group protocol itself: members say what they hold, the group's leader says who reads what.

Kafka hands each member's words to the leader as they are (the subscription's user data), so nothing else is needed:
no coordinator of ours, no topic, no lock.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import structlog
from aiokafka.cluster import ClusterMetadata
from aiokafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

from schemas.contexts import ContextInfo, Tier
from service.ports import Holdings
from service.scheduling.placement import Member, Topic, place, weights

log = structlog.get_logger(__name__)

_PROTOCOL_VERSION = 0
_LARGEST = 1 << 20
"""What a member says is not unpacked beyond this: it comes from outside."""


_MOST_LOAD = 1e6
"""Devices that a topic may ask for at one worker: costs may be forged, and sums of what is said must have an end."""


class _Said(BaseModel):
    """A member's user data: JSON, compressed, for Kafka keeps that of all members in one record."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    generation: int = -1
    owned: dict[str, list[int]] = {}
    resident: dict[str, NonNegativeInt] = {}
    parked: dict[str, NonNegativeInt] = {}
    memory: NonNegativeInt | None = None
    loads: dict[str, tuple[Annotated[FiniteFloat, Field(ge=0, le=_MOST_LOAD)], NonNegativeInt]] = {}
    serves: frozenset[str] | None = None
    strays: frozenset[str] = frozenset()


class Placement(AbstractPartitionAssignor):  # type: ignore[misc]  # aiokafka is untyped
    """An assignor per consumer, where aiokafka's keep their memory on the class.

    ``alias_of`` gives a topic's model. ``holdings`` and ``loads``, the seconds of a device per second that requests of
    a topic ask for here, are asked for whenever the worker joins.
    """

    name = "gearshift"

    def __init__(
        self,
        *,
        alias_of: Callable[[str], str | None],
        holdings: Callable[[], Holdings],
        loads: Callable[[], Mapping[str, float]],
    ) -> None:
        self._alias_of = alias_of
        self._holdings = holdings
        self._loads = loads
        self._owned: dict[str, list[int]] = {}
        self.generation = -1
        """Of what is owned; aiokafka does not tell, so the consumer's owner does."""
        self.alone = False
        """Whether it is the group's only member, as far as it knows: only a group's leader does."""
        self.serves: frozenset[str] | None = None
        """The aliases that may have a turn here now; None: all."""
        self.strays: frozenset[str] = frozenset()
        """Topics of models that this worker does not have: it reads them only where nobody has their model."""

    def metadata(self, topics: Iterable[str]) -> ConsumerProtocolMemberMetadata:
        """What this worker says when it joins."""
        self.alone = False
        holdings = self._holdings()
        loads = self._loads()
        said = _Said(
            generation=self.generation,
            owned=self._owned,
            resident=_sizes(holdings.contexts, Tier.RESIDENT),
            parked=_sizes(holdings.contexts, Tier.PARKED),
            memory=holdings.device_bytes,
            loads={topic: (_bounded(loads.get(topic, 0.0)), len(numbers)) for topic, numbers in self._owned.items()},
            serves=self.serves,
            strays=self.strays,
        )
        packed = zlib.compress(said.model_dump_json().encode())
        return ConsumerProtocolMemberMetadata(_PROTOCOL_VERSION, sorted(topics), packed)

    def assign(
        self, cluster: ClusterMetadata, members: Mapping[str, ConsumerProtocolMemberMetadata]
    ) -> dict[str, ConsumerProtocolMemberAssignment]:
        """Run by the leader on what all said."""
        said = {member: _unpack(member, metadata.user_data) for member, metadata in members.items()}
        self.alone = len(said) == 1
        subscribed = {member: frozenset(metadata.subscription) for member, metadata in members.items()}
        own = frozenset().union(*(subscribed[member] - said[member].strays for member in members))
        names = sorted(frozenset().union(*subscribed.values()))
        alias_of = {name: self._alias_of(name) if name in own else None for name in names}
        weight = weights((one.loads for one in said.values()), [name for name in names if alias_of[name]])
        topics = [
            Topic(name, len(cluster.partitions_for_topic(name) or ()), alias_of[name], weight.get(name, 1.0))
            for name in names
        ]
        sizes = {info.alias: info.weights_bytes + info.kv_bytes for info in self._holdings().contexts}
        read = {member: topics - (said[member].strays & own) for member, topics in subscribed.items()}
        placed = place(topics, [_member(id_, read[id_], said[id_]) for id_ in members], sizes)
        return {member: _assignment(owned) for member, owned in placed.items()}

    def on_assignment(self, assignment: ConsumerProtocolMemberAssignment) -> None:
        """Remember what was given."""
        self._owned = {topic: list(numbers) for topic, numbers in assignment.assignment}


def _bounded(load: float) -> float:
    """What may be said of a load; of one that is no number, nothing."""
    return min(max(0.0, load), _MOST_LOAD)


def _sizes(contexts: Iterable[ContextInfo], tier: Tier) -> dict[str, int]:
    return {info.alias: info.weights_bytes + info.kv_bytes for info in contexts if info.tier is tier}


def _unpack(member: str, user_data: bytes | None) -> _Said:
    """What a member said; nothing, if it can't be read: it gets its share all the same."""
    try:
        text = zlib.decompressobj().decompress(user_data or b"", _LARGEST)
        return _Said.model_validate(json.loads(text))
    except (zlib.error, ValueError, RecursionError) as error:
        log.warning("placement.unreadable", member=member, why=str(error)[:200])
        return _Said()


def _member(id_: str, topics: frozenset[str], said: _Said) -> Member:
    return Member(
        id=id_,
        topics=topics,
        resident=said.resident,
        parked=said.parked,
        memory=said.memory,
        owned=frozenset((topic, number) for topic, numbers in said.owned.items() for number in numbers),
        generation=said.generation,
        serves=said.serves,
    )


def _assignment(owned: Iterable[tuple[str, int]]) -> ConsumerProtocolMemberAssignment:
    by_topic: dict[str, list[Any]] = {}
    for topic, number in owned:
        by_topic.setdefault(topic, []).append(number)
    return ConsumerProtocolMemberAssignment(_PROTOCOL_VERSION, sorted(by_topic.items()), b"")
