"""Requests that wait, one queue per model: priority first, tenants by weight, first come first served."""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from schemas.base import immutable
from service.scheduling.ordered import Ordered

T = TypeVar("T")
_DEBTORS = 1000
"""Tenants of one queue and priority that are remembered though nothing of theirs waits, for what they were served."""
_CANDIDATES, _SKIPPED = 4, 64
"""How many of the nearest deadlines are looked at for one that its place in the queue would be too late for, and how
many of requests that stand aside are passed on the way."""
_PASSED_OVER = 8
"""Of those that are begun, at most every so manieth is one that has stood aside for long."""
_RECENT = 1024
"""Of the requests with an objective, how many of the last ones are remembered."""
_Turn = tuple[float, float, float, float]
"""Priority, standing, virtual start, arrival number: the order in which a queue is served."""
_PRIORITY, _STANDING, _START = 0, 1, 2
_InLine = tuple[float, float, float]
"""The number of a tenant, virtual start, arrival number."""
_Time = tuple[float, float]
"""A time and an arrival number, or a tenant's."""


class Standing(IntEnum):
    """Of a waiting request with an objective, whether it has its turn or stands aside for others of its priority."""

    IN_TURN = 0
    DEAR = 1
    """It costs more than the device has time for just now."""
    LATE = 2
    """It can't meet its objective any more."""


@immutable
class Waiting(Generic[T]):
    """A request that waits for its model. Times are seconds of one clock, the caller's.

    ``tokens`` is what the request may cost, prompt and answer together. A smaller ``priority`` runs earlier.
    """

    id: str
    alias: str
    payload: T
    arrived: float
    tokens: int = 1
    priority: int = 0
    deadline: float | None = None
    tenant: str = ""
    first_by: float | None = None
    """When its first token must be there for its objective to be met."""
    ttft_s: float = math.inf
    """What the objective allows for that since it was asked, which may be long before it was read; infinity: none."""
    tpot_s: float = math.inf
    """What the objective allows for each further token; infinity: it has none, or no tokens."""
    prompt: int = 0
    """Of ``tokens``, those of the prompt."""

    @property
    def answer(self) -> int:
        """The most that it may be answered with, in tokens."""
        return max(0, self.tokens - self.prompt)


class Came(NamedTuple):
    """What is remembered of a request with an objective. Seconds of the queues' clock, and tokens."""

    at: float
    alias: str
    priority: int
    prompt: int
    answer: int
    """The most that it may be answered with."""
    tpot_s: float


@dataclass(frozen=True, slots=True)
class QueueView:
    """A queue as the policy sees it. ``nearest_deadline`` is the first that can still be met."""

    requests: int = 0
    tokens: int = 0
    oldest: float = math.inf
    nearest_deadline: float = math.inf
    best_priority: int | None = None
    due: int = 0
    """Requests whose deadline can still be met."""
    undated: int = 0
    """Requests without a deadline."""


EMPTY = QueueView()


@immutable
class Place:
    """Where a waiting request stands in its model's queue: 0 is next."""

    position: int
    tokens_ahead: int


@dataclass(frozen=True, slots=True)
class Speed:
    """How soon a model answers, were it to run from ``now`` on: seconds per request, tokens per second of its batch."""

    now: float
    request_s: float
    tokens_s: float

    def reaches(self, tokens_ahead: float) -> float:
        """When a request with so many tokens before it would be answered, at the earliest."""
        return self.now + tokens_ahead / self.tokens_s + self.request_s / 2


@dataclass(slots=True)
class _Account:
    """A tenant's, in the virtual time of one level."""

    number: float
    """The tenant's own, in the level's line."""
    had: float
    """Up to where it has had its share by what was taken: the start of what is taken next."""
    finish: float
    """Up to where it has had it once all that waits is taken."""
    waiting: int = 0
    cost: float = 0.0
    """What waits, together."""


