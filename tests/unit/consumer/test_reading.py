"""Whatever happens to a pool's members and partitions, every request gets one result, and all are drained."""

import asyncio
from typing import Any

from aiokafka import TopicPartition
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.base import Origin, Record
from service.consumer.in_flight import Limits
from tests.support.fake_kafka import SHARED, FakeBroker, FakeMember

QWEN = f"{SHARED}.qwen"
PARTITIONS = [TopicPartition(SHARED, 0), TopicPartition(QWEN, 0), TopicPartition(QWEN, 1)]
NAMES = ("one", "two")
LIMITS = Limits(requests=40, bytes=1 << 20, tokens=1 << 20)
FAR = 1e9

members = st.sampled_from(NAMES)
partitions = st.sampled_from(PARTITIONS)


class Reading(RuleBasedStateMachine):
    """Two members of a pool on a broker in memory, and what each of them holds."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.broker = FakeBroker()
        self.clock = 1000.0
        self.cancelled: set[Origin] = set()
        self.produced: set[Origin] = set()
        self.pool: dict[str, FakeMember] = {}
        self.held: dict[str, set[Origin]] = {}
        self.owners: dict[TopicPartition, str] = {}

    def teardown(self) -> None:
        try:
            if self.pool:
                self.drain()
        finally:
            self.loop.close()

    @initialize()
    def begin(self) -> None:
        for name in NAMES:
            self._start(name)
        for partition in PARTITIONS:
            self.broker.logs[partition] = []
        self._assign(dict.fromkeys(PARTITIONS, "one"))

    # --- what producers, operators and the broker do ---

    @rule(where=partitions, count=st.integers(1, 60), due=st.sampled_from([0.0, 1005.0, 1050.0, FAR]))
    def produce(self, where: TopicPartition, count: int, due: float) -> None:
        for _ in range(count):
            self._append(where, due)

    @rule(where=partitions, count=st.integers(1, 300))
    def skip(self, where: TopicPartition, count: int) -> None:
        self.broker.skip(where.topic, count, partition=where.partition)

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def expire(self, seconds: float) -> None:
        self.clock += seconds

    @precondition(lambda self: self.produced)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.cancelled.add(data.draw(st.sampled_from(sorted(self.produced, key=str))))
        for member in self.pool.values():
            member.scan.look_again(self._due)

    @rule(name=members, served=st.sampled_from([None, (), (QWEN,)]))
    def hold(self, name: str, served: tuple[str, ...] | None) -> None:
        self.pool[name].polling.serve_only(served)

    @rule(where=partitions, share=st.floats(0, 1))
    def forget(self, where: TopicPartition, share: float) -> None:
        first, end = self.broker.bounds(where)
        self.broker.forget_before(where.topic, first + round(share * (end - first) / 2), partition=where.partition)

    # --- what members do ---

    @rule(name=members, turns=st.integers(1, 4))
    def read(self, name: str, turns: int) -> None:
        for _ in range(turns):
            self._read(name)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in NAMES if self.held[name]]))
        some = data.draw(st.sets(st.sampled_from(sorted(self.held[name], key=str)), min_size=1))
        self._settle(name, some)

    @precondition(lambda self: any(origin.topic == SHARED for held in self.held.values() for origin in held))
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        where = [(name, one) for name in NAMES for one in sorted(self.held[name], key=str) if one.topic == SHARED]
        name, origin = data.draw(st.sampled_from(where))
        if self._settle(name, {origin}):
            self._append(TopicPartition(QWEN, origin.offset % 2), FAR)

    # --- what happens to members ---

    @rule(owners=st.tuples(members, members, members))
    def rebalance(self, owners: tuple[str, ...]) -> None:
        self._assign(dict(zip(PARTITIONS, owners, strict=True)))

    @rule(name=members)
    def kill(self, name: str) -> None:
        self._start(name)
        self._assign(self.owners)

    # --- what always holds ---

    @invariant()
    def no_request_has_two_results(self) -> None:
        assert len(self.broker.results) == len(set(self.broker.results))

    @invariant()
    def no_more_is_here_than_there_is_room_for(self) -> None:
        for member in self.pool.values():
            assert member.in_flight.requests == sum(len(w.ledger.pending) for w in member.writers.values())

    def drain(self) -> None:
        """Everything is served, and everything that comes is settled."""
        for member in self.pool.values():
            member.polling.serve_only(None)
        quiet, left = 0, 2000
        while quiet < 3 + len(PARTITIONS) and (left := left - 1):  # a poll may do nothing but tell what retention took
            came = sum(len(self._read(name)) for name in NAMES)
            settled = sum(map(len, self.held.values()))
            for name in NAMES:
                self._settle(name, set(self.held[name]))
            quiet = 0 if came or settled else quiet + 1
        answered = set(self.broker.results)
        for origin in self.produced - answered:
            first, _ = self.broker.bounds(TopicPartition(origin.topic, origin.partition))
            assert origin.offset < first, f"{origin} is neither answered nor taken by retention"
        for partition in PARTITIONS:
            writer = self.pool[self.owners[partition]].writers[partition]
            assert writer.ledger.position == self.broker.bounds(partition)[1] or not writer.ledger.pending

    # --- inside ---

    def _append(self, where: TopicPartition, due: float) -> None:
        origin = self.broker.append(where.topic, repr(due).encode(), partition=where.partition, at=self.clock)
        self.produced.add(origin)

    def _due(self, record: Record) -> float:
        return 0.0 if record.origin in self.cancelled else float(record.value or b"inf")

    def _run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    def _start(self, name: str) -> None:
        async def made() -> FakeMember:
            return FakeMember(self.broker, limits=LIMITS, now=lambda: self.clock)

        self.pool[name], self.held[name] = self._run(made()), set()
        self.pool[name].scan.look_again(self._due)

    def _assign(self, owners: dict[TopicPartition, str]) -> None:
        self.owners = owners
        for name, member in self.pool.items():
            member.assign([partition for partition, owner in owners.items() if owner == name])

    def _read(self, name: str) -> set[Origin]:
        member = self.pool[name]
        self._run(member.scan.turn())
        received = self._run(member.receive())
        self.held[name] -= received.lost
        came = {delivery.record.origin for delivery in received.deliveries}
        assert len(came) == len(received.deliveries)
        assert not came & self.held[name], "delivered again while it is here"
        assert not came & set(self.broker.results), "delivered after it was answered"
        self.held[name] |= came
        return came

    def _settle(self, name: str, origins: set[Origin]) -> bool:
        committed = False
        for partition in PARTITIONS:
            here = [origin for origin in origins if (origin.topic, origin.partition) == partition]
            if here and self.pool[name].settle(sorted(here, key=str)):
                self.held[name] -= set(here)
                committed = True
        return committed


Reading.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestReading = Reading.TestCase
