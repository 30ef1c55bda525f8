"""Which contexts stay on the device: pure decisions over budgets and sizes, all in bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.contexts import Tier


@dataclass(frozen=True, slots=True)
class Holding:
    """A context as the budgets see it. ``used`` grows with its last use; ``unfinished`` counts its requests."""

    alias: str
    tier: Tier
    weights: int
    kv: int
    used: float = 0.0
    unfinished: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Budgets:
    """What contexts may take. ``host`` None: as much as there is.

    ``shared``: host and device are one memory, in which a parked context's weights stay where they are.
    """

    device: int | None = None
    host: int | None = None
    shared: bool = False

    def on_device(self, holding: Holding) -> int:
        """Bytes that a context takes of the device."""
        if holding.tier is Tier.RESIDENT:
            return holding.weights + holding.kv
        return holding.weights if self.shared and holding.tier is Tier.PARKED else 0

    def on_host(self, holding: Holding) -> int:
        """Bytes that a context takes of the host."""
        return holding.weights if holding.tier is Tier.PARKED and not self.shared else 0


@dataclass(frozen=True, slots=True)
class Move:
    """Take a context to a lower tier. ``hand_back``: its requests go back to their callers as not started."""

    alias: str
    tier: Tier
    hand_back: bool = False


class NoRoom(ValueError):
    """The budgets can't hold a context, whatever else goes; the message has the figures."""


def make_room(
    holdings: Sequence[Holding], *, incoming: Holding, budgets: Budgets, beside: str | None = None
) -> tuple[Move, ...]:
    """The moves that let ``incoming`` become resident, least recently used contexts first.

    A context is parked rather than dropped, and one without requests is dropped before one whose requests must go
    back. Pinned contexts are not touched, nor is the one named ``beside``. Raises NoRoom where that is not enough.
    """
    others = {holding.alias: holding for holding in holdings if holding.alias != incoming.alias}
    need = incoming.weights + incoming.kv
    moves: list[Move] = []

    def device_over() -> int:
        used = sum(map(budgets.on_device, others.values()))
        return need + used - budgets.device if budgets.device is not None else 0

    def host_over() -> int:
        used = sum(map(budgets.on_host, others.values()))
        return used - budgets.host if budgets.host is not None else 0

    def go(holding: Holding, tier: Tier) -> None:
        moves.append(Move(holding.alias, tier, hand_back=tier is Tier.DROPPED and holding.unfinished > 0))
        others[holding.alias] = _at(holding, tier)

    for holding in _oldest_first(others.values(), Tier.RESIDENT):
        if device_over() > 0 and holding.alias != beside:
            go(holding, Tier.PARKED)
    for holding in _oldest_first(others.values(), Tier.PARKED):
        if host_over() > 0 or device_over() > 0:
            go(holding, Tier.DROPPED)
    if device_over() > 0:
        raise NoRoom(
            f"{incoming.alias} needs {_mib(need)} MiB of the device's {_mib(budgets.device or 0)} MiB, "
            f"and {_mib(device_over())} MiB of that are taken by what may not go"
        )
    return _last_only(moves)


def _oldest_first(holdings: Iterable[Holding], tier: Tier) -> list[Holding]:
    found = [holding for holding in holdings if holding.tier is tier and not holding.pinned]
    return sorted(found, key=lambda holding: (tier is Tier.PARKED and holding.unfinished > 0, holding.used))


def _at(holding: Holding, tier: Tier) -> Holding:
    return Holding(holding.alias, tier, holding.weights, holding.kv, holding.used, holding.unfinished, holding.pinned)


def _last_only(moves: list[Move]) -> tuple[Move, ...]:
    """A context that is parked only to be dropped is dropped at once."""
    last = {move.alias: move for move in moves}
    return tuple(last.values())


def share_of(budgets: Budgets, *, weights: Sequence[int], largest: int, models: int) -> int:
    """KV bytes for each of ``models`` models that name none: an equal part of what their weights leave.

    Where the weights of all don't fit at once, models take turns: what the largest one leaves, halved.
    """
    assert budgets.device is not None
    rest = budgets.device - sum(weights)
    return rest // models if rest // models >= budgets.device // 20 else (budgets.device - largest) // 2


def _mib(size: int) -> int:
    return -(-size >> 20)
