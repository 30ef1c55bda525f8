"""A discrete-event simulation of one device under a schedule: the very policy that the worker runs, or a baseline.

The device does what vLLM's engine does: requests of the active model run in one continuous batch, a
step gives each of them a token, a switch freezes them, and a context that was parked is filled in again.
"""

import heapq
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from schemas.contexts import Tier
from schemas.objectives import Objective
from service.scheduling.goodput import Goal, under_way
from service.scheduling.machines import Machine, ModelCosts
from service.scheduling.memory import Budgets, Holding, NoRoom, make_room
from service.scheduling.policy import Decision
from service.scheduling.queues import Queues, Waiting
from service.scheduling.scheduler import Context


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it arrives: seconds and tokens.

    ``deadline`` is the moment after which its answer is worth nothing. ``claim`` is what a schedule is told that its
    answer may cost, in tokens; None: it is told the truth.
    """

    at: float
    alias: str
    prompt: int
    output: int
    deadline: float = math.inf
    objective: Objective | None = None
    claim: int | None = None

    @property
    def start_by(self) -> float:
        """The moment after which it need not be started any more."""
        return self.deadline if self.objective is None else min(self.deadline, self.at + self.objective.ttft_s)

    @property
    def cost(self) -> int:
        """Tokens that a schedule takes it to cost, prompt and answer together."""
        return self.prompt + (self.output if self.claim is None else self.claim)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests for the models of a machine, in order of their arrival."""

    name: str
    machine: Machine
    arrivals: tuple[Arrival, ...]


class Contender(Protocol):
    """A schedule under test. It sees the queues, the contexts and the clock, as the worker's does."""

    def decide(self, now: float, contexts: Iterable[Context], /) -> Decision: ...

    def take(self, alias: str, most: int, now: float, /) -> list[Waiting[Arrival]]:
        """Take those waiting requests of the active model off its queue that start now."""
        ...

    def takes_at(self, alias: str, /) -> float:
        """From when on ``take`` gives more of the active model's, though others run; infinity where none waits."""
        ...

    def switched(self, origin: str | None, to: str, tier: Tier, seconds: float, now: float, /) -> None: ...

    def finished(self, alias: str, /, *, seconds: float, tokens: int, said: int) -> None: ...

    def worked(self, alias: str, /, *, seconds: float, tokens: int) -> None: ...

    def did(self, alias: str, /, *, seconds: float, prompt: float, steps: float, rows: float) -> None: ...


_TOLD_S = 5.0
"""After so much serving, a contender is told what was done in it; at a switch it is anyway."""
_EPSILON = 1e-6
"""Seconds by which rounding may be off."""


class Missed(Enum):
    """What a request that met not all that it was to meet failed by."""

    NOT_STARTED = "not started in time"
    FIRST = "first token"
    PACE = "time per token"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Stay:
    """One turn on the device."""

    alias: str
    start: float
    end: float