@dataclass(slots=True)
class _Level:
    """Start-time fair queueing among the tenants of one priority: whoever had least for its weight goes first.

    A start is given when a request comes, behind all that its tenant has waiting. What is withdrawn is nobody's
    share: the first of the tenant in turn moves up to where its share has got to, and the others follow as they become
    the first. An account is kept while something of the tenant waits; then for those with most to make up for, DEBTORS
    of them.
    """

    now: float = 0.0
    waiting: int = 0
    accounts: dict[str, _Account] = field(default_factory=dict)
    line: Ordered[_InLine] = field(default_factory=Ordered)
    """Those that have their turn, by tenants."""
    debts: Ordered[_Time] = field(default_factory=Ordered)
    """Of tenants of whom nothing waits, what they have had, with their numbers."""
    _names: dict[float, str] = field(default_factory=dict)

    def start(self, tenant: str) -> float:
        """The virtual start of the tenant's next request."""
        account = self.accounts.get(tenant)
        return self.now if account is None else max(self.now, account.finish)

    def admit(self, tenant: str, cost: float, number: float) -> float:
        """The virtual start of a request, no sooner than of those that are before it."""
        start = self.start(tenant)
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = _Account(number, start, start)
            self._names[number] = tenant
        if not account.waiting:
            self.debts.discard((account.finish, account.number))
        account.finish = start + cost
        account.waiting += 1
        account.cost += cost
        self.waiting += 1
        last = self.line.below((account.number, math.inf, math.inf))
        if last is not None and last[0] == account.number:
            start = max(start, last[1])
        self.line.add((account.number, start, number))
        return start

    def leave(self, tenant: str, cost: float, start: float, number: float, *, served: bool, in_turn: bool) -> None:
        """One of ``tenant`` goes: who was served owes for it, who withdraws does not.

        One that was served before its turn does not move the virtual time on.
        """
        account = self.accounts[tenant]
        self.line.discard((account.number, start, number))
        account.waiting -= 1
        account.cost = account.cost - cost if account.waiting else 0.0
        self.waiting -= 1
        if served:
            account.had = max(account.had, min(start, self.now)) + cost
        if served and in_turn:
            self.now = max(self.now, start)
        account.finish = min(account.finish, max(self.now, account.had) + account.cost)
        if not account.waiting:
            self.debts.add((account.finish, account.number))
        self._forget()

    def stand(self, tenant: str, start: float, number: float, *, aside: bool) -> None:
        """One of ``tenant`` stands aside from now on, or has its turn."""
        place = (self.accounts[tenant].number, start, number)
        self.line.discard(place)
        if not aside:
            self.line.add(place)

    def advance(self, tenant: str) -> tuple[float, float] | None:
        """Move the first of ``tenant`` that has its turn up to where its share has got to: its start then, its number.

        None where it is there.
        """
        account = self.accounts.get(tenant)
        first = None if account is None else self.line.at_least((account.number, -math.inf, 0.0))
        if account is None or first is None or first[0] != account.number:
            return None
        start = max(self.now, account.had)
        if start >= first[1]:
            return None
        self.line.discard(first)
        self.line.add((account.number, start, first[-1]))
        return start, first[-1]

    def _forget(self) -> None:
        """Forget tenants that owe nothing any more, and those that owe least where there are too many."""
        while (least := self.debts.first()) is not None and (least[0] <= self.now or len(self.debts) > _DEBTORS):
            self.debts.discard(least)
            del self.accounts[self._names.pop(least[1])]


class _Queue(Generic[T]):
    """The requests of one model."""

    __slots__ = ("arrivals", "aside", "deadlines", "levels", "order", "rescued", "since_aside")

    def __init__(self) -> None:
        self.order: Ordered[_Turn] = Ordered()
        self.arrivals: OrderedDict[float, float] = OrderedDict()
        """When each came, by its number."""
        self.deadlines: Ordered[_Time] = Ordered()
        self.levels: dict[int, _Level] = {}
        self.aside: dict[float, None] = {}
        """The numbers of those that stand aside; whoever has done so for longest is first."""
        self.since_aside = 0
        """How many have been taken since one that stood aside was."""
        self.rescued = False
        """Whether the last one taken was taken before its turn."""


