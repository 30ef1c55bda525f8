"""Which worker of a pool reads which partition: a model's partitions go where the model already is.

Pure. The members of a consumer group say what they hold and own; the leader runs ``place`` on what all of them said.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Partition = tuple[str, int]
"""A topic and the number of one of its partitions."""

_KEPT = 1.25
"""A worker keeps what it has up to this multiple of the fair load; others take what is beyond, where they have room."""
_MOST = 1.1
"""And takes more up to this."""
_LEAST = 0.6
"""One below this multiple gets partitions of those that have most."""
_STRETCH = 2.0
"""How far beyond the fair load workers that have a model are loaded before another one must load it too."""
_IDLE = 0.01
"""The weight, as a share of the mean, of a partition that brings next to nothing: what waits there still counts."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic with requests; ``alias`` is their model, None where they are for any. ``weight`` is one partition's."""

    name: str
    partitions: int
    alias: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as it describes itself when it joins.

    ``resident`` and ``parked`` are bytes on the device by alias, the latter's when they come back; ``memory`` is
    what the device has for contexts (None: unknown, everything fits). ``owned`` was assigned in ``generation``.
    ``serves`` are the aliases that may have a turn there now, None where that is no question: under an operator's hold,
    and where only an operator switches, it is one; what is paused is not among them.
    """

    id: str
    topics: frozenset[str]
    resident: Mapping[str, int] = field(default_factory=dict)
    parked: Mapping[str, int] = field(default_factory=dict)
    memory: int | None = None
    owned: frozenset[Partition] = frozenset()
    generation: int = -1
    serves: frozenset[str] | None = None


def place(
    topics: Iterable[Topic], members: Sequence[Member], sizes: Mapping[str, int] | None = None
) -> dict[str, tuple[Partition, ...]]:
    """Every partition of every topic that somebody subscribes to, given to exactly one of its subscribers.

    A model's go to those that serve it, whatever they have and have to do; to others only where nobody does.
    ``sizes`` are the models' bytes, if known, where no member says more. The same members in another order are
    placed the same way. A placement that is placed again stays as it is; in rare cases a few partitions move once more,
    where ``level`` left a giver with little.
    """
    known = dict(sizes or {})
    for member in members:
        for alias, size in (*member.parked.items(), *member.resident.items()):
            known[alias] = max(size, known.get(alias, 0))
    pool = _Pool(members, known)
    # The heaviest first; of equals the one that fewest have, for the others find a place all the same.
    wanted = sorted(topics, key=lambda topic: (-topic.weight * topic.partitions, pool.holders(topic), topic.name))
    for topic in wanted:
        if topic.alias is None:
            pool.spread(topic)
    models = [topic for topic in wanted if topic.alias is not None]
    pool.unserved.update(topic.name for topic in models if not any(_serves(member, topic) for member in members))
    if members and models:
        pool.fair = fair_share(models, len(members))
        by_name = {topic.name: topic for topic in models}
        left = {topic: pool.keep(topic, range(topic.partitions), resident=True) for topic in models}
        left = {topic: pool.join(topic, numbers) for topic, numbers in left.items()}
        left = {topic: pool.displace(topic, numbers, by_name) for topic, numbers in left.items()}
        left = {topic: pool.keep(topic, numbers, resident=False) for topic, numbers in left.items()}
        for topic, numbers in left.items():
            pool.house(topic, numbers)
        pool.level(by_name)
    return pool.owned()


def fair_share(topics: Iterable[Topic], members: int) -> float:
    """A member's load if all is divided as evenly as can be: partitions that are more than that take one whole."""
    heaviest = sorted(topics, key=lambda topic: -topic.weight)
    total = sum(topic.weight * topic.partitions for topic in heaviest)
    for topic in heaviest:
        if members <= topic.partitions or topic.weight * members <= total:
            break
        total -= topic.weight * topic.partitions
        members -= topic.partitions
    return total / members


