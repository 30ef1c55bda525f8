"""Which contexts give their memory back so that another one fits: pure decisions over budgets and sizes, in bytes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from schemas.contexts import Tier

_FOR_OVERHEAD = 10
"""One part in so many of a device is left to graphs and workspaces where KV caches are planned."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A context as the budgets see it.

    ``overhead`` is what it has on the device beside weights and KV cache (graphs, workspaces), which stays there while
    it is parked; ``host`` what its copies take of the host, wherever it is; ``copies`` what those of its weights will
    take once it is parked, 0 where that was not measured; ``kept`` what of its KV cache outlives parking. ``parks``:
    whether it can be parked at all; otherwise it is dropped. ``used`` grows with its last use. ``next_use`` ranks when
    it is expected to run again, soonest smallest; infinity: nobody asks for it. ``bring_back_s`` is what bringing it
    back took, ``unfinished`` counts its requests.
    """

    alias: str
    tier: Tier
    weights: int
    kv: int
    used: float = 0.0
    unfinished: int = 0
    pinned: bool = False
    next_use: float = math.inf
    bring_back_s: float = 1.0
    overhead: int = 0
    host: int = 0
    copies: int = 0
    kept: int = 0
    parks: bool = True

    @property
    def resident_bytes(self) -> int:
        """What it takes of the device where it is resident."""
        return self.weights + self.kv + self.overhead

    @property
    def worth(self) -> tuple[float, float]:
        """What keeping it saves per byte, sooner uses counting more; of those that nobody asks for, the last used."""
        saves = self.bring_back_s * (1 + self.unfinished) / max(1, self.resident_bytes)
        return saves / (1 + self.next_use), self.used


@dataclass(frozen=True, slots=True)
class Budgets:
    """What contexts may take. None: as much as there is.

    ``shared``: host and device are one memory, in which a parked context's weights stay where they are, and what it
    keeps of its KV cache: that counts for both.
    ``utilization``: the share of the device that ``device`` is, where it was said as vLLM's gpu_memory_utilization.
    """

    device: int | None = None
    host: int | None = None
    shared: bool = False
    utilization: float | None = None

    @property
    def to_share(self) -> int | None:
        """What models may plan with that are not loaded yet: their graphs and workspaces are known when they are."""
        if self.device is None or self.shared:
            return self.device
        return self.device - self.device // _FOR_OVERHEAD

    def on_device(self, holding: Holding) -> int:
        """Bytes that a context takes of the device."""
        if holding.tier is Tier.RESIDENT:
            return holding.resident_bytes
        if holding.tier is Tier.PARKED:
            return holding.overhead + (holding.weights + holding.kept if self.shared else 0)
        return 0

    def on_host(self, holding: Holding) -> int:
        """Bytes that a context takes of the host."""
        if holding.tier is Tier.DROPPED:
            return 0
        kept = holding.kept if holding.tier is Tier.PARKED else 0
        if self.shared:
            return kept
        copies = (holding.copies or holding.weights) + kept if holding.tier is Tier.PARKED else 0
        return max(holding.host, copies)


@dataclass(frozen=True, slots=True)
class Keep:
    """What of a KV cache may outlive parking: ``most`` bytes (None: as many as there are) of what unfinished requests
    have, and of the prefix cache, too, where ``cached``.
    """

    most: int | None = None
    cached: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """Take a context to a lower tier, or let a parked one's KV cache go. ``hand_back``: its requests go back to their
    callers as not started.
    """

    alias: str
    tier: Tier
    hand_back: bool = False


class NoRoom(ValueError):
    """The budgets can't hold a context, whatever else goes; the message has the figures."""


def make_room(
    holdings: Iterable[Holding], *, incoming: Holding, budgets: Budgets, beside: str | None = None
) -> tuple[Move, ...]:
    """The moves that let ``incoming`` become resident, what is worth least first, and no more than are needed.

    A context is parked rather than dropped where it can be, parked ones let their KV caches go before any is dropped,
    and one without requests is dropped before one whose requests must go back. Pinned contexts are not touched, nor is
    the one named ``beside``. Raises NoRoom where that is not enough.
    """
    room = _Room({each.alias: each for each in holdings if each.alias != incoming.alias}, incoming, budgets)
    before = dict(room.others)
    for holding in _least_worth_first(before.values(), Tier.RESIDENT):
        if room.device_over > 0 and holding.alias != beside:
            room.lower(holding.alias, Tier.PARKED if holding.parks else Tier.DROPPED)
    room.spare_the_dearest(before)
    for holding in _least_worth_first(room.others.values(), Tier.PARKED):
        if room.host_over > 0 or room.device_over > 0:
            room.let_kv_go(holding.alias)
    for holding in _least_worth_first(room.others.values(), Tier.PARKED):
        if room.host_over > 0 or room.device_over > 0:
            room.lower(holding.alias, Tier.DROPPED)
    if room.device_over > 0:
        raise NoRoom(room.explain(before.values()))
    return tuple(
        Move(alias, after.tier, hand_back=after.tier is Tier.DROPPED and after.unfinished > 0)
        for alias, after in room.others.items()
        if after != before[alias]
    )


