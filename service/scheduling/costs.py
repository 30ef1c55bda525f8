"""What switches and requests have been measured to cost: averages with a spread, learnt as the worker runs."""

import math
import sys
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.base import immutable
from schemas.contexts import Tier
from service.scheduling.work import UNSEEN, Work, WorkCosts

PRIOR_S: Mapping[Tier, float] = {Tier.RESIDENT: 0.005, Tier.PARKED: 1.0, Tier.DROPPED: 30.0}
"""What a switch is taken to cost before one was seen: the order of magnitude that vLLM's users report for each tier."""
_MEMORY = 0.2
"""The weight of the newest observation once there are enough of them."""
_LITTLE = 0.02
"""The same for what differs much from one request to the next."""
_SURE, _LATELY = 3, 8
"""How many switches and full batches say how fast a model may be, and the last how many do: one alone may have been a
bad moment."""
_TIERS = frozenset(Tier)
_PACE = "pace"
"""Of a model: seconds and tokens of a request, tokens per second of its batch; each an average."""


@immutable
class Average:
    """An exponentially weighted mean with its mean deviation. The first observations count fully.

    With none (``n`` is 0) it is what is taken for granted, or what another worker says; the first one replaces it.
    """

    mean: float
    spread: float = 0.0
    n: int = 0

    def seen(self, value: float, memory: float = _MEMORY) -> "Average":
        """This average with one more observation."""
        if self.n == 0:
            return Average(value, n=1)
        n = self.n + 1
        weight = 1 / n if n * memory < 1 else memory
        off = value - self.mean
        return Average(self.mean + weight * off, (1 - weight) * self.spread + weight * abs(off), n)

    @property
    def cautious(self) -> float:
        """The mean and its spread: what to plan a deadline with."""
        return self.mean + self.spread


_SECOND, _TOKENS, _RATE, _ANSWER = Average(1.0), Average(500.0), Average(1000.0), Average(256.0)


@dataclass(frozen=True, slots=True)
class Pace:
    """How a model works: seconds that one request runs, its tokens, and tokens per second of the whole batch.

    ``most_tokens_s`` and ``most_requests_s`` are the best of the last full batches; infinite where there were few.
    """

    request_s: float
    request_tokens: float
    tokens_s: float
    most_tokens_s: float = math.inf
    most_requests_s: float = math.inf

    def work_s(self, tokens: float) -> float:
        """Seconds in which this many tokens are done, requests batched as they come."""
        return tokens / self.tokens_s

    def least_work_s(self, requests: float, tokens: float) -> float:
        """The least for so many requests of so many tokens together: by either, as fast as the model was at its best.

        Tokens are what is claimed, and who claims too much is counted as one request.
        """
        return min(requests / self.most_requests_s, tokens / self.most_tokens_s)