def weights(measured: Iterable[Mapping[str, tuple[float, int]]], topics: Iterable[str]) -> dict[str, float]:
    """A partition's weight by topic, from what members measured: per topic a rate, and over how many partitions.

    One that nobody measured counts as the others do on average; 1.0 for all where nobody measured anything.
    """
    rates = {topic: [0.0, 0.0] for topic in topics}
    for said in measured:
        for topic in said.keys() & rates.keys():
            rate, partitions = said[topic]
            rates[topic][0] += rate
            rates[topic][1] += partitions
    known = {topic: rate / partitions for topic, (rate, partitions) in rates.items() if partitions > 0}
    asked = [weight for weight in known.values() if weight > 0]
    if not asked:
        return dict.fromkeys(rates, 1.0)
    mean = sum(asked) / len(asked)
    return {topic: max(_IDLE * mean, known.get(topic, mean)) for topic in rates}


def _owners(members: Iterable[Member]) -> dict[Partition, str]:
    """Who had each partition last, by what they say: of several the one of the latest generation."""
    latest: dict[Partition, tuple[int, str]] = {}
    for member in members:
        for partition in member.owned:
            latest[partition] = max(latest.get(partition, (-2, "")), (member.generation, member.id))
    return {partition: owner for partition, (_, owner) in latest.items()}


def _serves(member: Member, topic: Topic) -> bool:
    return topic.name in member.topics and (member.serves is None or topic.alias in member.serves)


