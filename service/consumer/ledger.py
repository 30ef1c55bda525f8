"""Which offsets of a partition are finished, and which runs were started: what a commit's metadata remembers.

Pure values; who reads and commits them is in ``writer``.
"""

import base64
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import sub
from typing import Self

from schemas.requests import Attempt
from service.errors import GearshiftError

MAX_METADATA = 4096
"""Characters that the broker takes in a commit's metadata (``offset.metadata.max.bytes``)."""
_PREFIX = "gs1."
_OURS = re.compile(r"gs(\d+)\.")
_MAX_RAW = (MAX_METADATA - len(_PREFIX)) // 4 * 3
_RUNS, _BITMAP = 0, 1
_ONE_RUN = 1 << 2
"""The mark of a single run, in company."""
_ALONE, _SEEN, _MOST_EVIDENCE = 1, 2, 3
"""What a run says against its request, should it end by a death: nothing in company."""
_NO_OFFSET = 1 << 62
"""Whatever says more was not written by us."""
_HEADER = 16
"""More bytes than epoch, shape and counts ever take."""


class UnknownLedger(GearshiftError):
    """A later version wrote this ledger; to take it for an empty one would repeat results."""


class Ledger:
    """Every offset below ``watermark`` is finished; of those above it, the runs of finished ones are kept.

    An offset that reading steps over (a transaction's marker, a compacted record) has no request, and counts as
    finished. ``pending`` are the offsets that were delivered here and are not finished; ``position`` is the next
    offset to read. ``epoch`` numbers the owners of the partition.
    """

    def __init__(self, watermark: int = 0, *, epoch: int = 0) -> None:
        self.watermark = watermark
        self.position = watermark
        self.epoch = epoch
        self.pending: set[int] = set()
        self._sized, self._ahead = -1, 0
        """The position for which the bytes of the runs ahead of it were counted, and they; -1: not these runs."""
        self._farthest = 0
        """Beyond whatever was delivered here."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._before: dict[int, tuple[int, int]] = {}
        """Runs that earlier owners started and that died with them, and the evidence that these are."""
        self._own: dict[int, int] = {}
        """The evidence that each run which was started here would be."""
        self._withdrawn: set[int] = set()
        """Offsets whose run here ended without a death, though what is committed may still say that it was started."""

    # --- what happens to an offset ---

    def deliver(self, offset: int) -> Attempt | None:
        """Reading came to this offset. The run that a delivery is, or None: finished, or delivered before."""
        if offset < self.position:
            return None
        self.reach(offset)
        self.position = offset + 1
        return self._hand_over(offset)

    def pick(self, offset: int) -> Attempt | None:
        """Hand an offset over before reading comes to it, as ``deliver`` would."""
        return None if offset < self.position else self._hand_over(offset)

    def reach(self, position: int) -> int:
        """Reading goes on at ``position``; how many unfinished offsets that gives up (gaps, or what retention took).

        What is pending here was picked before, and is finished when it is settled.
        """
        if position <= self.position:
            return 0
        here = sorted(offset for offset in self.pending if self.position <= offset < position)
        given_up = position - self.position - self._finished_between(self.position, position) - len(here)
        for offset in [offset for offset in self.marks if self.position <= offset < position]:
            if offset not in self.pending:
                self._unmark(offset)
        start = self.position
        for offset in (*here, position):
            self._finish_run(start, offset)
            start = offset + 1
        self.position = max(position, self.watermark)
        return given_up

    def start(self, offset: int, *, alone: bool = False) -> None:
        """Remember that a run of this offset began, or that the one under way here is (no longer) alone."""
        if not self.finished(offset):
            self._own[offset] = _ALONE if alone else 0
            self._withdrawn.discard(offset)

    def withdraw(self, offset: int) -> None:
        """Forget the run of this offset that was started here: it did not end by a death."""
        if self._own.pop(offset, None) is not None:
            self._withdrawn.add(offset)

    def engine_died(self, culprit: int | None) -> None:
        """The engine died, and its worker did not: the run at ``culprit`` had it to itself, and no other run here."""
        self._own = {offset: _SEEN if offset == culprit else 0 for offset in self._own}

    def evidence(self, offset: int) -> int:
        """How strongly the deaths at this offset point to it, as ``ports.Delivery`` has it."""
        return self._mark(offset)[1]

    def finish(self, offset: int) -> bool:
        """The offset is settled. False: it was already."""
        if self.finished(offset):
            return False
        self.pending.discard(offset)
        self._unmark(offset)
        self._finish_run(offset, offset + 1)
        return True

    def finished(self, offset: int) -> bool:
        if offset < self.watermark:
            return True
        index = bisect_right(self._starts, offset) - 1
        return index >= 0 and offset < self._ends[index]

    @property
    def marks(self) -> Mapping[int, int]:
        """Of each offset that is not finished, how many runs died or are under way."""
        return {offset: runs for offset, (runs, _) in self._marked().items()}

    @property
    def finished_above(self) -> int:
        """How many offsets above the watermark are finished."""
        return sum(self._ends) - sum(self._starts)

    def adopt(self, stored: Self) -> frozenset[int]:
        """Take over what was committed in our absence; which of the pending offsets that finishes."""
        before = frozenset(self.pending)
        for start, end in zip([0, *stored._starts], [stored.watermark, *stored._ends], strict=True):
            self._finish_run(start, end)
        self.pending = {offset for offset in self.pending if not self.finished(offset)}
        known = self.marks.keys() | self._withdrawn
        self._before |= {offset: mark for offset, mark in stored._before.items() if offset not in known}
        for offset in [offset for offset in self.marks if self.finished(offset)]:
            self._unmark(offset)
        self.epoch = max(self.epoch, stored.epoch)
        return before - self.pending

    # --- how it is kept ---

    def encode(self, finishing: Iterable[int] = (), *, own_marks: bool = True) -> tuple[int, str]:
        """The offset and the metadata to commit, as if the offsets ``finishing`` were finished too.

        Without ``own_marks``, the runs that were started here are left out: they are about to end without a death.
        At most MAX_METADATA characters as long as ``takes`` was asked before each delivery. Marks that find no
        room are left out, the highest offsets first.
        """
        draft = Ledger(self.watermark, epoch=self.epoch)
        draft._starts, draft._ends = self._starts.copy(), self._ends.copy()
        gone = set(finishing)
        for offset in gone:
            draft._finish_run(offset, offset + 1)
        marked = self._marked() if own_marks else self._before
        marks = sorted(
            (offset, runs << 2 | evidence) for offset, (runs, evidence) in marked.items() if offset not in gone
        )
        if not draft._starts and not marks and not draft.epoch:
            return draft.watermark, ""
        raw = bytearray(_varint(draft.epoch)) + draft._encode_runs()
        raw += _encode_marks(draft.watermark, marks, room=_MAX_RAW - len(raw))
        return draft.watermark, _PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")

    @classmethod
    def decode(cls, watermark: int, metadata: str | None) -> Self:
        """The ledger in a commit. Empty or foreign metadata is an empty ledger. Raises UnknownLedger."""
        ledger = cls(watermark)
        version = _OURS.match(metadata or "")
        if not metadata or version is None:
            return ledger
        if version[0] != _PREFIX:
            raise UnknownLedger(f"the commit at offset {watermark} has a ledger of version {version[1]}, not 1")
        text = metadata.removeprefix(_PREFIX)
        try:
            reader = _Reader(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
            ledger._read(reader)
        except (ValueError, IndexError):
            return cls(watermark)
        return (
            ledger
            if max(ledger.watermark, ledger.epoch, *ledger._ends, *ledger._before, 0) < _NO_OFFSET
            else cls(watermark)
        )

    def takes(self, more: int, *, upto: int = 0) -> bool:
        """Whether ``encode`` is sure to fit whatever happens to ``more`` further deliveries and to those pending.

        ``upto``: the deliveries may lie this far ahead.
        """
        pending = len(self.pending) + more
        farthest = max(self.position, upto, self._farthest, self._ends[-1] if self._ends else 0)
        window = farthest - self.watermark + more
        as_runs = self._size_ahead() + _worst(2 * (pending + 1), window)
        as_bitmap = window // 8 + 1
        return _HEADER + min(as_runs, as_bitmap) + _worst(pending, 2 * window) <= _MAX_RAW

    def room(self, offsets: Sequence[int]) -> int:
        """How many of the next offsets of the log, in their order, may be delivered now.

        At least one where nothing is pending: all below it is finished then, so the runs take no more bytes while it
        is pending than they do now, and fewer once it is finished. So a partition whose requests end is always read on.
        """
        if not offsets or self.takes(len(offsets), upto=offsets[-1] + 1):
            return len(offsets)
        fits = bisect_left(range(1, len(offsets)), True, key=lambda n: not self.takes(n, upto=offsets[n - 1] + 1))
        return fits or int(not self.pending)

    # --- inside ---

    def _hand_over(self, offset: int) -> Attempt | None:
        if offset in self.pending or self.finished(offset):
            return None
        self.pending.add(offset)
        self._farthest = max(self._farthest, offset + 1)
        return _attempt(self.epoch, self._mark(offset)[0] + 1)

    def _mark(self, offset: int) -> tuple[int, int]:
        """Runs and evidence, those of the run here included."""
        runs, evidence = self._before.get(offset, (0, 0))
        own = self._own.get(offset)
        return (runs, evidence) if own is None else (runs + 1, min(evidence + own, _MOST_EVIDENCE))

    def _marked(self) -> dict[int, tuple[int, int]]:
        return self._before | {offset: self._mark(offset) for offset in self._own}

    def _unmark(self, offset: int) -> None:
        self._before.pop(offset, None)
        self._own.pop(offset, None)
        self._withdrawn.discard(offset)

    def _finish_run(self, start: int, end: int) -> None:
        if start >= end:
            return
        self._sized = -1
        if start == self.watermark and not self._starts:  # as most are: in order, and nothing is finished above
            self.watermark, self.position = end, max(self.position, end)
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]
        while self._starts and self._starts[0] <= self.watermark:
            self.watermark = max(self.watermark, self._ends[0])
            del self._starts[0], self._ends[0]
        self.position = max(self.position, self.watermark)

    def _size_ahead(self) -> int:
        """Bytes of the runs beyond the position, each encoded as a distance and a length."""
        if not self._starts or self._starts[-1] < self.position:
            return 0
        if self._sized != self.position:
            first = bisect_left(self._starts, self.position)
            starts, ends = self._starts[first:], self._ends[first:]
            distances = map(sub, starts, [self.watermark, *ends])
            self._ahead = sum(map(_size, distances)) + sum(map(_size, map(sub, ends, starts)))
            self._sized = self.position
        return self._ahead

    def _finished_between(self, start: int, end: int) -> int:
        below = max(0, min(self.watermark, end) - start)
        runs = zip(self._starts, self._ends, strict=True)
        return below + sum(max(0, min(last, end) - max(first, start)) for first, last in runs)

    def _encode_runs(self) -> bytes:
        runs = bytearray()
        previous = self.watermark
        for start, end in zip(self._starts, self._ends, strict=True):
            runs += _varint(start - previous) + _varint(end - start)
            previous = end
        size = (previous - self.watermark + 7) // 8
        if len(runs) <= size:
            return bytes([_RUNS]) + _varint(len(self._starts)) + runs
        bits = 0
        for start, end in zip(self._starts, self._ends, strict=True):
            bits |= ((1 << (end - start)) - 1) << (start - self.watermark)
        return bytes([_BITMAP]) + _varint(size) + bits.to_bytes(size, "little")

    def _read(self, reader: "_Reader") -> None:
        self.epoch = reader.varint()
        if reader.byte() == _RUNS:
            end = self.watermark
            for _ in range(reader.varint()):
                start = end + reader.varint()
                end = start + reader.varint()
                self._finish_run(start, end)
        else:
            bits = reader.take(reader.varint())
            base = self.watermark
            for index in range(8 * len(bits)):
                if bits[index >> 3] >> (index & 7) & 1:
                    self._finish_run(base + index, base + index + 1)
        offset = self.watermark
        while not reader.done:
            step = reader.varint()
            offset += step >> 1
            mark = reader.varint() if step & 1 else _ONE_RUN
            self._before[offset] = mark >> 2, mark & _MOST_EVIDENCE


@lru_cache(maxsize=1024)
def _attempt(epoch: int, n: int) -> Attempt:
    """Most requests of a partition have the same."""
    return Attempt(epoch=epoch, n=n)


def _encode_marks(watermark: int, marks: Iterable[tuple[int, int]], *, room: int) -> bytes:
    """Each as the distance from the one before, doubled; odd where more than one run in company follows.

    What follows are the runs times four, and the evidence.
    """
    raw = bytearray()
    previous = watermark
    for offset, runs in marks:
        more = runs != _ONE_RUN
        mark = _varint((offset - previous) << 1 | more) + (_varint(runs) if more else b"")
        if len(raw) + len(mark) > room:
            break
        raw += mark
        previous = offset
    return bytes(raw)


def _worst(count: int, total: int) -> int:
    """The most bytes that ``count`` varints can take whose sum is at most ``total``."""
    size, step = count, 7
    while total >> step:
        size += min(count, total >> step)
        step += 7
    return size


def _size(value: int) -> int:
    """The bytes of a varint."""
    return max(1, (value.bit_length() + 6) // 7)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Reader:
    """Raises IndexError where the bytes end too early."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at >= len(self._raw)

    def byte(self) -> int:
        self._at += 1
        return self._raw[self._at - 1]

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._raw):
            raise IndexError
        self._at += count
        return self._raw[self._at - count : self._at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