class Costs:
    """Learns what a switch to a model costs from each tier, and how fast each model works.

    A switch costs the time in which no step runs; it depends on the pair where that was seen, else on the target,
    else on the tier alone.
    """

    def __init__(self) -> None:
        self._switches: dict[tuple[str, str, Tier], Average] = {}
        self._took: dict[tuple[str, Tier], deque[float]] = {}
        """Seconds of the last switches to a model from a tier that were seen here."""
        self._request_s: dict[str, Average] = {}
        self._request_tokens: dict[str, Average] = {}
        self._tokens_s: dict[str, Average] = {}
        self._paces = (self._request_s, self._request_tokens, self._tokens_s)
        self._work: dict[str, Work] = {}
        self._said: dict[str, Average] = {}
        self._full: dict[str, deque[tuple[float, float]]] = {}
        """Tokens and requests per second of the last full batches that were seen here."""

    def switched(self, origin: str | None, to: str, tier: Tier, seconds: float) -> None:
        """A switch from ``origin`` to ``to``, found on ``tier``, kept the device without a step for ``seconds``."""
        for pair in ((origin or "", to, tier), ("", to, tier), ("", "", tier)):
            self._switches[pair] = self._switches.get(pair, Average(PRIOR_S[tier])).seen(seconds)
        self._took.setdefault((to, tier), deque(maxlen=_LATELY)).append(seconds)

    def switch(self, origin: str | None, to: str, tier: Tier) -> Average:
        """What a switch is expected to cost, in seconds; nothing for the active model itself."""
        if origin == to:
            return Average(0.0)
        for pair in ((origin or "", to, tier), ("", to, tier), ("", "", tier)):
            if pair in self._switches:
                return self._switches[pair]
        return Average(PRIOR_S[tier])

    def least_switch_s(self, to: str, tier: Tier) -> float:
        """What a switch to a model takes at least, by what was seen of this very model here; 0 where that is little."""
        took = self._took.get((to, tier), ())
        return min(took) if len(took) >= _SURE else 0.0

    def observations(self, alias: str) -> int:
        """How often something of a model was seen here: it grows with whatever may change what is known of it."""
        switches = (average for (origin, to, _), average in self._switches.items() if not origin and to == alias)
        paces = (averages[alias] for averages in self._paces if alias in averages)
        return sum(average.n for average in (*switches, *paces))

    def finished(self, alias: str, *, seconds: float, tokens: int, said: int | None = None) -> None:
        """A request ran for ``seconds`` (freezes left out) and cost ``tokens``, prompt and answer together.

        ``said`` is what it generated, where that is known.
        """
        if said is not None:
            self._said[alias] = (self._said.get(alias) or Average(said)).seen(said, _LITTLE)
        self._request_s[alias] = (self._request_s.get(alias) or Average(seconds)).seen(seconds)
        self._request_tokens[alias] = (self._request_tokens.get(alias) or Average(tokens)).seen(tokens)

    def worked(self, alias: str, *, seconds: float, tokens: int, requests: int = 1, full: bool = False) -> None:
        """In ``seconds`` of serving, the model's batch did ``tokens`` of so many ``requests``. Empty turns say nothing.

        What counts is the pace of a ``full`` batch, with more waiting all the time. Where the batch may have been thin,
        a slower turn weighs a tenth of a faster one, and the first full one makes all before it forgotten.
        """
        if seconds > 0 and tokens > 0:
            rate = tokens / seconds
            if full:
                if alias not in self._full:
                    self._full[alias] = deque(maxlen=_LATELY)
                    self._tokens_s.pop(alias, None)
                self._full[alias].append((rate, requests / seconds))
            known = self._tokens_s.get(alias, Average(rate))
            thin = known.n > 0 and rate < known.mean and not full
            self._tokens_s[alias] = known.seen(0.9 * known.mean + 0.1 * rate if thin else rate)

    def did(self, alias: str, *, seconds: float, prompt: float, steps: float, rows: float) -> None:
        """What the device did for a model: see ``Work.seen``."""
        self._work.setdefault(alias, Work()).seen(seconds=seconds, prompt=prompt, steps=steps, rows=rows)

    def work(self, alias: str) -> WorkCosts:
        """What the model's work costs the device."""
        return self._work[alias].costs if alias in self._work else UNSEEN

    def said(self, alias: str) -> float:
        """How many tokens an answer of the model has."""
        return self._said.get(alias, _ANSWER).mean

    def pace(self, alias: str) -> Pace:
        """How a model works, with one second and a thousand tokens per second where nothing was seen."""
        seconds, tokens = self._request_s.get(alias, _SECOND), self._request_tokens.get(alias, _TOKENS)
        rate = self._tokens_s.get(alias, _RATE)
        full = self._full.get(alias, ())
        most = map(max, zip(*full, strict=True)) if len(full) >= _SURE else ()
        return Pace(seconds.mean, max(1.0, tokens.mean), max(1e-6, rate.mean), *most)

    def export(self) -> dict[str, Any]:
        """What was learnt, as a plain JSON object: per model and per tier, not per pair of models."""
        models: dict[str, dict[str, Any]] = {}
        tiers: dict[str, list[float]] = {}
        for (origin, to, tier), average in self._switches.items():
            if not origin:
                (models.setdefault(to, {}) if to else tiers)[tier.value] = _row(average)
        for alias in dict.fromkeys(alias for averages in self._paces for alias in averages):
            rows = (averages.get(alias) for averages in self._paces)
            models.setdefault(alias, {})[_PACE] = [None if average is None else _row(average) for average in rows]
        return {"models": models, "tiers": tiers} if models or tiers else {}

    def adopt(self, known: Mapping[str, Any], aliases: Collection[str]) -> None:
        """Begin with what another worker says that it learnt, until the same is seen here: anybody may have written it.

        Only of ``aliases``, for it is said again. What is not understood is left out: it will be learnt again.
        """
        models, tiers = known.get("models"), known.get("tiers")
        said = {alias: models.get(alias) for alias in aliases} if isinstance(models, Mapping) else {}
        for alias, rows in said.items():
            for name, row in rows.items() if isinstance(rows, Mapping) else ():
                if name == _PACE and isinstance(row, list):
                    for averages, part in zip(self._paces, row, strict=False):
                        _keep(averages, alias, part)
                elif name in _TIERS:
                    _keep(self._switches, ("", alias, Tier(name)), row)
        for name, row in tiers.items() if isinstance(tiers, Mapping) else ():
            if name in _TIERS:
                _keep(self._switches, ("", "", Tier(name)), row)


def _row(average: Average) -> list[float]:
    return [_short(average.mean), _short(average.spread)]


def _short(value: float) -> float:
    """Four digits: more are not known."""
    return float(f"{value:.4g}")


def _keep(into: dict[Any, Average], key: object, numbers: object) -> None:
    match numbers:  # earlier workers say a third one: how often it was seen
        case [int() | float() as mean, int() | float() as spread, *_] if all(
            0 <= number <= sys.float_info.max for number in (mean, spread)
        ):
            into[key] = Average(float(mean), float(spread))