class _Pool:
    """The placement as it grows."""

    def __init__(self, members: Iterable[Member], sizes: Mapping[str, int]) -> None:
        self._members = {member.id: member for member in sorted(members, key=lambda member: member.id)}
        self._sizes = sizes
        self._before = _owners(self._members.values())
        self._placed: dict[str, dict[str, list[int]]] = {member: {} for member in self._members}
        self._load = dict.fromkeys(self._members, 0.0)
        self._room = {member.id: member.memory for member in self._members.values()}
        self._least = [(0.0, member) for member in self._members]
        """A heap of loads; an entry whose load has changed since is passed over."""
        self._holders: dict[str, list[str]] = defaultdict(list)
        self._parkers: dict[str, list[str]] = defaultdict(list)
        for member in self._members.values():
            for alias in member.resident:
                self._holders[alias].append(member.id)
            for alias in member.parked:
                self._parkers[alias].append(member.id)
        self.unserved: set[str] = set()
        """Topics whose model nobody serves who reads them: all these are as good as each other."""
        self.fair = 0.0
        """The fair load; set before any partition of a model's topic is placed."""

    def owned(self) -> dict[str, tuple[Partition, ...]]:
        return {
            member: tuple(sorted((topic, number) for topic, numbers in placed.items() for number in numbers))
            for member, placed in self._placed.items()
        }

    def holders(self, topic: Topic) -> int:
        """How many have the topic's model on their device."""
        return len(self._holders.get(topic.alias or "", ()))

    # --- a topic that any worker may read ---

    def spread(self, topic: Topic) -> None:
        """The same number to everyone, or one more; who had some keeps as many of them."""
        readers = [member.id for member in self._members.values() if topic.name in member.topics]
        if not readers:
            return
        share, more = divmod(topic.partitions, len(readers))
        counts = dict.fromkeys(readers, 0)
        left = []
        for number in range(topic.partitions):
            owner = self._before.get((topic.name, number), "")
            if counts.get(owner, topic.partitions) < share + (more > 0):
                more -= counts[owner] == share
                counts[owner] += 1
                self._put(topic, number, owner)
            else:
                left.append(number)
        fewest = [(count, reader) for reader, count in counts.items()]
        heapq.heapify(fewest)
        for number in left:
            count, reader = fewest[0]
            self._put(topic, number, reader)
            heapq.heapreplace(fewest, (count + 1, reader))

    # --- topics of one model ---

    def keep(self, topic: Topic, numbers: Iterable[int], *, resident: bool) -> list[int]:
        """Leave partitions where they are, up to a full load, if the model is there (or fits); gives the others."""
        return self._keep(topic, numbers, max(_KEPT * self.fair, topic.weight), resident=resident)

    def _keep(self, topic: Topic, numbers: Iterable[int], full: float, *, resident: bool) -> list[int]:
        left = []
        for number in numbers:
            owner = self._before.get((topic.name, number), "")
            there = self._fits(topic, owner) and (not resident or topic.alias in self._members[owner].resident)
            if there and self._load[owner] + topic.weight <= full:
                self._put(topic, number, owner)
            else:
                left.append(number)
        return left

    def join(self, topic: Topic, numbers: Sequence[int]) -> list[int]:
        """Give them to workers that have the model, up to a full load each; gives those that found no room."""
        return self._fill(topic, list(numbers), self._ranked(topic), self._full(topic))

    def displace(self, topic: Topic, numbers: list[int], topics: Mapping[str, Topic]) -> list[int]:
        """Give them to workers that have the model, where another model's partition can go to another that has that."""
        left = []
        for number in numbers:
            for _, host in sorted(self._ranked(topic)):
                if self._make_way(host, topic, topics):
                    self._put(topic, number, host)
                    break
            else:
                left.append(number)
        return left

    def _make_way(self, host: str, topic: Topic, topics: Mapping[str, Topic]) -> bool:
        """Move one partition from ``host`` to another worker with its model, if there is then room for ``topic``."""
        excess = self._load[host] + topic.weight - self._full(topic)
        for name in sorted(self._placed[host]):
            other = topics.get(name)
            if other is None or other is topic or other.weight < excess:
                continue
            able = [
                (self._load[holder], holder)
                for holder in self._holders[other.alias or ""]
                if holder != host
                and self._load[holder] + other.weight <= self._full(other)
                and self._fits(other, holder)
            ]
            if able:
                self._put(other, self._take(other, host), min(able)[1])
                return True
        return False

    def house(self, topic: Topic, numbers: list[int]) -> None:
        """Find a home for each: let another worker load the model where it fits, else crowd those that have it."""
        hosts = self._ranked(topic)
        full = self._full(topic)
        while numbers := self._fill(topic, numbers, hosts, full):
            opened = self._roomiest(topic, full, {host for _, host in hosts})
            if opened is None:
                break
            heapq.heappush(hosts, (self._load[opened], opened))
        stretched = max(_STRETCH * self.fair, topic.weight)
        numbers = self._keep(topic, numbers, stretched, resident=False)
        self._crowd(topic, self._fill(topic, numbers, self._ranked(topic), stretched))

    def _ranked(self, topic: Topic) -> list[tuple[float, str]]:
        """A heap of those that have the model, or will have it, by their loads."""
        hosts = {member for member, placed in self._placed.items() if topic.name in placed}
        hosts.update(holder for holder in self._holders[topic.alias or ""] if self._fits(topic, holder))
        ranked = [(self._load[host], host) for host in hosts]
        heapq.heapify(ranked)
        return ranked

    def _fill(self, topic: Topic, numbers: list[int], hosts: list[tuple[float, str]], full: float) -> list[int]:
        """Give partitions to the least loaded of ``hosts``, a heap, until all have the load ``full``."""
        while numbers and hosts and hosts[0][0] + topic.weight <= full:
            _, host = hosts[0]
            self._put(topic, numbers.pop(), host)
            heapq.heapreplace(hosts, (self._load[host], host))
        return numbers

    def _crowd(self, topic: Topic, numbers: Iterable[int]) -> None:
        """Nobody has room: they stay where they are, else go to whoever has least to do."""
        able = {member for member in self._load if self._takes(topic, member)}
        least = [(self._load[member], member) for member in able]
        heapq.heapify(least)
        for number in numbers:
            before = self._before.get((topic.name, number), "")
            if before not in able or self._load[before] + topic.weight > _STRETCH * self.fair:
                while least and least[0][0] != self._load[least[0][1]]:
                    heapq.heapreplace(least, (self._load[least[0][1]], least[0][1]))
                if not least:
                    return
                before = least[0][1]
            self._put(topic, number, before)

    def level(self, topics: Mapping[str, Topic]) -> None:
        """Give those that have little to do some of what others have most of: new workers, mostly."""
        givers = [(-load, member) for member, load in self._load.items() if load > self.fair]
        heapq.heapify(givers)
        low = _LEAST * self.fair
        for taker in sorted((member for member, load in self._load.items() if load < low), key=self._load.__getitem__):
            tried: list[tuple[float, str]] = []
            while givers and self._load[taker] < low:
                _, giver = heapq.heappop(givers)
                moved = self._hand_over(giver, taker, topics, low)
                if self._load[giver] > self.fair:
                    heapq.heappush(givers if moved else tried, (-self._load[giver], giver))
            for each in tried:
                heapq.heappush(givers, each)

    def _hand_over(self, giver: str, taker: str, topics: Mapping[str, Topic], low: float) -> bool:
        """Move partitions of one model, the taker's own for preference, as far as that brings the two together."""
        placed, resident = self._placed[giver], self._members[taker].resident

        def preferred(topic: Topic) -> tuple[bool, float, str]:
            return topic.alias not in resident, -topic.weight * len(placed[topic.name]), topic.name

        for topic in sorted((topics[name] for name in placed if name in topics), key=preferred):
            moved = 0
            while (
                topic.name in placed
                and self._load[taker] < low
                and self._load[giver] > self.fair
                and self._load[giver] - self._load[taker] > topic.weight
                and self._fits(topic, taker)
            ):
                self._put(topic, self._take(topic, giver), taker)
                moved += 1
            if moved:
                return True
        return False

    # --- inside ---

    def _full(self, topic: Topic) -> float:
        """The load up to which a worker takes partitions; a heavier one is a load of its own."""
        return max(_MOST * self.fair, topic.weight)

    def _roomiest(self, topic: Topic, full: float, but: set[str]) -> str | None:
        """The worker to load the model next: one that has it in host memory, else the one with least to do."""
        for parker in sorted(self._parkers[topic.alias or ""], key=self._load.__getitem__):
            if parker not in but and self._load[parker] + topic.weight <= full and self._fits(topic, parker):
                return parker
        passed = []
        found = None
        while self._least and found is None and self._least[0][0] + topic.weight <= full:
            entry = load, member = heapq.heappop(self._least)
            if load == self._load[member]:
                passed.append(entry)
                if member not in but and self._fits(topic, member):
                    found = member
        for entry in passed:
            heapq.heappush(self._least, entry)
        return found

    def _takes(self, topic: Topic, member: str) -> bool:
        known = self._members.get(member)
        if known is None or topic.name not in known.topics:
            return False
        return topic.name in self.unserved or _serves(known, topic)

    def _fits(self, topic: Topic, member: str) -> bool:
        if not self._takes(topic, member):
            return False
        room = self._room[member]
        return room is None or topic.name in self._placed[member] or self._sizes.get(topic.alias or "", 0) <= room

    def _put(self, topic: Topic, number: int, member: str) -> None:
        placed, room = self._placed[member], self._room[member]
        if topic.name not in placed:
            placed[topic.name] = []
            if room is not None and topic.alias is not None:
                self._room[member] = room - self._sizes.get(topic.alias, 0)
        placed[topic.name].append(number)
        if topic.alias is not None:
            self._load[member] += topic.weight
            heapq.heappush(self._least, (self._load[member], member))

    def _take(self, topic: Topic, member: str) -> int:
        placed, room = self._placed[member], self._room[member]
        number = placed[topic.name].pop()
        if not placed[topic.name]:
            del placed[topic.name]
            if room is not None and topic.alias is not None:
                self._room[member] = room + self._sizes.get(topic.alias, 0)
        self._load[member] -= topic.weight
        heapq.heappush(self._least, (self._load[member], member))
        return number
