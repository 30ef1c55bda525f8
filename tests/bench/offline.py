"""What no schedule can beat: an upper bound on goodput with hindsight and free switches.

A request that meets its objective has its prompt done within ``ttft_s`` of its arrival, and all its tokens within
``ttft_s`` and ``tpot_s`` for each but the first. The prompt takes the device ``prompt / prefill_tokens_s`` seconds. A
step takes ``step_s`` and ``row_s`` for each of its rows, of which there are at most ``max_running`` and at most as many
as there are requests of its model whose time it is; so a token takes at least ``row_s`` and its part of ``step_s``.

Let every moment have a price ``p(t) >= 0`` per second of the device. A request that meets its objective takes time
worth at least ``c_i``: what its prompt and its tokens cost where their windows are cheapest. No moment is used
twice, so what all requests of a set S that a schedule serves well have taken is worth the integral of ``p`` at
most, and

    |S| = sum over S of c_i + sum over S of (1 - c_i) <= integral of p + sum over all requests of max(0, 1 - c_i)

which holds for any prices at all (it is weak duality). The best prices give the least bound; a subgradient finds good
ones, on few long slots first and then on shorter ones, and however good they are, the bound is one. A request that
can't meet its objective alone is left out beforehand.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.scheduling.machines import Machine
from service.scheduling.simulator import Arrival, Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_SLOTS = 1024
_ROUNDS = 200
_COARSER = (16, 4, 1)
"""Prices are found on few long slots first, and from those on shorter ones: on many, they would not get far."""
_HOPE, _LEAST_HOPE = 0.1, 0.0005
"""By which part of itself the bound is hoped to fall, at first and at last."""
_PROGRESS, _IDLE = 0.03, 9
"""Steps in a row that bring less than this part of what was hoped for show that it was too much."""


def goodput_bound(trace: Trace, *, slots: int = _SLOTS, rounds: int = _ROUNDS) -> float:
    """The share of all requests that a schedule with hindsight may serve within their objectives, at most.

    Raises ValueError for a request without an objective.
    """
    feasible = [arrival for arrival in trace.arrivals if _alone(arrival, trace.machine)]
    if not feasible:
        return 0.0
    bound, prices, slot_s = float(len(feasible)), None, 0.0
    for part in _COARSER:
        problem = _Problem.of(feasible, trace.machine, max(1, min(slots // part, 4 * len(feasible))))
        begin = problem.same() if prices is None else problem.finer(prices, slot_s)
        found, prices = problem.bound(rounds, begin)
        bound, slot_s = min(bound, found), problem.slot_s
    return bound / len(trace.arrivals)


def _alone(arrival: Arrival, machine: Machine) -> bool:
    """Whether it could meet its objective if nothing else were there."""
    if arrival.objective is None:
        raise ValueError("a request without an objective is met by any schedule")
    model, objective = machine.models[arrival.alias], arrival.objective
    prefill_s = arrival.prompt / model.prefill_tokens_s
    whole_s = objective.ttft_s + (arrival.output - 1) * objective.tpot_s
    steps_s = arrival.output * (model.step_s + model.row_s)
    return prefill_s <= objective.ttft_s and prefill_s + steps_s <= whole_s


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
        ends = at + ttft + (tokens - 1) * tpot
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
            tokens=tokens,
            first=first,
            first_by=((at + ttft) / slot_s).astype(np.int64),
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
