"""How much is delivered and not settled: what bounds this worker's memory."""

from dataclasses import dataclass

BYTES_PER_TOKEN = 4
"""Of a request as it is on the bus: what can be said before a tokenizer has seen it."""
_RESUME_AT = 0.75

Partition = tuple[str, int]
"""A topic and a partition of it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be outstanding; tokens are estimated from the requests' sizes."""

    requests: int
    bytes: int
    tokens: int


class InFlight:
    """Outstanding requests. ``full`` from any limit on, until all three are below three quarters of theirs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sizes: dict[Partition, dict[int, int]] = {}
        self.requests = 0
        self.bytes = 0
        self.full = False
        self.gone = 0
        """Requests that were settled or lost so far."""

    @property
    def tokens(self) -> int:
        """About how many tokens of prompt are outstanding."""
        return self.bytes // BYTES_PER_TOKEN

    @property
    def room(self) -> int:
        """How many more requests may come, as far as their number goes."""
        return max(0, self._limits.requests - self.requests)

    def add(self, partition: Partition, offset: int, size: int) -> None:
        """A request of ``size`` bytes was delivered."""
        self._sizes.setdefault(partition, {})[offset] = size
        self.requests += 1
        self.bytes += size
        self.full = self.full or self._share() >= 1

    def remove(self, partition: Partition, offset: int) -> None:
        """It is settled, or another's. Unknown ones are ignored."""
        size = self._sizes.get(partition, {}).pop(offset, None)
        if size is not None:
            self._give_back(1, size)

    def drop(self, partition: Partition) -> None:
        """The whole partition is another's."""
        sizes = self._sizes.pop(partition, {})
        self._give_back(len(sizes), sum(sizes.values()))

    def _give_back(self, requests: int, size: int) -> None:
        self.gone += requests
        self.requests -= requests
        self.bytes -= size
        self.full = self.full and self._share() >= _RESUME_AT

    def _share(self) -> float:
        limits = self._limits
        return max(self.requests / limits.requests, self.bytes / limits.bytes, self.tokens / limits.tokens)