@dataclass(slots=True)
class Outcome:
    """What a schedule made of a trace. Seconds; a wait is the time from a request's arrival to its model's turn."""

    requests: int = 0
    met: int = 0
    """Answered before their deadline and, where they have one, within their objective."""
    met_since_first: int = 0
    """Of those, as many whose further tokens kept their pace since the first one: TPOT as vLLM's bench has it."""
    met_of: Counter[str] = field(default_factory=Counter)
    """The same by model."""
    met_tokens: int = 0
    """Tokens that were generated for those."""
    missed: Counter[Missed] = field(default_factory=Counter)
    """What the others failed by."""
    switches: int = 0
    serving_s: float = 0.0
    switching_s: float = 0.0
    idle_s: float = 0.0
    """Time without a step and without a switch although a request was there."""
    waits: list[float] = field(default_factory=list)
    wait_max_s: float = 0.0
    stays: list[Stay] = field(default_factory=list)
    end: float = 0.0

    @property
    def serving_share(self) -> float:
        """Of the time in which there was a request to serve, the share in which steps ran."""
        busy = self.serving_s + self.switching_s + self.idle_s
        return self.serving_s / busy if busy else 1.0

    @property
    def goodput(self) -> float:
        """The share of all requests that met their objective; those that were not started count as missed."""
        return self.within_deadline

    @property
    def within_deadline(self) -> float:
        return self.met / self.requests if self.requests else 1.0

    @property
    def wait_p95_s(self) -> float:
        ordered = sorted(self.waits)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class _Row:
    """A running request: the model's serving seconds at its start, and when its first token came."""

    request: Arrival
    started: float
    first_at: float = math.inf

    def said(self, left: float) -> float:
        """The tokens that have come of it, with ``left`` still to come."""
        return max(0.0, self.request.output - left)

    def goal(self, left: float) -> Goal:
        """What the schedule is told, with ``left`` tokens still to come; the answer is as long as was claimed."""
        request, objective = self.request, self.request.objective
        if objective is None:
            return Goal(math.inf, math.inf)
        first_by, answer = request.at + objective.ttft_s, request.cost - request.prompt
        in_time = self.first_at <= first_by
        return under_way(objective, first_by, in_time=in_time, tokens=self.said(left), answer=answer)

    def missed(self, now: float) -> Missed | None:
        """By what it failed, if it ends now."""
        request = self.request
        objective = request.objective
        if now > request.deadline:
            return Missed.DEADLINE
        if objective is None:
            return None
        first_by = request.at + objective.ttft_s + _EPSILON
        if min(self.first_at, now) > first_by:
            return Missed.FIRST
        return Missed.PACE if now > first_by + (request.output - 1) * objective.tpot_s else None

    def kept_pace(self, now: float) -> bool:
        """Whether its further tokens came at their pace since the first one did, if it ends now."""
        objective = self.request.objective
        may_s = math.inf if objective is None else (self.request.output - 1) * objective.tpot_s + _EPSILON
        return now - min(self.first_at, now) <= may_s


@dataclass(slots=True)
class _Did:
    """What a model has done since the contender was told last."""

    seconds: float = 0.0
    prompt: float = 0.0
    steps: float = 0.0
    rows: float = 0.0


@dataclass(slots=True)
class _Device:
    """One model's side of the device: its batch, counted in its own steps."""

    costs: ModelCosts
    tier: Tier = Tier.PARKED
    step: float = 0.0
    debt_s: float = 0.0
    """Prefill to do before the next step."""
    batch: list[tuple[float, int, _Row]] = field(default_factory=list)
    """Step of the last token, number, row; a heap."""
    firsts: deque[tuple[float, _Row]] = field(default_factory=deque)
    """In order, the serving seconds at which a row has its first token."""
    enters: list[float] = field(default_factory=list)
    leaves: list[float] = field(default_factory=list)
    did: _Did = field(default_factory=_Did)
    served_s: float = 0.0
    used: float = -math.inf
    ready_at: float | None = None
    """When the copy in that is under way will be done."""

    def ends_in(self) -> float:
        """Seconds of serving until the first of the batch is done."""
        if not self.batch:
            return math.inf
        return self.debt_s + max(0.0, self.batch[0][0] - self.step) * self.step_s

    @property
    def step_s(self) -> float:
        return self.costs.step_s + len(self.batch) * self.costs.row_s

    def serve(self, seconds: float) -> float:
        """Serve for a time; returns the steps done."""
        prefill = min(seconds, self.debt_s)
        self.debt_s -= prefill
        self.served_s += seconds
        steps = (seconds - prefill) / self.step_s
        self.step += steps
        self.did.seconds += seconds
        self.did.steps += steps
        self.did.rows += steps * len(self.batch)
        return steps

    def begin(self, request: Arrival, number: int) -> None:
        """Add a row: its prompt goes before all further steps."""
        row = _Row(request, self.served_s)
        self.did.prompt += request.prompt
        self.debt_s += request.prompt / self.costs.prefill_tokens_s
        heapq.heappush(self.batch, (self.step + request.output, number, row))
        self.firsts.append((self.served_s + self.debt_s + self.step_s, row))

    def note_firsts(self, now: float) -> None:
        """Give rows whose first token has come the moment at which it came."""
        while self.firsts and self.firsts[0][0] <= self.served_s + _EPSILON:
            mark, row = self.firsts.popleft()
            row.first_at = now - (self.served_s - mark)


