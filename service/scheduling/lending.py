"""Who lends blocks of the KV cache to whom: pure decisions over counts of blocks, and the books that they are kept in.

All models together may use so many bytes. Each has a floor, which it can have back whatever the others do; what it does
not use of it is lent to the one that runs. Only that one asks for more, so all others are idle while it does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Share:
    """A model's part, in blocks of ``block`` bytes.

    It can always have ``floor`` of them, and has ids for ``most``; ``granted`` are those that it may use now.
    """

    block: int
    floor: int
    most: int
    granted: int = 0

    @property
    def bytes_granted(self) -> int:
        return self.granted * self.block

    @property
    def borrowed(self) -> int:
        """Blocks that it has above its floor."""
        return max(0, self.granted - self.floor)


@dataclass(frozen=True, slots=True)
class Idle:
    """What an idle model has that it does not need just now, in its own blocks: ``free`` ones have no content,
    ``cached`` ones are known to the prefix cache only, ``held`` ones are its frozen requests'. The three make up what
    it may use, but for those that nobody can take. ``used`` grows with its last use.
    """

    key: int
    free: int
    cached: int
    held: int = 0
    used: float = 0.0


@dataclass(frozen=True, slots=True)
class Take:
    """Take blocks of an idle model away: those without content first, then the prefix cache's. ``held`` more are its
    requests', who lose theirs whole, so that it can be more.
    """

    key: int
    blocks: int
    held: int = 0


class Overdrawn(ValueError):
    """More was to be granted than there is."""


class Ledger:
    """What each model may use of ``total`` bytes.

    Always: no model has more than it has ids for, and all together have no more than ``total``, which is no less than
    what their floors come to.
    """

    def __init__(self, total: int = 0) -> None:
        self._total = total
        self._lends = True
        self._shares: dict[int, Share] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._shares

    def __getitem__(self, key: int) -> Share:
        return self._shares[key]

    @property
    def total(self) -> int:
        """Bytes; more than was said where the floors of those that are here come to more."""
        return max(self._total, sum(each.floor * each.block for each in self._shares.values()))

    @property
    def granted(self) -> int:
        """Bytes that all models together may use."""
        return sum(each.bytes_granted for each in self._shares.values())

    @property
    def unassigned(self) -> int:
        """Bytes that nobody may use."""
        return self.total - self.granted

    @property
    def lends(self) -> bool:
        """Whether anybody may have more than its floor."""
        return self._lends

    def close(self) -> None:
        """Nobody lends any more, and each floor is its model's own. Raises Overdrawn where something is borrowed."""
        if any(each.borrowed for each in self._shares.values()):
            raise Overdrawn("blocks are lent that have to come back first")
        self._lends, self._total = False, 0
        for key, share in self._shares.items():
            self._shares[key] = replace(share, most=min(share.most, share.floor))

    def join(self, key: int, share: Share) -> None:
        """A model that was loaded; nothing is granted to it yet."""
        self._shares[key] = replace(share, granted=0, most=share.most if self._lends else min(share.most, share.floor))

    def leave(self, key: int) -> None:
        """A model that was dropped lends all it has."""
        self._shares.pop(key, None)

    def grant(self, key: int, blocks: int) -> None:
        """Raises Overdrawn where there are no ids, or no bytes, for so many more."""
        share = self._shares[key]
        if share.granted + blocks > share.most or blocks * share.block > self.unassigned:
            raise Overdrawn(f"{blocks} blocks more can't be granted to {share}: {self.unassigned} bytes are left")
        self._shares[key] = replace(share, granted=share.granted + blocks)

    def withdraw(self, key: int, blocks: int) -> None:
        """Raises Overdrawn where it may not use so many."""
        share = self._shares[key]
        if blocks > share.granted:
            raise Overdrawn(f"{blocks} blocks can't be withdrawn from {share}")
        self._shares[key] = replace(share, granted=share.granted - blocks)


@dataclass(frozen=True, slots=True)
class Loan:
    """So many blocks can be granted once ``takes`` are made."""

    blocks: int
    takes: tuple[Take, ...] = ()


def loan(ledger: Ledger, key: int, blocks: int, idle: Iterable[Idle], *, least: int = 1) -> Loan:
    """How ``key`` comes to ``blocks`` more, or to as many as there are; with fewer than ``least`` it can do nothing.

    What nobody may use comes first, then blocks without content, then prefix caches, each of the models that were used
    least recently first. Where these are too few, requests of models that are above their floors lose theirs, for
    what ``key`` has below its own. Above its floor nothing is taken in vain; what it has below it is always its own.
    """
    due = max(0, ledger[key].floor - ledger[key].granted)
    others = sorted(idle, key=lambda each: each.used)
    found = _loan(ledger, key, blocks, others, due=0)
    if found.blocks < least and due > 0:
        found = _loan(ledger, key, least, others, due=due)
    if found.blocks < least:
        found = _loan(ledger, key, due, others, due=due)
    return found


def _loan(ledger: Ledger, key: int, blocks: int, others: Sequence[Idle], *, due: int) -> Loan:
    """As many as there are, ``due`` of them also at the cost of requests. The least recently used come first."""
    share = ledger[key]
    blocks = min(blocks, share.most - share.granted)
    takes = _Takes(ledger, missing=blocks * share.block - ledger.unassigned)
    for each in others:
        takes.take(each, each.free)
    for each in others:
        takes.take(each, each.cached)
    if (due := min(blocks, due)) > 0:
        takes.missing -= (blocks - due) * share.block
        for each in sorted(others, key=lambda each: -ledger[each.key].borrowed * ledger[each.key].block):
            above = ledger[each.key].borrowed - takes.taken(each.key)
            takes.take(each, min(each.held, above), held=True)
        takes.missing += (blocks - due) * share.block
    short = -(-max(0, takes.missing) // share.block)
    if short >= blocks:
        return Loan(0)
    return Loan(blocks - short, takes.made())


def returned(ledger: Ledger, idle: Sequence[Idle]) -> tuple[Take, ...]:
    """What has to be taken so that nobody has more than its floor. ``idle`` are all models."""
    takes = []
    for each in idle:
        above = ledger[each.key].borrowed
        blocks = min(above, each.free + each.cached)
        if above:
            takes.append(Take(each.key, blocks, held=above - blocks))
    return tuple(takes)


class _Takes:
    """Takes that are being gathered until nothing is ``missing``, in bytes."""

    def __init__(self, ledger: Ledger, missing: int) -> None:
        self.missing = missing
        self._ledger = ledger
        self._blocks: dict[int, int] = {}
        self._held: dict[int, int] = {}

    def taken(self, key: int) -> int:
        return self._blocks.get(key, 0) + self._held.get(key, 0)

    def take(self, idle: Idle, most: int, *, held: bool = False) -> None:
        size = self._ledger[idle.key].block
        blocks = min(most, -(-self.missing // size))
        if blocks > 0:
            of = self._held if held else self._blocks
            of[idle.key] = of.get(idle.key, 0) + blocks
            self.missing -= blocks * size

    def made(self) -> tuple[Take, ...]:
        keys = dict.fromkeys([*self._blocks, *self._held])
        return tuple(Take(key, self._blocks.get(key, 0), self._held.get(key, 0)) for key in keys)