class Queues(Generic[T]):
    """All requests that wait. Nothing here looks at a clock."""

    def __init__(self, *, tenant_weights: Mapping[str, float] | None = None) -> None:
        self._tenant_weights = tenant_weights or {}
        self._queues: dict[str, _Queue[T]] = {}
        self._items: dict[str, tuple[Waiting[T], _Turn]] = {}
        self._ids: dict[float, str] = {}
        self._arrivals = 0
        self.objectives = 0
        """How many of those that wait have an objective."""
        self.came: deque[Came] = deque(maxlen=_RECENT)
        """The last requests with an objective, whatever has become of them."""
        self._fresh: dict[str, None] = {}
        self._dear: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._items)

    @property
    def tokens(self) -> int:
        return sum(queue.order.tokens for queue in self._queues.values())

    @property
    def aliases(self) -> tuple[str, ...]:
        """The models for which something waits."""
        return tuple(self._queues)

    def admit(self, item: Waiting[T]) -> bool:
        """Let ``item`` wait. True where it makes its queue more urgent: the schedule should be decided again.

        Raises ValueError for an id that waits already.
        """
        if item.id in self._items:
            raise ValueError(f"request {item.id!r} waits already")
        queue = self._queues.get(item.alias)
        if queue is None:
            queue = self._queues[item.alias] = _Queue()
        level = queue.levels.get(item.priority)
        if level is None:
            level = queue.levels[item.priority] = _Level()
        self._arrivals += 1
        number = float(self._arrivals)
        turn = (float(item.priority), 0.0, level.admit(item.tenant, self._cost(item), number), number)
        self._items[item.id] = (item, turn)
        self._ids[number] = item.id
        front = queue.order.first()
        due = queue.deadlines.first()
        queue.order.add(turn, item.tokens)
        queue.arrivals[number] = item.arrived
        if item.deadline is not None:
            queue.deadlines.add((item.deadline, number))
        if item.first_by is not None:
            self.objectives += 1
            came = Came(item.arrived, item.alias, item.priority, item.prompt, item.answer, item.tpot_s)
            self.came.append(came)
            self._fresh[item.id] = None
        more_urgent = item.deadline is not None and (due is None or item.deadline < due[0])
        return front is None or turn[:_START] < front[:_START] or more_urgent

    def take(
        self, alias: str, n: int = 1, *, speed: Speed | None = None, since: float = -math.inf, aside: int = 0
    ) -> list[Waiting[T]]:
        """Remove and return the next ``n`` requests of a model.

        Those that stand aside are left, but for ``aside`` of them at the end, and where one of a worse priority does
        not. Every other one, at most, goes before its turn: the nearest deadline that can still be met, where its place
        would miss it (it is what the policy may have switched for); without ``speed``, no deadline does. Every eighth
        may be one that stands aside and came before ``since``. Whose tenant has had its share then, so over time the
        shares are the same.
        """
        taken: list[Waiting[T]] = []
        while len(taken) < n and (queue := self._queues.get(alias)) is not None:
            turn = queue.order.first()
            assert turn is not None, "a queue without requests is forgotten"
            early = self._passed_over(queue, since) or (None if queue.rescued else self._urgent(queue, speed))
            if early is None and len(queue.order) == len(queue.aside):
                if aside <= 0:
                    break
                aside -= 1
            served = early or turn
            queue.rescued = early is not None
            queue.since_aside = 0 if served[-1] in queue.aside else queue.since_aside + 1
            taken.append(self._withdraw(self._ids[served[-1]], served=True, in_turn=early is None))
        return taken

    def fresh(self) -> list[Waiting[T]]:
        """Those with an objective that came since this was asked last."""
        fresh, self._fresh = self._fresh, {}
        return [self._items[request_id][0] for request_id in fresh]

    def dear(self, n: int) -> list[Waiting[T]]:
        """Up to ``n`` of those that are too dear, those first that have been so for longest."""
        return [self._items[request_id][0] for request_id in islice(self._dear, n)]

    def place_as(self, request_id: str, standing: Standing) -> None:
        """Its standing from now on: behind all of its model and priority whose standing is better."""
        item, turn = self._items[request_id]
        if turn[_STANDING] == standing:
            return
        queue = self._queues[item.alias]
        queue.order.discard(turn)
        turn = (turn[_PRIORITY], float(standing), turn[_START], turn[-1])
        queue.order.add(turn, item.tokens)
        self._items[request_id] = item, turn
        if standing is Standing.DEAR:
            self._dear[request_id] = None
        else:
            self._dear.pop(request_id, None)
        if standing is Standing.IN_TURN:
            del queue.aside[turn[-1]]
        else:
            queue.aside[turn[-1]] = None
        level = queue.levels[item.priority]
        level.stand(item.tenant, turn[_START], turn[-1], aside=standing is not Standing.IN_TURN)
        self._advance(queue, level, item.tenant)

    def standing(self, request_id: str) -> Standing | None:
        """How one that waits stands; None for another one."""
        found = self._items.get(request_id)
        return None if found is None else Standing(int(found[1][_STANDING]))

    def in_turn(self, alias: str, n: int) -> list[Waiting[T]]:
        """The next ``n`` requests of a model at most, up to the last one that does not stand aside."""
        found: list[Waiting[T]] = []
        queue = self._queues.get(alias)
        left = 0 if queue is None else len(queue.order) - len(queue.aside)
        for turn in queue.order if queue is not None and left else ():
            found.append(self._items[self._ids[turn[-1]]][0])
            left -= not turn[_STANDING]
            if not left or len(found) == n:
                break
        return found

    def _passed_over(self, queue: _Queue[T], since: float) -> _Turn | None:
        """Who has stood aside for longest, if it came before then and its time has come."""
        number = next(iter(queue.aside), None)
        if number is None or queue.since_aside < _PASSED_OVER - 1:
            return None
        item, turn = self._items[self._ids[number]]
        return turn if item.arrived < since else None

    def _urgent(self, queue: _Queue[T], speed: Speed | None) -> _Turn | None:
        """Of the nearest deadlines that can be met, the first that its place would miss, unless it stands aside."""
        if speed is None:
            return None
        key: _Time = (speed.reaches(0), 0.0)
        last = speed.reaches(queue.order.tokens)
        candidates = _CANDIDATES
        for _ in range(_SKIPPED):
            found = queue.deadlines.at_least(key)
            if found is None or found[0] >= last or not candidates:  # any place meets what is later than the last
                return None
            if found[1] not in queue.aside:
                candidates -= 1
                _, turn = self._items[self._ids[found[1]]]
                if found[0] < speed.reaches(queue.order.before(turn)[1]):
                    return turn
            key = (found[0], math.nextafter(found[1], math.inf))
        return None

    def turn_begins(self, alias: str) -> None:
        """The model is active from now on: the first to be taken may be one whose deadline presses."""
        if (queue := self._queues.get(alias)) is not None:
            queue.rescued = False

    def end(self, alias: str) -> Place:
        """Behind all that wait for a model."""
        queue = self._queues.get(alias)
        return Place(0, 0) if queue is None else Place(len(queue.order), queue.order.tokens)

    def prospect(self, item: Waiting[T]) -> Place:
        """Where ``item`` would stand if it were admitted now."""
        queue = self._queues.get(item.alias)
        if queue is None:
            return Place(0, 0)
        level = queue.levels.get(item.priority)
        start = 0.0 if level is None else level.start(item.tenant)
        return Place(*queue.order.before((float(item.priority), 0.0, start, math.inf)))

    def remove(self, request_id: str) -> Waiting[T] | None:
        """Cancel a waiting request."""
        return self._withdraw(request_id, served=False) if request_id in self._items else None

    def expired(self, now: float) -> list[Waiting[T]]:
        """Remove and return what can't be answered in time any more, earliest deadline first per model."""
        gone: list[Waiting[T]] = []
        for alias in list(self._queues):
            while (queue := self._queues.get(alias)) is not None:
                due = queue.deadlines.first()
                if due is None or due[0] > now:
                    break
                gone.append(self._withdraw(self._ids[due[1]], served=False))
        return gone

    def place(self, request_id: str) -> Place | None:
        found = self._items.get(request_id)
        if found is None:
            return None
        item, turn = found
        count, tokens = self._queues[item.alias].order.before(turn)
        return Place(position=count, tokens_ahead=tokens)

    def position(self, request_id: str) -> int | None:
        place = self.place(request_id)
        return place.position if place else None

    def view(self, alias: str, *, reachable: float = -math.inf) -> QueueView:
        """A queue as values. Deadlines before ``reachable`` are left out: no schedule can meet them."""
        queue = self._queues.get(alias)
        if queue is None:
            return EMPTY
        turn, oldest = queue.order.first(), next(iter(queue.arrivals.values()))
        assert turn is not None
        nearest, due = math.inf, 0
        if len(queue.deadlines):
            key = (reachable, 0.0)
            first = queue.deadlines.at_least(key)
            nearest = first[0] if first else math.inf
            due = len(queue.deadlines) - queue.deadlines.before(key)[0]
        undated = len(queue.order) - len(queue.deadlines)
        return QueueView(len(queue.order), queue.order.tokens, oldest, nearest, int(turn[_PRIORITY]), due, undated)

    def waiting(self, alias: str) -> Iterable[Waiting[T]]:
        """The requests of a model in the order in which they will be taken."""
        queue = self._queues.get(alias)
        return (self._items[self._ids[turn[-1]]][0] for turn in queue.order) if queue else ()

    def _cost(self, item: Waiting[T]) -> float:
        """What it is of its tenant's share."""
        return max(1, item.tokens) / self._tenant_weights.get(item.tenant, 1.0)

    def _advance(self, queue: _Queue[T], level: _Level, tenant: str) -> None:
        """Whoever is a tenant's first has its place by what the tenant has had."""
        if (moved := level.advance(tenant)) is None:
            return
        start, number = moved
        item, turn = self._items[self._ids[number]]
        queue.order.discard(turn)
        turn = (turn[_PRIORITY], turn[_STANDING], start, number)
        queue.order.add(turn, item.tokens)
        self._items[item.id] = item, turn

    def _withdraw(self, request_id: str, *, served: bool, in_turn: bool = True) -> Waiting[T]:
        item, turn = self._items.pop(request_id)
        number = turn[-1]
        del self._ids[number]
        queue = self._queues[item.alias]
        queue.order.discard(turn)
        queue.aside.pop(number, None)
        del queue.arrivals[number]
        level = queue.levels[item.priority]
        if item.deadline is not None:
            queue.deadlines.discard((item.deadline, number))
        if item.first_by is not None:
            self.objectives -= 1
            self._fresh.pop(item.id, None)
            self._dear.pop(item.id, None)
        level.leave(item.tenant, self._cost(item), turn[_START], number, served=served, in_turn=in_turn)
        self._advance(queue, level, item.tenant)
        if not level.waiting:
            del queue.levels[item.priority]
        if not len(queue.order):
            del self._queues[item.alias]
        return item
