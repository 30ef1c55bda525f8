"""What a model's work costs the device, learnt: per token of a prompt, per step, per row of a step. Pure."""

from dataclasses import dataclass

_KEPT = 0.97
"""The weight of what was seen before, with each observation: some thirty count."""
_FORGOTTEN = 3
"""So many observations more are forgotten with each one that was as odd as others lately: the costs have changed."""
_GUESS = (2e-5, 0.005, 5e-5)
"""Seconds of each before anything was seen: a fast device's, so that a model is tried before it is found too dear."""
_TRUST = 0.01
"""What the guess weighs, as a part of what was seen: it decides only what that leaves open."""
_ODD = 2.0
"""How many times faster or slower than known an observation may be until it is odd. What is faster still is taken for a
mistake of a clock or a count, and for as much only; with each one that was odd lately, for as much again."""
_LATELY = 0.9
"""What an odd observation weighs less with each later one: some ten count."""
_TICK_S = 1e-9
"""No clock tells less."""
_NOTHING = 1e-12
_SWEEPS = 40
_Three = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class WorkCosts:
    """Seconds of the device. A step of ``n`` rows takes ``step_s + n * row_s`` and gives each of them a token."""

    prompt_token_s: float = _GUESS[0]
    step_s: float = _GUESS[1]
    row_s: float = _GUESS[2]

    def request_s(self, prompt: float, said: float, rows: float) -> float:
        """A request in a batch of so many: its prompt, and its part of the steps that give what it says."""
        return self.prompt_token_s * prompt + said * (self.step_s / rows + self.row_s)

    def steps_s(self, steps: float, rows: int) -> float:
        """So many steps of a batch."""
        return steps * (self.step_s + rows * self.row_s)


UNSEEN = WorkCosts()


class Work:
    """Least squares, relative to the time of each observation, through what was seen lately; nothing is negative."""

    __slots__ = ("_costs", "_odd", "_products", "_sums")

    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._costs: WorkCosts | None = UNSEEN
        self._odd = 0.0

    def seen(self, *, seconds: float, prompt: float, steps: float, rows: float) -> None:
        """In ``seconds``, so many tokens of prompts were taken in, and steps made that gave ``rows`` tokens."""
        if seconds < _TICK_S or not (prompt or rows):
            return
        counts: _Three = (prompt, steps, rows)
        known = self.costs
        costs = (known.prompt_token_s, known.step_s, known.row_s)
        expected = sum(count * cost for count, cost in zip(counts, costs, strict=True))
        kept = _KEPT ** (1 + _FORGOTTEN * self._odd)
        odd = not expected / _ODD <= seconds <= expected * _ODD
        seconds = max(seconds, expected / _ODD ** (1 + self._odd))
        self._odd = _LATELY * self._odd + odd
        parts = [count * guess / seconds for count, guess in zip(counts, _GUESS, strict=True)]
        for i, part in enumerate(parts):
            self._sums[i] = kept * self._sums[i] + part
            for j, other in enumerate(parts):
                self._products[i][j] = kept * self._products[i][j] + part * other
        self._costs = None

    @property
    def costs(self) -> WorkCosts:
        if self._costs is None:
            self._costs = WorkCosts(*(guess * part for guess, part in zip(_GUESS, self._solved(), strict=True)))
        return self._costs

    def _solved(self) -> list[float]:
        """In parts of the guess: as a whole it is made to fit, then each by itself until all are as good as can be."""
        scale = sum(self._sums) / sum(map(sum, self._products))
        found = [scale] * 3
        for _ in range(_SWEEPS):
            for i, products in enumerate(self._products):
                others = sum(products[j] * found[j] for j in range(3) if j != i)
                trust = _TRUST * products[i] + _NOTHING
                found[i] = max(0.0, (self._sums[i] + trust * scale - others) / (products[i] + trust))
        return found
