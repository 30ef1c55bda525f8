"""One device's day in seconds: the worker's policy for objectives, in strokes coarse enough for a million requests.

What the simulator does in full is done here once for each request and each look at the turns: the same batches, steps,
switches, memory and worth of turns, but what work costs and how long answers are need not be learnt, looks are rarer,
and there are no priorities, tenants or holds. ``deploy/PLANNING.md`` says how close it comes.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from schemas.objectives import Objective
from service.scheduling.goodput import AT_ONCE, FEW, LATE, LATELY_S, Portion, SwitchShare, counts, price
from service.scheduling.machines import ModelCosts
from service.scheduling.policy import CAUTION, closing
from service.scheduling.traffic import Traffic
from service.scheduling.work import WorkCosts

_LOOK = 1 / 4
"""How often turns are compared: in parts of the time that a request takes.

The policy looks four times as often, and asks that another turn be worth a quarter more; looking rarely is that here.
"""
_SHORTEST_S = 0.1
"""Turns are compared no more often than that."""
_PRICE_S = 2.0
"""How often it is looked at what came lately."""
_EPSILON = 1e-9


@dataclass(slots=True)
class Tally:
    """What came of a device's requests. Seconds; models by their place in the traffic's aliases."""

    met_of: dict[int, int] = field(default_factory=dict)
    met: int = 0
    missed: int = 0
    met_tokens: int = 0
    switches: int = 0
    serving_s: float = 0.0
    switching_s: float = 0.0
    end: float = 0.0


class _Row:
    """A running request."""

    __slots__ = ("first_at", "first_by", "output", "prompt_s")

    def __init__(self, first_by: float, first_at: float, output: int, prompt_s: float) -> None:
        self.first_by, self.first_at = first_by, first_at
        self.output, self.prompt_s = output, prompt_s


class _Model:
    """One model's side of the device: what waits, in order of arrival, and its batch, counted in its own steps."""

    __slots__ = (
        *("aside", "batch", "costs", "debt", "ends", "left", "of", "parked_least_s", "prefill_s", "ready_at"),
        *("request_s", "resident", "resident_least_s", "rows", "step", "steps", "switching"),
        *("taking", "tpot", "ttft", "usual", "wait", "work"),
    )

    def __init__(self, of: int, costs: ModelCosts, objective: Objective, prompt: float, output: float) -> None:
        self.of, self.costs = of, costs
        self.ttft, self.tpot = objective.ttft_s, objective.tpot_s
        self.wait: deque[tuple[float, int, int]] = deque()
        """First token's last moment, prompt, answer."""
        self.aside: deque[tuple[float, int, int]] = deque()
        """The same of those that are too dear: begun where nothing else is to be done."""
        self.batch: list[tuple[float, int, _Row]] = []
        self.step = self.debt = 0.0
        self.ends = math.inf
        """When the first of its batch will be done, if it runs on and nothing comes."""
        self.taking = -math.inf
        """When the next requests are begun, while others run."""
        self.left, self.ready_at = -math.inf, math.inf
        self.resident = False
        self.prefill_s = 1 / costs.prefill_tokens_s
        self.usual = max(1.0, output)
        self.request_s = prompt * self.prefill_s + self.usual * (costs.step_s + costs.row_s)
        self.work = WorkCosts(self.prefill_s, costs.step_s, costs.row_s)
        self.rows = 1.0
        """How many run at once where each is given the time that its objective allows."""
        self.switching = SwitchShare()
        self.steps = min(self.usual, self.ttft / 2 / self.tpot) if self.tpot else self.usual
        least_s = self.work.steps_s(self.steps, 1)
        self.resident_least_s = least_s + costs.resident_s
        self.parked_least_s = least_s + costs.parked_s
        """What a turn of it takes at least, switch and all."""


