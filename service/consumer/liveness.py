"""Once a second: what moved in reading and committing since, and what lies behind the last record."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition

from service.consumer.in_flight import InFlight
from service.consumer.partitions import OwnedPartitions
from service.consumer.polling import Polling
from service.consumer.progress import Complaint, Progress, worst
from service.consumer.writer import LedgerWriter

log = structlog.get_logger(__name__)
_LOOK_S = 1.0
_LONG_OPEN_S = 60.0
"""A transaction that has been open for longer is told of in the log."""


class OpenTransactions:
    """Since when transactions of others have hidden what lies behind them. Pure but for its clock and the log.

    Nobody who reads what is committed sees anything of such a partition: no record, and so no lag.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._open: dict[TopicPartition, _Open] = {}

    def look(self, hidden: Mapping[TopicPartition, tuple[int, int] | None]) -> None:
        """Of our partitions, from which offset on how many are hidden; None: no fetch has told since the last look."""
        now, before, self._open = self._now(), self._open, {}
        for partition, told in hidden.items():
            known = before.get(partition)
            if told is None:
                if known is not None:
                    self._open[partition] = known
                continue
            first, count = told
            if not count:
                continue
            found = known if known is not None and known.first == first else _Open(first, since=now)
            self._open[partition] = found = replace(found, seen=now)
            if now - found.since > _LONG_OPEN_S and not found.logged:
                place = {"topic": partition.topic, "partition": partition.partition, "offset": first}
                log.warning("bus.transaction_open", **place, hidden=count, open_s=round(now - found.since))
                self._open[partition] = replace(found, logged=True)

    def longest_s(self) -> dict[str, float]:
        """By topic, of its partitions the longest, as of when each was seen last."""
        longest: dict[str, float] = {}
        for partition, found in self._open.items():
            longest[partition.topic] = max(longest.get(partition.topic, 0.0), found.seen - found.since)
        return longest


@dataclass(frozen=True, slots=True)
class _Open:
    """A transaction that hides all from an offset on: since when it was seen, and when last."""

    first: int
    since: float
    seen: float = 0.0
    logged: bool = False


class Liveness:
    """Tells what has not moved for too long, and what is still to be read.

    Whatever a partition that is served is paused for, it is expected to move as long as it has lag.
    """

    def __init__(
        self, *, consumer: AIOKafkaConsumer, owned: OwnedPartitions, polling: Polling, in_flight: InFlight
    ) -> None:
        self._consumer = consumer
        self._in_flight = in_flight
        self._owned = owned
        self._polling = polling
        self._progress = Progress()
        self._waiting = Progress()
        """The same of partitions that wait for requests to be settled."""
        self._now = asyncio.get_running_loop().time
        self._fetched_at = self._looked_at = self._now()
        self._open_transactions = OpenTransactions(self._now)

    def look(self) -> None:
        """To be called at each turn of reading."""
        now = self._now()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        assigned = self._consumer.assignment()
        writers = self._owned.writers
        read = {p: w for p, w in writers.items() if p in assigned and p not in self._polling.paused}
        ours = [partition for partition in writers if partition in assigned]
        self._open_transactions.look({p: self._hidden(p) if p in read else None for p in ours})
        silent = [self._consumer.last_poll_timestamp(partition) for partition in read]
        if not read or max((at for at in silent if at), default=0) > 1000 * (time.time() - 2 * _LOOK_S):
            self._fetched_at = now
        behind = {p: w for p, w in writers.items() if p in assigned and self._ought_to_move(p, w)}
        waiting = {p: w.ledger.position + self._in_flight.gone for p, w in behind.items() if self._waits(p)}
        self._waiting.update(waiting, now)
        self._progress.update({p: w.ledger.position for p, w in behind.items() if p not in waiting}, now)
        if self._polling.between_polls:
            for partition, writer in read.items():
                self._step_over_tail(partition, writer)

    def stuck(self) -> tuple[str, float]:
        """What has not moved for the longest time, and for how many seconds."""
        complaints = self._complaints()
        if not complaints:
            return "", 0.0
        complaint = worst(complaints)
        return complaint.reason, self._now() - complaint.since

    def full_s(self) -> float:
        """For how many seconds a partition has waited for requests to be settled, while none was."""
        since = [at for p in self._owned.writers if (at := self._waiting.since(p)) is not None]
        return self._now() - min(since) if since else 0.0

    def lag(self) -> dict[str, int]:
        """Records of our partitions that are not read yet, by topic, as far as the last fetches told."""
        behind: dict[str, int] = {}
        for partition, writer in self._owned.writers.items():
            behind[partition.topic] = behind.get(partition.topic, 0) + self._lag_of(partition, writer)
        return behind

    def transaction_open_s(self) -> dict[str, float]:
        """For how long what lies behind somebody's open transaction has been hidden, by topic."""
        return self._open_transactions.longest_s()

    def _hidden(self, partition: TopicPartition) -> tuple[int, int] | None:
        """From where, and how many offsets, a transaction hides, as the last fetch told."""
        stable = self._consumer.last_stable_offset(partition)
        end = self._consumer.highwater(partition)
        return None if stable is None or end is None else (stable, max(0, end - stable))

    def _complaints(self) -> list[Complaint]:
        complaints = []
        if not self._polling.stopped:
            silent_s = self._looked_at - self._fetched_at  # while the loop turned
            complaints += [
                Complaint("the group gives no assignment, or the poll loop does not turn", self._polling.turned_at),
                Complaint("no broker answers a fetch", self._now() - silent_s),
            ]
        for partition, writer in self._owned.writers.items():
            name = f"{partition.topic}/{partition.partition}"
            stuck, standing = writer.stuck_since, self._progress.since(partition)
            why = f" ({writer.stuck_why})" if stuck is not None else ""
            if not writer.ready:
                since = [at for at in (stuck, standing) if at is not None]
                complaints += [Complaint(f"{name} is assigned and not taken over{why}", min(since))] if since else []
                continue
            if stuck is not None:
                complaints.append(Complaint(f"{name} can't be committed to{why}", stuck))
            if standing is not None and self._ought_to_move(partition, writer):  # or it has moved since the last look
                complaints.append(Complaint(f"{name} has lag and is not read", standing))
        return complaints

    def _ought_to_move(self, partition: TopicPartition, writer: LedgerWriter) -> bool:
        if self._polling.stopped:
            return False
        read = self._polling.is_served(partition) and not self._polling.is_held_back(partition)
        return not writer.ready or (read and self._lag_of(partition, writer) > 0)

    def _waits(self, partition: TopicPartition) -> bool:
        """Whether it is paused until requests are settled, and there are such requests."""
        return self._polling.waits_for_room(partition) and self._in_flight.requests > 0

    def _lag_of(self, partition: TopicPartition, writer: LedgerWriter) -> int:
        if partition not in self._consumer.assignment():
            return 0
        end = self._consumer.last_stable_offset(partition)
        return max(0, (end or 0) - writer.ledger.position)

    def _step_over_tail(self, partition: TopicPartition, writer: LedgerWriter) -> None:
        """Commit past a marker that ends the log; otherwise a lag of one would stay, and the pool never scale to 0."""
        if writer.ready and not writer.ledger.pending:
            state = self._consumer._subscription.subscription.assignment.state_value(partition)
            if state.has_valid_position:  # aiokafka has none between an assignment and telling us of it
                writer.reach(state.position)
