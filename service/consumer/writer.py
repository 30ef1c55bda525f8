"""The only one who commits for a partition: results and ledger in one transaction, one transaction after another."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
from aiokafka import TopicPartition

from schemas.base import Outgoing
from schemas.progress import Progress
from service.consumer.ledger import Ledger
from service.consumer.progress_topic import PartitionProgress
from service.consumer.transactions import OutcomeUnknown, PartitionTransactions, Refused
from service.errors import BrokerUnavailable, Fenced, RecordRefused
from service.ports import Say

log = structlog.get_logger(__name__)

_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 5.0
_RECORD_OVERHEAD = 64
_HEADER_OVERHEAD = 8
"""Bytes of a record beside what it carries; upper bounds."""


@dataclass(slots=True, eq=False)
class _Settlement:
    offset: int
    records: Sequence[Outgoing]
    committed: asyncio.Future[bool]
    hurry: bool
    last: bool = False
    """Whether it goes behind the others: nobody knows what became of a transaction that had only this."""


ReadLedger = Callable[[], Awaitable[Ledger]]
Acquired = Callable[["LedgerWriter", frozenset[int]], None]


class LedgerWriter:
    """Owns a partition's ledger from the fence on, and brings settlements into it.

    ``run`` is its life: take the partition over, then commit what comes, in groups. Whatever goes wrong in a
    transaction, what follows is the same as at the beginning: fence, read the ledger, publish what it lacks.
    ``acquired`` is told each time, with the delivered offsets that somebody else finished meanwhile.
    """

    def __init__(
        self,
        *,
        partition: TopicPartition,
        transactions: PartitionTransactions,
        read_ledger: ReadLedger,
        progress: PartitionProgress,
        acquired: Acquired,
        fenced: Callable[[], None],
        pause_s: float,
        mark_delay_s: float,
        max_record_bytes: int,
    ) -> None:
        self.partition = partition
        self.ledger = Ledger()
        self.ready = False
        self.fenced = False
        self.stuck_since: float | None = None
        """Loop time since which takeovers and transactions have been failing, without one that was committed."""
        self.stuck_why = ""
        self._transactions = transactions
        self._read_ledger = read_ledger
        self._progress = progress
        self._acquired = acquired
        self._tell_fenced = fenced
        self._pause_s = pause_s
        self._mark_delay_s = mark_delay_s
        self._max_record_bytes = max_record_bytes
        self._loop = asyncio.get_running_loop()
        self._queue: list[_Settlement] = []
        self._settling: set[int] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._dirty = False
        self._something = asyncio.Event()
        self._urgent = asyncio.Event()
        self._readmitted = asyncio.Event()
        self._take_over_again = False
        self._marks_left_out = False
        self._engine_died = False
        self._rested_at = 0.0
        self._failed = 0
        """Transactions in a row of which nobody knows what became."""

    # --- what callers ask; none of it blocks ---

    def settle(self, offset: int, records: Sequence[Outgoing], *, hurry: bool = True) -> asyncio.Future[bool]:
        """What becomes of it: True committed, False not ours to do, or RecordRefused.

        Where nobody waits for it, and there is no ``hurry``, it goes with the next that somebody does, or a moment
        later, as a mark: many of them make nobody's answer late.
        """
        committed: asyncio.Future[bool] = self._loop.create_future()
        if offset not in self.ledger.pending or offset in self._settling:
            committed.set_result(False)
        elif reason := self._too_large(records):
            committed.set_exception(RecordRefused(reason))
        else:
            self._settling.add(offset)
            self.ledger.withdraw(offset)  # its run has ended, and is not to blame for what dies while this commits
            self._queue.append(_Settlement(offset, records, committed, hurry))
            if hurry:
                self._hurry()
            else:
                self._something.set()
        return committed

    def started(self, offset: int, *, alone: bool = False) -> bool:
        """Mark a run; committed with the next settlement, or a moment later. False: it is not ours to run."""
        if offset not in self.ledger.pending:
            return False
        self.ledger.start(offset, alone=alone)
        self._touch()
        return True

    def engine_died(self, culprit: int | None) -> None:
        """The engine died, and this worker did not; ``culprit``: the offset of the run that had it to itself.

        From here on every run has ended by a death, whoever gets the partition.
        """
        self.ledger.engine_died(culprit)
        self._engine_died, self._marks_left_out = True, False
        self._touch()

    def withdraw(self, offset: int) -> None:
        """Take a mark back."""
        if offset in self.ledger.pending:
            self.ledger.withdraw(offset)
            self._touch()

    def keep(self, offset: int, say: Say) -> None:
        """Keep what a run has said; it is asked when that is written, with the next settlement or a moment later."""
        if offset in self.ledger.pending and self._progress.keep(offset, say):
            self._touch()

    def take_progress(self, offset: int) -> Progress | None:
        """What an earlier owner's run had said."""
        return self._progress.take(offset)

    def session(self, offset: int, name: str, part: int) -> Progress | None:
        """What a session had come to before the part at ``offset``."""
        return self._progress.session(offset, name, part) if offset in self.ledger.pending else None

    def keep_session(self, offset: int, progress: Progress) -> None:
        """Keep what a session has come to with the part at ``offset``, in the transaction that settles that."""
        self._progress.keep_session(offset, progress)

    def reach(self, position: int) -> int:
        """Step over offsets that have no records; returns how many."""
        skipped = self.ledger.reach(position)
        if skipped:
            self._touch()
        return skipped

    def flushed(self) -> asyncio.Future[None]:
        """Done when all that was asked before is committed, marks too, or is not ours any more."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(done)
        if self._transactions.unremembered:
            self._transactions.remember()
            self._dirty = True
        self._hurry()
        return done

    def leave_marks_out(self) -> None:
        """Runs may end now without a death: commit the ledger without their marks, until ``keep_marks``.

        Not where the engine has died: they have ended by that.
        """
        if self.ledger.marks and not self._marks_left_out and not self._engine_died:
            self._marks_left_out = True
            self._touch()

    def keep_marks(self) -> None:
        """The partition stayed: the runs go on, and count again."""
        if self._marks_left_out:
            self._marks_left_out = False
            self._touch()

    def take_over_again(self) -> None:
        """The partition may have been another's in between: take it over again before the next commit."""
        self.ready = False
        self._take_over_again = True
        self._readmitted.set()
        self._hurry()

    # --- its life ---

    async def run(self) -> None:
        """Take the partition over, and commit until cancelled; then nothing that waits is ours to do."""
        try:
            await self._take_over()
            while True:
                await self._due()
                await self._write()
        finally:
            self._abandon()
            await self._transactions.close()

    async def _due(self) -> None:
        """Wait for something to write. A group gathers while the last transaction and the pause after it pass."""
        try:
            async with asyncio.timeout_at(self._progress.next_end):
                await self._something.wait()
        except TimeoutError:
            self._touch()
        if not self._urgent.is_set():
            try:
                async with asyncio.timeout(self._mark_delay_s):
                    await self._urgent.wait()
            except TimeoutError:
                pass
        if (rest := self._rested_at - self._loop.time()) > 0:
            await asyncio.sleep(rest)

    async def _write(self) -> None:
        """Commit all that waits now. Returns when each settlement is decided."""
        self._something.clear()
        self._urgent.clear()
        settlements, self._queue = self._queue, []
        waiting, self._waiting = self._waiting, []
        try:
            if self._take_over_again:
                await self._take_over()
            first = [each for each in settlements if not each.last]
            groups = deque([first] if first or self._dirty else [])
            groups += [[each] for each in settlements if each.last]
            while groups:
                groups.extend(await self._commit(groups.popleft()))
        except BaseException:
            self._queue[:0] = settlements
            self._waiting[:0] = waiting
            raise
        if waiting and (any(each.last for each in self._queue) or (self._dirty and self._progress.waits)):
            self._waiting[:0] = waiting
            self._hurry()
        else:
            _resolve(waiting)

    async def _commit(self, group: list[_Settlement]) -> list[list[_Settlement]]:
        """One transaction; returns what is still to be committed, in groups."""
        group = [settlement for settlement in group if self._still_open(settlement)]
        if not group and not self._dirty:
            self._unstuck()
            return []
        finishing = [settlement.offset for settlement in group]
        offset, metadata = self.ledger.encode(finishing, own_marks=not self._marks_left_out)
        dirty, self._dirty = self._dirty, False
        records = [record for settlement in group for record in settlement.records]
        said = self._progress.records(self.ledger.pending, finishing)
        try:
            await self._transactions.commit([*records, *said], offset, metadata)
        except Refused as refused:
            self._progress.refused(refused.reasons, first=len(records))
            rest = self._set_apart(group, refused)
        except OutcomeUnknown as unknown:
            log.warning("bus.outcome_unknown", partition=str(self.partition), reason=str(unknown))
            self._progress.forget()  # results must not wait for it again
            if said and self._failed:
                self._progress.leave_out()
            rest = self._halve(group) if self._failed else [group]
            self._stuck(unknown)
            await self._rest_before_another_try()
        except Fenced:
            log.warning("bus.fenced", partition=str(self.partition))
            await self._wait_for_readmission()
            rest = [group]
        else:
            if sum(settlement.hurry for settlement in group) > 1:  # one alone gathers nobody by waiting
                self._rested_at = self._loop.time() + self._pause_s
            self._unstuck()
            self._failed = 0
            self._progress.committed(finishing)
            if self._progress.waits:  # there was more than one transaction takes
                self._touch()
            for settlement in group:
                self.ledger.finish(settlement.offset)
                self._decide(settlement, committed=True)
            return []
        self._dirty = self._dirty or dirty
        await self._take_over()
        return rest

    def _still_open(self, settlement: _Settlement) -> bool:
        """Whether the ledger lacks it; if not, it was committed, though we may not have heard of that."""
        if settlement.offset in self.ledger.pending:
            return True
        self._decide(settlement, committed=True)
        return False

    def _set_apart(self, group: list[_Settlement], refused: Refused) -> list[list[_Settlement]]:
        """Records that travelled in one batch are refused together: try the suspects alone, the others together."""
        suspects: list[list[_Settlement]] = []
        others: list[_Settlement] = []
        first = 0
        for settlement in group:
            last = first + len(settlement.records)
            reason = next((refused.reasons[i] for i in range(first, last) if i in refused.reasons), None)
            first = last
            if reason is None:
                others.append(settlement)
            elif len(group) > 1:
                suspects.append([settlement])
            else:
                self._settling.discard(settlement.offset)
                if not settlement.committed.done():
                    settlement.committed.set_exception(RecordRefused(reason))
        return [others, *suspects]

    def _halve(self, group: list[_Settlement]) -> list[list[_Settlement]]:
        """One of them may have what can't be written now, or all may be too much: the others are not to wait for it.

        What has failed alone waits for the next write, behind all that comes until then.
        """
        if len(group) > 1:
            middle = len(group) // 2
            return [group[:middle], group[middle:]]
        for settlement in group:
            settlement.last = True
            self._queue.append(settlement)
            self._hurry()
        return []

    async def _take_over(self) -> None:
        """Fence, read the ledger, and take its word for what is finished. Tries until it works."""
        self.ready = False
        failed_before = self.stuck_since is not None
        backoff = _BACKOFF_S
        while True:
            self._take_over_again = False
            self._readmitted.clear()
            try:
                epoch = await self._transactions.fence()
                stored = await self._read_ledger()
                await self._progress.read(stored, self.ledger.pending, topic_id=self._transactions.topic_id)
                break
            except BrokerUnavailable as error:
                log.warning("bus.takeover_failed", partition=str(self.partition), reason=str(error))
                self._transactions.doubt()
                self._stuck(error)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _BACKOFF_MAX_S)
        stored.epoch = max(stored.epoch + 1, epoch)
        taken = self.ledger.adopt(stored)
        self.ready = True
        self.fenced = False
        if not failed_before:
            self._unstuck()
        self._acquired(self, taken - self._settling)

    async def _wait_for_readmission(self) -> None:
        """Whether the partition is still ours is the group's to say: rejoin, and wait to be told or cancelled."""
        self.ready = False
        self.fenced = True
        self._tell_fenced()
        await self._readmitted.wait()

    # --- inside ---

    async def _rest_before_another_try(self) -> None:
        """The first is made at once; the more have failed in a row, the longer they are apart."""
        if self._failed:
            await asyncio.sleep(min(_BACKOFF_S * 2**self._failed, _BACKOFF_MAX_S))
        self._failed += 1

    def _stuck(self, error: Exception) -> None:
        self.stuck_since = self.stuck_since or self._loop.time()
        self.stuck_why = str(error)

    def _unstuck(self) -> None:
        self.stuck_since = None

    def _touch(self) -> None:
        self._dirty = True
        self._something.set()

    def _hurry(self) -> None:
        self._something.set()
        self._urgent.set()

    def _decide(self, settlement: _Settlement, *, committed: bool) -> None:
        self._settling.discard(settlement.offset)
        if not settlement.committed.done():
            settlement.committed.set_result(committed)

    def _abandon(self) -> None:
        for settlement in self._queue:
            self._decide(settlement, committed=False)
        self._queue.clear()
        self.ledger.pending.clear()
        self._progress.close()
        _resolve(self._waiting)
        self._waiting.clear()

    def _too_large(self, records: Sequence[Outgoing]) -> str | None:
        for record in records:
            names, values = zip(*record.headers, strict=True) if record.headers else ((), ())
            size = _RECORD_OVERHEAD + len(record.key or b"") + len(record.value or b"") + _HEADER_OVERHEAD * len(names)
            size += len("".join(names).encode()) + sum(map(len, filter(None, values)))
            if size > self._max_record_bytes:
                return f"{record.topic}: {size} bytes are more than {self._max_record_bytes}"
        return None


def _resolve(waiting: list[asyncio.Future[None]]) -> None:
    for done in waiting:
        if not done.done():
            done.set_result(None)
