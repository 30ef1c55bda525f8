"""A sorted sequence that counts: what stands before a key, in items and in tokens."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=tuple[float, ...])
_BLOCK = 128


class Ordered(Generic[K]):
    """Distinct keys in ascending order, each with a size.

    Keys lie in blocks of at most 256, so that an operation moves one block and sums over the blocks before it:
    a few microseconds with a hundred thousand keys.
    """

    __slots__ = ("_blocks", "_firsts", "_sizes", "_tokens", "length", "tokens")

    def __init__(self) -> None:
        self._blocks: list[list[K]] = []
        self._firsts: list[K] = []
        self._sizes: dict[K, int] = {}
        self._tokens: list[int] = []
        self.length = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[K]:
        for block in self._blocks:
            yield from block

    def first(self) -> K | None:
        return self._blocks[0][0] if self._blocks else None

    def at_least(self, key: K) -> K | None:
        """The smallest key that is not below ``key``."""
        index = self._block_of(key)
        for block in self._blocks[index : index + 2]:
            place = bisect_left(block, key)
            if place < len(block):
                return block[place]
        return None

    def below(self, key: K) -> K | None:
        """The greatest key that is below ``key``."""
        index = bisect_left(self._firsts, key)
        if index == 0:
            return None
        block = self._blocks[index - 1]
        return block[bisect_left(block, key) - 1]

    def before(self, key: K) -> tuple[int, int]:
        """How many keys are below ``key``, and their sizes together."""
        if not self._blocks:
            return 0, 0
        index = self._block_of(key)
        block = self._blocks[index]
        place = bisect_left(block, key)
        count = sum(map(len, self._blocks[:index])) + place
        return count, sum(self._tokens[:index]) + sum(map(self._sizes.__getitem__, block[:place]))

    def add(self, key: K, size: int = 0) -> None:
        self._sizes[key] = size
        self.length += 1
        self.tokens += size
        if not self._blocks:
            self._blocks.append([key])
            self._firsts.append(key)
            self._tokens.append(size)
            return
        index = self._block_of(key)
        block = self._blocks[index]
        insort(block, key)
        self._firsts[index] = block[0]
        self._tokens[index] += size
        if len(block) > 2 * _BLOCK:
            self._split(index)

    def discard(self, key: K) -> None:
        size = self._sizes.pop(key, None)
        if size is None:
            return
        index = self._block_of(key)
        block = self._blocks[index]
        del block[bisect_left(block, key)]
        self.length -= 1
        self.tokens -= size
        if block:
            self._firsts[index] = block[0]
            self._tokens[index] -= size
        else:
            del self._blocks[index], self._firsts[index], self._tokens[index]

    def _block_of(self, key: K) -> int:
        """The block that holds ``key``, or would."""
        index = bisect_left(self._firsts, key)
        if index < len(self._firsts) and self._firsts[index] == key:
            return index
        return max(0, index - 1)

    def _split(self, index: int) -> None:
        block = self._blocks[index]
        upper = block[_BLOCK:]
        del block[_BLOCK:]
        moved = sum(self._sizes[key] for key in upper)
        self._tokens[index] -= moved
        self._blocks.insert(index + 1, upper)
        self._firsts.insert(index + 1, upper[0])
        self._tokens.insert(index + 1, moved)
