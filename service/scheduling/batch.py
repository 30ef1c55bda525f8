"""When the requests of one model will be done: how fast its batch works, as learnt, and the batch worked off. Pure."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from service.scheduling.goodput import Portion
from service.scheduling.work import UNSEEN, WorkCosts

_KEPT = 0.97
"""The weight of what was seen before, with each observation: some thirty count."""
_STEP_S = 0.02
"""A step before one was seen: what answers are read at."""
_NOTHING_S = 1e-9
_APART = 0.1
"""Where what was seen lies closer together than this part of its mean, it tells no slope."""


@dataclass(slots=True)
class Line:
    """A straight line through what was seen lately, by least squares; neither it nor its slope is ever below zero."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def seen(self, x: float, y: float) -> None:
        """One more observation."""
        self.weight = _KEPT * self.weight + 1
        self.x += (x - self.x) / self.weight
        self.y += (y - self.y) / self.weight
        self.xx += (x * x - self.xx) / self.weight
        self.xy += (x * y - self.xy) / self.weight

    def at(self, x: float) -> float:
        """What is to be expected there."""
        spread = self.xx - self.x * self.x
        slope = (self.xy - self.x * self.y) / spread if spread > (_APART * self.x) ** 2 else 0.0
        slope = min(max(0.0, slope), self.y / self.x if self.x else 0.0)
        return self.y + slope * (x - self.x)


@dataclass(frozen=True, slots=True)
class Row:
    """A request as its model's batch has it: tokens that are still to come, and seconds until the first of all."""

    tokens: float
    first_s: float = 0.0
    """Of serving; 0: it has come."""
    prompt_s: float = 0.0
    """What its prompt takes the device."""
    tpot_s: float = math.inf
    """What its objective allows for each further token."""
    start_by_s: float = math.inf
    """Seconds from now by when it must start, or its first token will be late."""
    aside: bool = False
    """It begins behind all that do not stand aside, and beside a few."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Seconds that a model is to be served until a request starts, has its first token, and is answered."""

    start: float
    first: float
    end: float


class Steps:
    """What a model's requests took: by their prompts to the first token, and by the batch around them per further one.

    ``said`` is the part of the answer that they might have had which they did have.
    """

    def __init__(self) -> None:
        self._first, self._step, self._said = Line(), Line(), Line()

    def finished(self, *, prompt: float, asked: float, said: int, first_s: float, rest_s: float, beside: float) -> None:
        """A request of so many tokens, that had ``beside`` running with it on average, itself included.

        ``first_s`` are seconds from its start to its first token, ``rest_s`` from there to its end, freezes left out.
        """
        self._first.seen(prompt, first_s)
        if said > 1:
            self._step.seen(beside, rest_s / (said - 1))
        if asked > 0:
            self._said.seen(1.0, said / asked)

    @property
    def said(self) -> float:
        return min(1.0, self._said.y) if self._said.weight else 1.0

    def first_s(self, prompt: float) -> float:
        return self._first.at(prompt) if self._first.weight else _STEP_S

    def step_s(self, rows: int) -> float:
        return self._step.at(rows) if self._step.weight else _STEP_S


def work_off(
    running: Sequence[Row],
    waiting: Sequence[Row],
    slots: int,
    steps: Steps,
    *,
    work: WorkCosts = UNSEEN,
    opens_s: float = 0.0,
    spare: int | None = None,
) -> list[Moments]:
    """When each will be done if the model is served without a break: those that run, then those that wait in order.

    A request that ends makes room for the next one. What runs may be more than ``slots``; nobody starts then. Where
    requests have objectives they start in portions, as ``Scheduler.take`` gives them: the next one after ``opens_s``,
    but for who would be late by then; and what stands aside begins while fewer than ``spare`` run.
    """
    beside = slots if spare is None else min(spare, slots)
    found: list[Moments | None] = [None] * (len(running) + len(waiting))
    begun: dict[int, tuple[float, float]] = {}
    batch: list[tuple[float, int]] = []
    now = step = 0.0
    coming, opens = len(running), opens_s

    def begin(number: int, row: Row) -> None:
        begun[number] = now, now + row.first_s
        before = row.first_s / max(_NOTHING_S, steps.step_s(len(batch) + 1)) - (row.first_s > 0)
        heapq.heappush(batch, (step + max(0.0, before + row.tokens), number))

    def following() -> Row | None:
        """The next one that waits, where there is room for it."""
        row = waiting[coming - len(running)] if coming < len(found) else None
        return row if row is not None and len(batch) < (beside if row.aside else slots) else None

    for number, row in enumerate(running):
        begin(number, row)
    while True:
        next_row, early = following(), now < opens and bool(batch)
        if next_row is not None and (not early or (next_row.start_by_s < opens and not next_row.aside)):
            portion = Portion()
            while next_row is not None and not portion.full:
                begin(coming, next_row)
                portion.add(next_row.prompt_s, next_row.tpot_s)
                coming += 1
                next_row = None if early else following()
            opens = max(opens, now + portion.lasts_s(work, len(batch)))
            continue
        if not batch:
            return [moments for moments in found if moments is not None]
        last, number = batch[0]
        step_s = steps.step_s(len(batch))
        ends = now + max(0.0, last - step) * step_s
        if next_row is not None and opens < ends:
            now, step = opens, step + (opens - now) / max(_NOTHING_S, step_s)
            continue
        heapq.heappop(batch)
        now, step = ends, max(step, last)
        start, first = begun.pop(number)
        found[number] = Moments(start, min(first, now), now)