def room_to_keep(
    holdings: Iterable[Holding],
    alias: str,
    *,
    budgets: Budgets,
    incoming: Holding | None = None,
    moves: Sequence[Move] = (),
) -> Keep:
    """What a context may keep of its KV cache while it is parked, once ``moves`` are made and ``incoming`` is there.

    The prefix cache is kept where a budget of the host's says how far; without one parking is to give memory back.
    """
    planned = {move.alias: move.tier for move in moves}
    if planned.get(alias, Tier.PARKED) is not Tier.PARKED:
        return Keep(0)
    after = []
    for each in holdings:
        if incoming is not None and each.alias == incoming.alias:
            continue
        tier = planned.get(each.alias, each.tier)
        after.append(_without_kv(replace(each, tier=Tier.PARKED)) if each.alias == alias else replace(each, tier=tier))
    if incoming is not None:
        after.append(replace(incoming, tier=Tier.RESIDENT))
    room = []
    if budgets.device is not None and budgets.shared:
        room.append(budgets.device - sum(map(budgets.on_device, after)))
    if budgets.host is not None:
        room.append(budgets.host - sum(map(budgets.on_host, after)))
    return Keep(max(0, min(room)) if room else None, cached=budgets.host is not None)


def _without_kv(holding: Holding) -> Holding:
    """A context that keeps nothing of its KV cache, neither in its place nor as copies."""
    return replace(holding, kept=0, host=max(0, holding.host - holding.kept))


@dataclass(frozen=True, slots=True)
class Idle:
    """How long a context has had no request, and after how long it goes; None: never. Seconds."""

    alias: str
    tier: Tier
    seconds: float
    park_after: float | None = None
    drop_after: float | None = None


def overdue(contexts: Iterable[Idle]) -> tuple[Move, ...]:
    """Which contexts have been idle for longer than they may. The caller leaves out what must stay."""
    moves = []
    for each in contexts:
        if each.drop_after is not None and each.seconds >= each.drop_after and each.tier is not Tier.DROPPED:
            moves.append(Move(each.alias, Tier.DROPPED))
        elif each.park_after is not None and each.seconds >= each.park_after and each.tier is Tier.RESIDENT:
            moves.append(Move(each.alias, Tier.PARKED))
    return tuple(moves)


def share_of(budgets: Budgets, *, weights: Sequence[int], models: int, taken: int = 0) -> int:
    """KV bytes for each of ``models`` models that name none: an equal part of what is left by all weights, and by
    ``taken``, the KV caches that others name.

    Where they don't fit at once, models take turns: what the largest one's weights leave, halved.
    """
    assert budgets.to_share is not None
    device = budgets.to_share
    rest = device - sum(weights) - taken
    return rest // models if rest // models >= device // 20 else (device - max(weights)) // 2


@dataclass(slots=True)
class _Room:
    """The contexts beside a newcomer, on the tiers that are being tried."""

    others: dict[str, Holding]
    incoming: Holding
    budgets: Budgets

    @property
    def device_over(self) -> int:
        """Bytes by which the device's budget is exceeded; negative: what is free."""
        if self.budgets.device is None:
            return 0
        used = sum(map(self.budgets.on_device, self.others.values()))
        return self.incoming.resident_bytes + used - self.budgets.device

    @property
    def host_over(self) -> int:
        if self.budgets.host is None:
            return 0
        return sum(map(self.budgets.on_host, self.others.values())) - self.budgets.host

    def lower(self, alias: str, tier: Tier) -> None:
        self.others[alias] = replace(self.others[alias], tier=tier)

    def let_kv_go(self, alias: str) -> None:
        self.others[alias] = _without_kv(self.others[alias])

    def spare_the_dearest(self, before: dict[str, Holding]) -> None:
        """Leave those where they were that turn out not to be needed, once a larger one has gone too."""
        lowered = [alias for alias, each in self.others.items() if each.tier is not before[alias].tier]
        for alias in sorted(lowered, key=lambda alias: before[alias].worth, reverse=True):
            self.others[alias], tried = before[alias], self.others[alias]
            if self.device_over > 0:
                self.others[alias] = tried

    def explain(self, before: Iterable[Holding]) -> str:
        stays = [each for each in before if self.budgets.on_device(self.others[each.alias])]
        kept = ", ".join(f"{each.alias} {_mib(self.budgets.on_device(self.others[each.alias]))} MiB" for each in stays)
        return (
            f"{self.incoming.alias} needs {_mib(self.incoming.resident_bytes)} MiB "
            f"of the device's {_mib(self.budgets.device or 0)} MiB" + (f"; what may not go: {kept}" if kept else "")
        )


def _least_worth_first(holdings: Iterable[Holding], tier: Tier) -> list[Holding]:
    found = [holding for holding in holdings if holding.tier is tier and not holding.pinned]
    return sorted(found, key=lambda holding: (tier is Tier.PARKED and holding.unfinished > 0, holding.worth))


def _mib(size: int) -> int:
    return -(-size >> 20)