class Simulation:
    """One run of a trace under a contender."""

    def __init__(
        self,
        trace: Trace,
        contender: Contender,
        queues: Queues[Arrival],
        *,
        lru: bool = False,
        refuses: bool = True,
    ) -> None:
        """``refuses``: what can't have its first token in time any more is not begun. Else it is answered late."""
        self._trace = trace
        self._refuses = refuses
        self._contender = contender
        self._queues = queues
        self._lru = lru
        self._machine: Machine = trace.machine
        self._devices = {alias: _Device(costs) for alias, costs in trace.machine.models.items()}
        self._active = next(iter(self._devices))
        self._now = 0.0
        self._stay = 0.0
        self._done = 0.0
        self._stay_served = 0.0
        self._stay_tokens = 0.0
        self._busy: set[str] = set()
        self.outcome = Outcome(requests=len(trace.arrivals))

    def run(self) -> Outcome:
        arrivals = self._trace.arrivals
        count, position = len(arrivals), 0
        self._devices[self._active].tier = Tier.RESIDENT
        self._enter(self._active)
        decision = self._decide()
        while position < count or len(self._queues) or self._busy:
            device = self._devices[self._active]
            finish = self._now + device.ends_in()
            until = decision.until if decision.until is not None else math.inf
            if self._now < (takes := self._contender.takes_at(self._active)):
                until = min(until, takes)
            arrival = arrivals[position].at if position < count else math.inf
            upto = min(finish, until, arrival)
            if math.isinf(upto):
                break
            again = False
            if arrival <= upto:
                request = arrivals[position]
                position += 1
                again = self._arrive(position, request)
            else:
                self._advance(upto)
                if finish <= upto:
                    device.step = max(device.step, device.batch[0][0])  # as far as the clock can tell
                    again = self._finish(device)
                again = again or until <= upto
            if again:
                decision = self._decide()
        self._advance(self._now)
        self._leave(self._now)
        self.outcome.end = self._now
        return self.outcome

    def _arrive(self, number: int, request: Arrival) -> bool:
        """A request comes. Returns whether the schedule should be decided again."""
        idle = not self._devices[self._active].batch
        if request.alias == self._active or idle:
            self._advance(request.at)
        deadline = self._start_by(request)
        waiting = Waiting(
            str(number),
            request.alias,
            request,
            request.at,
            tokens=request.cost,
            deadline=deadline if math.isfinite(deadline) else None,
            first_by=None if request.objective is None else request.at + request.objective.ttft_s,
            ttft_s=math.inf if request.objective is None else request.objective.ttft_s,
            tpot_s=math.inf if request.objective is None else request.objective.tpot_s,
            prompt=request.prompt,
        )
        urgent = self._queues.admit(waiting)
        if request.alias == self._active:
            self._start()
            return idle
        if urgent or idle:
            self._advance(request.at)
            return True
        return False

    def _start_by(self, request: Arrival) -> float:
        return request.start_by if self._refuses else request.deadline

    def _advance(self, to: float) -> None:
        """Let the active model serve, or idle, up to a moment."""
        seconds, self._now = to - self._now, max(to, self._now)
        if seconds <= 0:
            return
        device = self._devices[self._active]
        if device.batch:
            rows = len(device.batch)
            steps = device.serve(seconds)
            device.note_firsts(self._now)
            self.outcome.serving_s += seconds
            self._stay_served += seconds
            self._stay_tokens += steps * rows
            if device.did.seconds > _TOLD_S:
                self._tell()
        elif len(self._queues) or self._busy:
            self.outcome.idle_s += seconds

    def _start(self) -> None:
        """Give waiting requests of the active model to it, as many as it takes."""
        device = self._devices[self._active]
        free = device.costs.max_running - len(device.batch)
        if free <= 0:
            return
        for item in self._contender.take(self._active, free, self._now):
            if self._start_by(item.payload) <= self._now:
                self._not_started(item.payload)
                continue
            self._waited(device, item.payload, self._now)
            self._stay_tokens += item.payload.prompt
            device.begin(item.payload, self._number())
        if device.batch:
            self._busy.add(self._active)

    def _number(self) -> int:
        self._done += 1
        return int(self._done)

    def _finish(self, device: _Device) -> bool:
        """Answer what has its last token. Returns whether the model has nothing left."""
        while device.batch and device.batch[0][0] <= device.step + 1e-6:
            _, _, row = heapq.heappop(device.batch)
            request = row.request
            if (missed := row.missed(self._now)) is None:
                self.outcome.met += 1
                self.outcome.met_since_first += row.kept_pace(self._now)
                self.outcome.met_of[request.alias] += 1
                self.outcome.met_tokens += request.output
            else:
                self.outcome.missed[missed] += 1
            self._contender.finished(
                request.alias,
                seconds=device.served_s - row.started,
                tokens=request.prompt + request.output,
                said=request.output,
            )
        self._start()
        if not device.batch:
            self._busy.discard(device.costs.alias)
            return True
        return False

    def _decide(self) -> Decision:
        """Ask the contender, and do what it says, until it says to stay."""
        for _ in range(8):
            for item in self._queues.expired(self._now):
                self._not_started(item.payload)
            decision = self._contender.decide(self._now, self._contexts())
            if decision.run == self._active:
                break
            self._switch(decision)
        self._start()
        if decision.prefetch is not None:
            self._prefetch(decision)
        return decision

    def _prefetch(self, decision: Decision) -> None:
        """Begin to copy a model in beside the one that serves, if there is room and the link is free."""
        assert decision.prefetch is not None
        device = self._devices[decision.prefetch]
        copying = any(other.ready_at is not None and other.ready_at > self._now for other in self._devices.values())
        if device.tier is Tier.RESIDENT or device.ready_at is not None or copying:
            return
        evicted = self._evicted(decision.prefetch, decision.order)
        if evicted is None:
            return
        for alias in evicted:
            self._park(alias)
        device.ready_at = self._now + device.costs.parked_s

    def _park(self, alias: str) -> None:
        device = self._devices[alias]
        device.tier, device.ready_at = Tier.PARKED, None
        there = [row.request.prompt + row.said(last - device.step) for last, _, row in device.batch]
        again_s = sum(map(device.costs.again_s, there))
        if device.costs.row_back_s is None:
            again_s -= device.debt_s  # what was yet to be done is part of what is done again
            device.did.prompt += sum(there)
        device.debt_s += again_s
        device.firsts = deque((mark + again_s, row) for mark, row in device.firsts)

    def _contexts(self) -> list[Context]:
        known = dict.fromkeys((self._active, *self._queues.aliases, *self._busy))
        return [self._context(alias) for alias in known]

    def _context(self, alias: str) -> Context:
        device = self._devices[alias]
        unfinished = len(device.batch)
        tokens = int(sum(last - device.step for last, *_ in device.batch)) if unfinished else 0
        deadlines = (row.request.deadline for *_, row in device.batch)
        nearest = min((deadline for deadline in deadlines if deadline > self._now), default=math.inf)
        if device.ready_at is not None and device.ready_at <= self._now:
            device.tier, device.ready_at = Tier.RESIDENT, None
        running = tuple(row.goal(last - device.step) for last, _, row in device.batch)
        return Context(
            alias,
            tier=device.tier,
            unfinished=unfinished,
            unfinished_tokens=tokens,
            unfinished_deadline=nearest,
            undated=False,
            ready_at=device.ready_at,
            running=running if any(math.isfinite(goal.by) for goal in running) else (),
            again=0.0 if alias == self._active else device.debt_s * device.costs.prefill_tokens_s,
        )

    def _switch(self, decision: Decision) -> None:
        target = decision.run
        device = self._devices[target]
        self._context(target)
        tier = device.tier
        seconds = device.costs.switch_s(tier)
        if tier is not Tier.RESIDENT and device.ready_at is not None:
            seconds = min(seconds, device.ready_at - self._now + device.costs.resident_s)
        elif tier is not Tier.RESIDENT:
            for other in self._devices.values():
                other.ready_at = None
            for alias in self._evicted(target, decision.order, leaving=True) or ():
                self._park(alias)
        device.tier, device.ready_at = Tier.RESIDENT, None
        origin = self._active
        if self._stay_served > 0:
            self._contender.worked(origin, seconds=self._stay_served, tokens=int(self._stay_tokens))
        self._tell()
        self._leave(self._now)
        busy = len(self._queues) or self._busy
        self._now += seconds
        if busy:
            self.outcome.switching_s += seconds
        self.outcome.switches += 1
        self._contender.switched(origin, target, tier, seconds, self._now)
        self._active = target
        self._enter(target)

    def _evicted(self, target: str, order: tuple[str, ...], *, leaving: bool = False) -> tuple[str, ...] | None:
        """Who is parked to make room; None where there is none to be made."""
        if self._lru:
            order = tuple(sorted(self._devices, key=lambda alias: -self._devices[alias].used))
        ranks = {alias: float(place) for place, alias in enumerate(order)}
        holdings = [
            Holding(
                alias=alias,
                tier=Tier.RESIDENT,
                weights=int(device.costs.device_bytes),
                kv=0,
                used=device.used,
                next_use=ranks.get(alias, math.inf),
                bring_back_s=device.costs.device_bytes if self._lru else device.costs.parked_s,
            )
            for alias, device in self._devices.items()
            if device.tier is Tier.RESIDENT or device.ready_at is not None
        ]
        incoming = Holding(target, Tier.PARKED, int(self._devices[target].costs.device_bytes), 0)
        budgets = Budgets(device=int(self._machine.device_bytes))
        try:
            moves = make_room(holdings, incoming=incoming, budgets=budgets, beside=None if leaving else self._active)
        except NoRoom:
            return None
        return tuple(move.alias for move in moves)

    def _tell(self) -> None:
        """Let the contender learn what the active model has done. A prompt that is being taken in is done later."""
        device = self._devices[self._active]
        if device.debt_s == 0.0:
            did, device.did = device.did, _Did()
            self._contender.did(self._active, seconds=did.seconds, prompt=did.prompt, steps=did.steps, rows=did.rows)

    def _enter(self, alias: str) -> None:
        device = self._devices[alias]
        if device.leaves and device.batch:
            frozen = self._now - device.leaves[-1]
            self.outcome.wait_max_s = max(self.outcome.wait_max_s, frozen)
        device.enters.append(self._now)
        self._stay, self._stay_served, self._stay_tokens = self._now, 0.0, 0.0

    def _leave(self, now: float) -> None:
        device = self._devices[self._active]
        device.leaves.append(now)
        device.used = now
        self.outcome.stays.append(Stay(self._active, self._stay, now))

    def _not_started(self, request: Arrival) -> None:
        """It was not begun in time: it is refused. With a deadline alone, it has waited for its turn all the same."""
        self.outcome.missed[Missed.NOT_STARTED] += 1
        if request.objective is None:
            self._waited(self._devices[request.alias], request, self._now)

    def _waited(self, device: _Device, request: Arrival, now: float) -> None:
        """Note how long a request waited for its model to get its turn."""
        turn = bisect_left(device.enters, request.at)
        stayed = turn > 0 and (turn > len(device.leaves) or device.leaves[turn - 1] >= request.at)
        wait = 0.0 if stayed else (device.enters[turn] if turn < len(device.enters) else now) - request.at
        self.outcome.waits.append(wait)
        self.outcome.wait_max_s = max(self.outcome.wait_max_s, wait)


def simulate(
    trace: Trace, contender: Contender, queues: Queues[Arrival], *, lru: bool = False, refuses: bool = True
) -> Outcome:
    """Run a trace to its end. The same trace and contender give the same outcome."""
    return Simulation(trace, contender, queues, lru=lru, refuses=refuses).run()