class Replay:
    """One run of a device's requests."""

    def __init__(
        self,
        traffic: Traffic,
        models: Sequence[tuple[int, ModelCosts, Objective]],
        *,
        device_bytes: float,
        max_wait_s: float,
    ) -> None:
        """``models``: each one's place in the traffic's aliases; it has to be all of those that are asked for."""
        self._traffic = traffic
        usual = _usual(traffic)
        self._models = {of: _Model(of, costs, goal, *usual.get(of, (1.0, 1.0))) for of, costs, goal in models}
        self._room = device_bytes
        self._patience_s = CAUTION * max_wait_s
        self._asked: dict[int, _Model] = {}
        """Models with something waiting or frozen; the active one too."""
        self._resident: dict[int, _Model] = {}
        """On the device, or on their way there; the least recently used first."""
        self._copying: _Model | None = None
        self._now = 0.0
        self._since = 0.0
        self._brought_s = self._again_s = 0.0
        """What it took to go to the active model, and to prefill again what ran there."""
        self._number = 0
        self._leaving_since = math.inf
        self._closes = self._ends = math.inf
        """From when on nothing is begun in the active model's turn, which is about to end, and when it does."""
        self._price = math.inf
        self._priced = -math.inf
        self._first = self._seen = 0
        """Of what came, the first of lately, and how many have."""
        self.tally = Tally()
        if self._models:
            self._active = next(iter(self._models.values()))
            self._reside(self._active)

    def run(self) -> Tally:
        """To the end of the last request."""
        if not self._models:
            return self.tally
        at, of, prompt, output = self._traffic.at, self._traffic.of, self._traffic.prompt, self._traffic.output
        count, place = len(at), 0
        look = math.inf
        models, asked = self._models, self._asked
        while place < count or asked:
            active = self._active
            until = min(look, self._next_of(active))
            if place < count and at[place] <= until:
                moment, model = at[place], models[of[place]]
                model.wait.append((moment + model.ttft, prompt[place], output[place]))
                self._seen = place = place + 1
                if model.of not in asked:
                    asked[model.of] = model
                if model is active and active.batch:
                    self._advance(moment)
                    self._begin(active)
                elif math.isinf(until):
                    self._now = max(self._now, moment)
                    look = self._decide()
                elif math.isinf(look):
                    look = max(self._now, moment) + self._interval(active)
                continue
            self._advance(until)
            if active.batch and until >= active.ends:  # a clock of many seconds has no room for the last bit of a step
                active.step = max(active.step, active.batch[0][0])
            if active.batch and active.batch[0][0] <= active.step + _EPSILON:
                self._finish(active)
            elif active.batch and self._has_more(active) and until >= active.taking:
                self._begin(active)
            if until >= look or not active.batch:
                look = self._decide()
        self.tally.end = self._now
        return self.tally

    # --- the active model's batch ---

    def _next_of(self, model: _Model) -> float:
        """When its first request ends, or more are begun."""
        if not model.batch:
            return math.inf
        return min(model.ends, model.taking) if self._has_more(model) and model.taking > self._now else model.ends

    def _has_more(self, model: _Model) -> bool:
        """Whether something waits for its turn in the batch."""
        return bool(model.wait or (model.aside and len(self._asked) == 1))

    def _expect(self, model: _Model) -> None:
        if model.batch:
            pace = model.costs.step_s + len(model.batch) * model.costs.row_s
            model.ends = self._now + model.debt + max(0.0, model.batch[0][0] - model.step) * pace

    def _advance(self, to: float) -> None:
        """Let the active model serve up to a moment."""
        model, seconds = self._active, to - self._now
        if seconds <= 0:
            return
        self._now = to
        if not model.batch:
            return
        self.tally.serving_s += seconds
        debt = model.debt
        if debt >= seconds:
            model.debt = debt - seconds
            return
        model.debt = 0.0
        rows = len(model.batch)
        model.step += (seconds - debt) / (model.costs.step_s + rows * model.costs.row_s)

    def _begin(self, model: _Model) -> None:
        """Start a portion of what waits, as far as there is room, as the scheduler's ``take`` does.

        What can't have its first token in time any more is refused.
        """
        slots, portion = model.costs.max_running, Portion(AT_ONCE * model.tpot)
        if model.batch and (self._now < model.taking or self._now >= self._closes):
            slots = 0
        while len(model.batch) < slots and not portion.full and (asked := self._next(model.wait, model.prefill_s)):
            if self._cost_s(model, asked[1]) > self._price:
                model.aside.append(asked)
            else:
                portion.prompts_s += self._start(model, *asked)
        if not model.batch or len(self._asked) == 1:
            few = min(slots, len(model.batch) + FEW)
            while len(model.batch) < few and not portion.full and (asked := self._next(model.aside, model.prefill_s)):
                portion.prompts_s += self._start(model, *asked)
        if portion.prompts_s:
            model.taking = self._now + portion.lasts_s(model.work, len(model.batch))
        self._expect(model)

    def _next(self, queue: deque[tuple[float, int, int]], prefill_s: float) -> tuple[float, int, int] | None:
        """The first that can have its first token in time still; those before it are refused."""
        while queue:
            asked = queue.popleft()
            if self._now + asked[1] * prefill_s <= asked[0]:
                return asked
            self.tally.missed += 1
        return None

    def _start(self, model: _Model, first_by: float, prompt: int, output: int) -> float:
        """The seconds that its prompt takes."""
        costs, batch = model.costs, model.batch
        prompt_s = prompt * model.prefill_s
        model.debt += prompt_s
        first_at = self._now + model.debt + costs.step_s + (len(batch) + 1) * costs.row_s
        self._number += 1
        row = _Row(first_by, first_at, output, prompt_s)
        heapq.heappush(batch, (model.step + output, self._number, row))
        return prompt_s

    def _cost_s(self, model: _Model, prompt: int) -> float:
        """What a request costs the device in a batch of the usual size."""
        return model.work.request_s(prompt, model.usual, model.rows) + model.switching.each_s

    def _set_price(self) -> None:
        """See ``goodput.price``."""
        at, of, prompt = self._traffic.at, self._traffic.of, self._traffic.prompt
        self._priced = self._now
        while self._first < self._seen and at[self._first] <= self._now - LATELY_S:
            self._first += 1
        if self._first == self._seen:
            self._price = math.inf
            return
        seconds = max(_PRICE_S, self._now - at[self._first])
        came = range(self._first, self._seen)
        for name, count in Counter(of[place] for place in came).items():
            model = self._models[name]
            model.rows = min(float(model.costs.max_running), max(1.0, count / seconds * model.usual * model.tpot))
            model.switching.among(count / seconds * model.ttft / 2)
        costs = ((0.0, self._cost_s(self._models[of[place]], prompt[place])) for place in came)
        self._price = price(costs, seconds)[1]

    def _finish(self, model: _Model) -> None:
        """Answer what has its last token."""
        batch, now, tally = model.batch, self._now, self.tally
        while batch and batch[0][0] <= model.step + _EPSILON:
            row = heapq.heappop(batch)[2]
            first_at = min(row.first_at, now)
            if first_at <= row.first_by + 1e-6 and now <= row.first_by + (row.output - 1) * model.tpot + 1e-6:
                tally.met += 1
                tally.met_tokens += row.output
                tally.met_of[model.of] = tally.met_of.get(model.of, 0) + 1
            else:
                tally.missed += 1
        self._begin(model)

    # --- whose turn it is ---

    def _decide(self) -> float:
        """Go where most objectives are met for the time, as the policy does. Returns when to look again."""
        if self._now >= self._priced + _PRICE_S:
            self._set_price()
        while True:
            self._choose()
            active = self._active
            self._begin(active)
            if active.batch or active.wait or active.aside:
                break
            self._asked.pop(active.of, None)  # all that it was chosen for can't be in time
            if not self._asked:
                break
        if len(self._asked) < 2:
            return math.inf
        look = self._now + self._interval(self._active)
        return min(look, self._closes if self._now < self._closes else self._ends)

    def _choose(self) -> None:
        """Switch, where another turn is worth more, until none is."""
        while True:
            active, (best, worth, late, longest) = self._active, self._survey()
            if best is None:
                self._stay()
                return
            if active.batch or active.wait or active.aside:
                settled = self._now >= self._since + max(_SHORTEST_S / 2, self._brought_s)
                if settled and longest + self._patience_s < self._now:
                    best = late
                elif not settled or worth <= self._worth(active):
                    self._stay()
                    self._fetch(best)
                    return
                elif active.batch and self._now < self._close(active, best):
                    self._fetch(best)
                    return
            self._switch(best)

    def _stay(self) -> None:
        """The active model's turn is not about to end."""
        self._leaving_since = self._closes = self._ends = math.inf

    def _close(self, active: _Model, best: _Model) -> float:
        """When its turn ends, as the policy has it, from now on."""
        since = self._leaving_since = min(self._leaving_since, self._now)
        brought_s = 0.0 if best.resident else self._switch_s(best)
        self._closes, self._ends = closing(self._now, since, active.work, len(active.batch), brought_s)
        return self._ends

    def _survey(self) -> tuple[_Model | None, float, _Model, float]:
        """Whose turn is worth most but the active model's, and who has waited longest, and since when.

        What can't have its first token in time any more is refused on the way.
        """
        now, active, copying = self._now, self._active, self._copying
        best, worth, late, longest = None, -1.0, active, math.inf
        gone = []
        for model in self._asked.values():
            wait, batch, since = model.wait, model.batch, model.left
            while wait and wait[0][0] <= now:
                wait.popleft()
                self.tally.missed += 1
            while model.aside and model.aside[0][0] <= now:
                model.aside.popleft()
                self.tally.missed += 1
            if not batch:
                if not wait and not model.aside:
                    gone.append(model.of)
                    continue
                since = max(since, (wait or model.aside)[0][0] - model.ttft)
            if model is active:
                continue
            if since < longest:
                late, longest = model, since
            least_s = model.resident_least_s if model.resident or model is copying else model.parked_least_s
            if len(batch) + len(wait) + LATE > worth * least_s and (each := self._worth(model)) > worth:
                best, worth = model, each
        for of in gone:
            del self._asked[of]
        return best, worth, late, longest

    @staticmethod
    def _interval(model: _Model) -> float:
        return max(_SHORTEST_S, model.request_s * _LOOK)

    def _worth(self, model: _Model) -> float:
        """Objectives that its turn meets per second: see ``goodput.turn``."""
        away = model is not self._active
        switch_s = self._switch_s(model) if away else 0.0
        begins = self._now + switch_s
        ttft, tpot, step, met = model.ttft, model.tpot, model.step, 0.0
        for last, _, row in model.batch:
            said = row.output - last + step
            lost = row.first_at > row.first_by or begins > row.first_by + max(said, model.usual) * tpot
            met += LATE if lost else counts(row.first_by + said * tpot - begins, ttft)
        at, rows, slots = begins + (model.debt if away else 0.0), len(model.batch), model.costs.max_running
        for first_by, prompt, _ in islice(model.wait, slots - rows):
            prompt_s = prompt * model.prefill_s
            if at + prompt_s <= first_by and self._cost_s(model, prompt) <= self._price:
                at += prompt_s
                rows += 1
                met += counts(first_by - at, ttft)
        if not rows:
            met, rows = LATE, 1
        steps_s = model.work.steps_s(model.steps, rows)
        back_s = self._brought_s + self._again_s if away and (self._active.batch or self._active.wait) else 0.0
        return met / (switch_s + at - begins + steps_s + back_s)

    # --- memory and switches ---

    def _switch_s(self, model: _Model) -> float:
        costs = model.costs
        if model.resident:
            return costs.resident_s
        if model is self._copying:
            return min(costs.parked_s, max(0.0, model.ready_at - self._now) + costs.resident_s)
        return costs.parked_s

    def _switch(self, model: _Model) -> None:
        left, seconds = self._active, self._switch_s(model)
        self._stay()
        left.left = self._now
        if not left.batch and not left.wait and not left.aside:
            self._asked.pop(left.of, None)
        self._reside(model)
        self._now += seconds
        if model.batch:
            gap = self._now - model.left
            for _, _, row in model.batch:
                if row.first_at > model.left:
                    row.first_at += gap
        model.switching.switched(seconds)
        self.tally.switches += 1
        self.tally.switching_s += seconds
        self._active, self._since, self._brought_s, self._again_s = model, self._now, seconds, model.debt

    def _reside(self, model: _Model) -> None:
        """Make it resident, now: others are parked as far as they must be."""
        if self._copying is not None and self._copying is not model and not self._copying.resident:
            self._resident.pop(self._copying.of, None)
        self._copying = None
        self._resident.pop(model.of, None)
        self._resident[model.of] = model
        if not model.resident:
            self._make_room(model, beside=None)
        model.resident = True

    def _fetch(self, away: _Model) -> None:
        """Begin to copy in the next one beside the turn that runs, where there is room."""
        copying = self._copying
        if copying is not None:
            if copying.ready_at > self._now:
                return
            copying.resident, self._copying = True, None
        if away.resident or away.costs.device_bytes + self._active.costs.device_bytes > self._room:
            return
        self._resident[away.of] = away
        self._make_room(away, beside=self._active)
        self._copying, away.ready_at = away, self._now + away.costs.parked_s

    def _make_room(self, incoming: _Model, *, beside: _Model | None) -> None:
        """Park the least recently used, those that nobody asks for first, until what is there fits."""
        over = sum(model.costs.device_bytes for model in self._resident.values()) - self._room
        if over <= 0:
            return
        stays = (incoming, beside)
        there = [model for model in self._resident.values() if model not in stays]
        there.sort(key=lambda model: model.of in self._asked)
        for model in there:
            if over <= 0:
                break
            over -= model.costs.device_bytes
            del self._resident[model.of]
            self._park(model)

    @staticmethod
    def _park(model: _Model) -> None:
        model.resident = False
        if model.batch:
            back_s, prefill_s, step = model.costs.row_back_s, model.prefill_s, model.step
            if back_s is None:
                again = sum(row.prompt_s + prefill_s * (row.output - last + step) for last, _, row in model.batch)
            else:
                again = back_s * len(model.batch)
            model.debt = again if back_s is None else model.debt + again
            for _, _, row in model.batch:
                if row.first_at > model.left:
                    row.first_at += again


def _usual(traffic: Traffic) -> dict[int, tuple[float, float]]:
    """Tokens of each model's prompts and answers on average."""
    sums: dict[int, list[float]] = {}
    for _, of, prompt, output in traffic:
        known = sums.setdefault(of, [0.0, 0.0, 0.0])
        known[0] += prompt
        known[1] += output
        known[2] += 1
    return {of: (prompt / n, output / n) for of, (prompt, output, n) in sums.items()}
