"""What no schedule can beat: an upper bound on goodput with hindsight and free switches.

A request that meets its objective has its prompt done within ``ttft_s`` of its arrival, and after that all its tokens
within ``ttft_s`` and ``tpot_s`` for each but the first. The prompt takes the device ``prompt / prefill_tokens_s``
seconds. A step takes ``step_s`` and ``row_s`` for each of its rows, which are requests of one model and at most
``max_running``, and gives each of them a token. At no moment does the device do more than one prompt or one step.

Let every moment have a price ``p(t) >= 0`` per second of the device, and every request pay ``v_i >= 0`` for each of its
tokens, and for its prompt what the seconds cost. Let no step be paid more than its time costs: for all sets R of
requests of a model that may share a step at ``t``,

    sum over R of v_i <= p(t) * (step_s + |R| * row_s)

Then a schedule is paid ``p(t)`` per second at most, and the integral of ``p`` in all. A request that meets its
objective has paid ``c_i`` at least: its prompt where that is cheapest, and its tokens. So of a set S that a schedule
serves well,

    |S| = sum over S of c_i + sum over S of (1 - c_i) <= integral of p + sum over all requests of max(0, 1 - c_i)

which holds for any such prices at all (it is weak duality). The best ones give the least bound, and however good those
that are found are, the bound is one. They are found in two stages. In the first, a token costs ``row_s`` and as large a
part of ``step_s`` as if all whose time it is shared the step, where that is cheapest; a subgradient finds ``p``, on few
long slots first and then on shorter ones. In the second, each request has a ``v_i`` of its own: those that are not
worth serving pay less, and the others more. For ``p(t)`` it is enough to look at those that pay most, for each number
of rows. A request that can't meet its objective alone is left out beforehand.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.scheduling.machines import Machine
from service.scheduling.simulator import Arrival, Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_PARTS, _LEAST_SLOTS, _MOST_SLOTS = 16, 1 << 10, 1 << 14
"""Slots are this part of the shortest time to a first token, but at least and at most so many: windows are widened to
whole ones, and where those are long, the bound is larger than it need be."""
_ROUNDS = 200
"""Of the first stage for each length of slots, and twice those of the second."""
_COARSER = (16, 4, 1)
"""Prices are found on few long slots first, and from those on shorter ones: on many, they would not get far."""
_HOPE, _LEAST_HOPE = 0.1, 0.0005
"""By which part of itself the bound is hoped to fall, at first and at last."""
_PROGRESS, _IDLE = 0.03, 9
"""Steps in a row that bring less than this part of what was hoped for show that it was too much."""
_ROUNDING = 1e-5
"""Seconds, and tokens, by which the simulator may be off."""
_FAR, _NEAR = 0.1, 0.005
"""How far a price of the second stage goes in a round, at first and at last: parts of what is usual."""
_INERTIA, _MEMORY = 0.9, 0.95
"""What earlier rounds weigh in where such a price goes, and in how much its slope varies."""
_STEADY = 0.05
"""A slope much smaller than this moves its price little, however little it varies."""
_BLUR = 0.02
"""Who offers less than the best by such a part of it is taken to have some of the time, too."""
_NOTHING = 1e-12


def goodput_bound(trace: Trace, *, slots: int | None = None, rounds: int = _ROUNDS) -> float:
    """The share of all requests that a schedule with hindsight may serve within their objectives, at most.

    With fewer ``slots`` it is found sooner, and larger. Raises ValueError for a request without an objective.
    """
    feasible = [arrival for arrival in trace.arrivals if _alone(arrival, trace.machine)]
    if not feasible:
        return 0.0
    if slots is None:
        parts = math.ceil(_PARTS * max(map(_end, feasible)) / min(map(_ttft_s, feasible)))
        slots = min(max(_LEAST_SLOTS, parts), _MOST_SLOTS)
    bound, problem, prices = float(len(feasible)), None, np.zeros(0)
    for part in _COARSER:
        coarser, problem = problem, _Problem.of(feasible, trace.machine, max(1, min(slots // part, 4 * len(feasible))))
        begin = problem.same() if coarser is None else problem.finer(prices, coarser.slot_s)
        found, prices = problem.bound(rounds, begin)
        bound = min(bound, found)
    if problem is not None:
        bound = min(bound, _Own.of(problem, trace.machine).bound(rounds // 2, prices, problem.paid(prices)))
    return bound / len(trace.arrivals)


def _ttft_s(arrival: Arrival) -> float:
    return math.inf if arrival.objective is None else arrival.objective.ttft_s


def _end(arrival: Arrival) -> float:
    """When its last token is due, at the latest."""
    tpot_s = 0.0 if arrival.objective is None else arrival.objective.tpot_s
    return arrival.at + _ttft_s(arrival) + (arrival.output - 1) * tpot_s


def _alone(arrival: Arrival, machine: Machine) -> bool:
    """Whether it could meet its objective if nothing else were there."""
    if arrival.objective is None:
        raise ValueError("a request without an objective is met by any schedule")
    model, objective = machine.models[arrival.alias], arrival.objective
    prefill_s = arrival.prompt / model.prefill_tokens_s
    whole_s = objective.ttft_s + (arrival.output - 1) * objective.tpot_s + _ROUNDING
    steps_s = arrival.output * (model.step_s + model.row_s)
    return prefill_s <= objective.ttft_s + _ROUNDING and prefill_s + steps_s <= whole_s


@dataclass(frozen=True)
class _Problem:
    """The requests on a grid of slots, their windows widened to whole ones: that only makes the bound larger."""

    slot_s: float
    count: int
    prefill_s: Floats
    tokens: Floats
    first: Ints
    first_by: Ints
    last_by: Ints
    model: Ints
    token_s: Floats
    """Model and slot: seconds that a token costs there at least."""

    @classmethod
    def of(cls, arrivals: list[Arrival], machine: Machine, slots: int) -> "_Problem":
        names = {alias: index for index, alias in enumerate(machine.models)}
        at = np.array([arrival.at for arrival in arrivals])
        ttft = np.array([arrival.objective.ttft_s for arrival in arrivals if arrival.objective])
        tpot = np.array([arrival.objective.tpot_s for arrival in arrivals if arrival.objective])
        tokens = np.array([float(arrival.output) for arrival in arrivals])
        first_by = at + ttft + _ROUNDING
        ends = first_by + (tokens - 1) * tpot + _ROUNDING
        slot_s = max(float(ends.max()) / slots, 1e-9)
        count = slots + 1
        model = np.array([names[arrival.alias] for arrival in arrivals])
        first, last_by = (at / slot_s).astype(np.int64), (ends / slot_s).astype(np.int64)
        prefill_s = [arrival.prompt / machine.models[arrival.alias].prefill_tokens_s for arrival in arrivals]
        token_s = np.zeros((len(names), count))
        for index, costs in enumerate(machine.models.values()):
            mine = model == index
            change = np.bincount(first[mine], minlength=count + 1) - np.bincount(last_by[mine] + 1, minlength=count + 1)
            rows = np.clip(np.cumsum(change)[:count], 1, costs.max_running)
            token_s[index] = costs.step_s / rows + costs.row_s
        return cls(
            slot_s=slot_s,
            count=count,
            prefill_s=np.array(prefill_s),
            tokens=tokens - _ROUNDING,
            first=first,
            first_by=(first_by / slot_s).astype(np.int64),
            last_by=last_by,
            model=model,
            token_s=token_s,
        )

    def bound(self, rounds: int, prices: Floats) -> tuple[float, Floats]:
        """The least bound that is found from some prices on in so many rounds, and the prices that give it.

        Each step goes as far as the bound would need to fall by a part of itself, were it straight (Polyak); where that
        leads nowhere any more, the part is halved.
        """
        value, slope = self._value(prices)
        best, found, hope, idle = value, prices, _HOPE, 0
        for _ in range(rounds):
            steep = float(slope @ slope)
            if steep == 0.0 or hope < _LEAST_HOPE:
                break
            prices = np.maximum(0.0, prices - (value - best * (1 - hope)) / steep * slope)
            value, slope = self._value(prices)
            idle = 0 if value < best * (1 - _PROGRESS * hope) else idle + 1
            if value < best:
                best, found = value, prices
            if idle == _IDLE:
                hope, idle, prices = hope / 2, 0, found
                value, slope = self._value(prices)
        return best, found

    def same(self) -> Floats:
        """The best of prices that are the same at all times."""
        return np.full(self.count, self._flat())

    def finer(self, prices: Floats, slot_s: float) -> Floats:
        """Prices that were found for longer slots."""
        middles = (np.arange(self.count) + 0.5) * self.slot_s
        return prices[np.minimum((middles / slot_s).astype(np.int64), len(prices) - 1)]

    def paid(self, prices: Floats) -> Floats:
        """What each request pays for all its tokens at such prices, and no more than it is worth."""
        _, token_price = _least(prices * self.token_s, self.model, self.first, self.last_by)
        paid: Floats = np.minimum(1.0, self.tokens * token_price)
        return paid

    def _flat(self) -> float:
        """The one price at which the cheapest requests fill the device."""
        ones = np.ones(self.count)
        _, prompt = _least(ones[None, :], np.zeros_like(self.model), self.first, self.first_by)
        _, token = _least(self.token_s, self.model, self.first, self.last_by)
        work_s = np.sort(self.prefill_s * prompt + self.tokens * token)
        last = int(np.searchsorted(np.cumsum(work_s), self.slot_s * self.count))
        return float(1.0 / work_s[min(last, len(work_s) - 1)])

    def _value(self, prices: Floats) -> tuple[float, Floats]:
        """The bound that prices give, and how it grows with each of them."""
        prompt_at, prompt_price = _least(prices[None, :], np.zeros_like(self.model), self.first, self.first_by)
        token_at, token_price = _least(prices * self.token_s, self.model, self.first, self.last_by)
        cost = self.prefill_s * prompt_price + self.tokens * token_price
        value = self.slot_s * float(prices.sum()) + float(np.maximum(0.0, 1.0 - cost).sum())
        chosen = cost < 1.0
        slope = np.full(self.count, self.slot_s)
        np.subtract.at(slope, prompt_at[chosen], self.prefill_s[chosen])
        spent = self.tokens * self.token_s[self.model, token_at]
        np.subtract.at(slope, token_at[chosen], spent[chosen])
        return value, slope


@dataclass(frozen=True)
class _Own:
    """The second stage. A cell is a slot of a model; who may share a step there are its requests.

    ``cell``: of each request all of its cells, from ``begins`` on and as many as ``lasts``. The others are of all those
    together in the order of the cells: ``place`` is which one it is; ``step_s`` what a step takes that has it and all
    before it in the cell, infinity, if those are too many; ``used`` are the cells with requests, from ``starts`` on.
    ``prompt_slot`` and ``prompt_of``: of each request all slots in which its prompt may be done, from ``prompts`` on.
    """

    problem: _Problem
    cells: int
    cell: Ints
    begins: Ints
    lasts: Ints
    place: Ints
    step_s: Floats
    row_s: Floats
    used: Ints
    starts: Ints
    prompt_slot: Ints
    prompt_of: Ints
    prompts: Ints

    @classmethod
    def of(cls, problem: _Problem, machine: Machine) -> "_Own":
        lasts, prompt_lasts = problem.last_by - problem.first + 1, problem.first_by - problem.first + 1
        cell = _each(problem.model * problem.count + problem.first, lasts)
        cells = len(machine.models) * problem.count
        held = np.bincount(cell, minlength=cells)
        used = np.flatnonzero(held)
        held = held[used]
        starts = np.cumsum(held) - held
        place = np.repeat(used, held)
        rows = _each(np.ones_like(held), held)
        costs, model = list(machine.models.values()), place // problem.count
        row_s = np.array([each.row_s for each in costs])[model]
        step_s = np.array([each.step_s for each in costs])[model] + rows * row_s
        step_s[rows > np.array([each.max_running for each in costs])[model]] = np.inf
        return cls(
            problem=problem,
            cells=cells,
            cell=cell,
            begins=np.cumsum(lasts) - lasts,
            lasts=lasts,
            place=place,
            step_s=step_s,
            row_s=row_s,
            used=used,
            starts=starts,
            prompt_slot=_each(problem.first, prompt_lasts),
            prompt_of=np.repeat(np.arange(len(lasts)), prompt_lasts),
            prompts=np.cumsum(prompt_lasts) - prompt_lasts,
        )

    def bound(self, rounds: int, least: Floats, paid: Floats) -> float:
        """The least bound that is found in so many rounds. ``least``: what a second of a slot costs at least.

        ``paid``: what each request pays for all its tokens. Each of these goes against its slope, as that was lately on
        average, in parts of how much it varied (Adam): who is paid most for a moment changes from round to round.
        """
        usual = max(float(least.mean()), _NOTHING)
        at = np.concatenate([least / usual, paid])
        most = np.concatenate([np.full(len(least), np.inf), np.ones(len(paid))])
        toward, varies = np.zeros(len(at)), np.zeros(len(at))
        best = np.inf
        for turn in range(rounds):
            value, slope = self._value(at[: len(least)] * usual, at[len(least) :])
            best = min(best, value)
            toward = _INERTIA * toward + (1 - _INERTIA) * slope
            varies = _MEMORY * varies + (1 - _MEMORY) * slope * slope
            ahead, width = toward / (1 - _INERTIA ** (turn + 1)), np.sqrt(varies / (1 - _MEMORY ** (turn + 1)))
            far = _FAR * (_NEAR / _FAR) ** (turn / rounds)
            at = np.clip(at - far * ahead / (width + _STEADY), 0.0, most)
        return best

    def _value(self, least: Floats, paid: Floats) -> tuple[float, Floats]:
        """The bound that prices give, and its slopes: of time, in parts of a slot, and of requests, of all they ask.

        The bound is exact. The slopes need not be, they only tell where to look on: time goes to who offers about the
        most for it.
        """
        problem = self.problem
        who, token = self._by_price(paid / problem.tokens)
        sums = np.cumsum(token)
        before = sums[self.starts] - token[self.starts]
        sums -= np.repeat(before, np.diff(self.starts, append=len(token)))
        step = np.zeros(self.cells)
        step[self.used] = np.maximum.reduceat(sums / self.step_s, self.starts)
        offers = np.vstack([least, step.reshape(-1, problem.count)])
        prices = offers.max(axis=0)
        there = prices[self.prompt_slot]
        prompt = np.minimum.reduceat(there, self.prompts)
        cost = problem.prefill_s * prompt + paid
        value = problem.slot_s * float(prices.sum()) + float(np.maximum(0.0, 1.0 - cost).sum())
        chosen = cost < 1.0
        near = np.exp((prompt[self.prompt_of] - there) / np.maximum(_BLUR * there, _NOTHING))
        each_s = chosen * problem.prefill_s / np.add.reduceat(near, self.prompts)
        prompts_s = np.bincount(self.prompt_slot, each_s[self.prompt_of] * near, problem.count)
        parts = np.exp((offers - prices) / np.maximum(_BLUR * prices, _NOTHING))
        parts *= (problem.slot_s - prompts_s) / parts.sum(axis=0)
        runs = (token > self.row_s * step[self.place]) & np.isfinite(self.step_s)
        took = np.zeros(self.cells)
        np.maximum.at(took, self.place[runs], self.step_s[runs])
        steps = np.divide(parts[1:].ravel(), took, out=np.zeros_like(took), where=took > 0)
        tokens = np.bincount(who[runs], steps[self.place[runs]], len(paid))
        return value, np.concatenate([parts[0] / problem.slot_s, tokens / problem.tokens - chosen])

    def _by_price(self, token: Floats) -> tuple[Ints, Floats]:
        """The requests of all cells in order of those, in each from who pays most for a token, and what they pay."""
        order = np.argsort(-token, kind="stable")
        lasts = self.lasts[order]
        cell = self.cell[_each(self.begins[order], lasts)]
        if self.cells <= 1 << 16:
            cell = cell.astype(np.uint16)  # these are sorted by their digits: far faster
        who = np.repeat(order, lasts)[np.argsort(cell, kind="stable")]
        return who, token[who]


def _each(first: Ints, lasts: Ints) -> Ints:
    """For each, the numbers from ``first`` on, as many as it lasts; all in a row."""
    return np.repeat(first - np.cumsum(lasts) + lasts, lasts) + np.arange(lasts.sum())


def _least(rows: Floats, row: Ints, first: Ints, last: Ints) -> tuple[Ints, Floats]:
    """For each query, the place and the value of the least of ``rows[row][first:last + 1]``, by a sparse table."""
    count = rows.shape[1]
    places = [np.broadcast_to(np.arange(count), rows.shape)]
    own = np.arange(rows.shape[0])[:, None]
    width = 1
    while 2 * width <= int((last - first).max()) + 1:
        left, right = places[-1][:, :-width], places[-1][:, width:]
        places.append(np.where(rows[own, left] <= rows[own, right], left, right))
        width *= 2
    level = np.log2(last - first + 1).astype(np.int64)
    found = np.empty_like(first)
    for depth in np.unique(level):
        of = level == depth
        table = places[depth]
        left, right = table[row[of], first[of]], table[row[of], last[of] - (1 << depth) + 1]
        found[of] = np.where(rows[row[of], left] <= rows[row[of], right], left, right)
    return found, rows[row, found]
