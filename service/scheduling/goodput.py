"""How many objectives a model's turn meets, and in what time: the value by which turns are compared."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from schemas.objectives import Objective
from service.scheduling.work import WorkCosts

EARLY = 0.01
"""What a request counts that another turn may be taken before without its being late."""
_WHOLE = 0.2
"""One counts as a whole objective where its next token is due within this part of the time that a first one may take.
With all of that time left it counts as little as it may, and in between it rises."""
LATE = 0.001
"""What one counts that can't meet its objective any more, or stands aside: it is still to be answered."""
AT_ONCE = 4.0
"""As many are begun at once as have their prompts done in the time that so many tokens may take."""
_APART = 16.0
"""The next ones are begun so many steps later; after fewer, sooner."""
_MOST = 2.0
"""Their prompts are waited for so many times as long as they may take, and no longer."""
LATELY_S = 30.0
"""How long what came tells what will come: prices rest on that."""
FEW = 8
"""How many of those that stand aside are begun at once: others may come any moment."""
_LAST = 0.2
"""What the last switch to a model counts in what they take: what is brought in beside others takes nearly nothing."""
_AND_BACK = 2.0
"""What a switch costs in parts of what it takes: what has to go for the model is to be brought back, too."""
_FULL = 0.9
"""Of the time, how much is given away to requests; switches and thin batches take the rest."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A waiting or running request: when its next token is due, and when it is lost, in seconds of the caller's clock.

    A waiting one is lost where it has no token by then, a running one where it is not answered. ``prompt_s`` is what
    its prompt takes the device, if it has not begun; ``ttft_s`` the time that a first token may take: how soon the next
    one is due is measured by that.
    """

    next_by: float
    by: float
    prompt_s: float = 0.0
    ttft_s: float = 0.0

    def worth(self, at: float) -> float:
        """What it counts at a moment, in objectives."""
        return LATE if at > self.by else counts(self.next_by - at, self.ttft_s)


def counts(left_s: float, ttft_s: float) -> float:
    """What a request counts whose next token is due in so long."""
    if left_s <= 0.0:
        return 1.0
    if left_s >= ttft_s:
        return EARLY
    return min(1.0, max(EARLY, (1.0 - left_s / ttft_s) / (1.0 - _WHOLE)))


@dataclass(slots=True)
class Portion:
    """Requests of a model that are begun at once: no more than have their prompts done in a few tokens' time.

    ``prompts_s`` is what their prompts take, ``room_s`` what they may take by the objective of the most hurried one;
    where none has one, there is no end to it.
    """

    room_s: float = math.inf
    prompts_s: float = 0.0

    @property
    def full(self) -> bool:
        return self.prompts_s >= self.room_s

    def add(self, prompt_s: float, tpot_s: float) -> None:
        """One more. ``tpot_s`` is what its objective allows for each further token; infinity: it has none."""
        self.prompts_s += prompt_s
        self.room_s = min(self.room_s, AT_ONCE * tpot_s)

    def lasts_s(self, work: WorkCosts, rows: int) -> float:
        """How long after it the next one is begun, where ``rows`` run by then.

        What a prompt takes is not known for sure, so an endless one is not waited for.
        """
        if math.isinf(self.room_s):
            return 0.0
        steps = _APART * min(1.0, self.prompts_s / self.room_s)
        return min(self.prompts_s, _MOST * self.room_s) + work.steps_s(steps, rows)


def under_way(objective: Objective, first_by: float, *, in_time: bool, tokens: float, answer: float) -> Goal:
    """A running request whose first token is due by a moment. ``in_time``: it came by then.

    ``tokens`` are how many are there of an answer that is expected to have so many; what came before it was due leaves
    time for the next one.
    """
    if not in_time:
        return Goal(first_by, first_by, ttft_s=objective.ttft_s)
    next_by = first_by + tokens * objective.tpot_s
    return Goal(next_by, max(next_by, first_by + answer * objective.tpot_s), ttft_s=objective.ttft_s)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn is worth, in objectives, and the seconds that it takes with its switch."""

    met: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.met / self.seconds if self.seconds else 0.0


class Batch(Protocol):
    """What of a model a turn's value depends on; see ModelView."""

    @property
    def goals(self) -> Sequence[Goal]: ...
    @property
    def running(self) -> Sequence[Goal]: ...
    @property
    def again_s(self) -> float: ...
    @property
    def demand(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def steps(self) -> float: ...
    @property
    def work(self) -> WorkCosts: ...
    @property
    def switch_s(self) -> float: ...
    @property
    def weight(self) -> float: ...


def turn(model: Batch, begins: float, back_s: float = 0.0) -> Turn:
    """A turn of a model that begins at a moment: prompts are taken in as far as there is room, then steps are made.

    First come the prompts of what runs in it, as far as its keys and values were not kept.

    It is as long as brings all that run in it ahead of what their objectives ask by so much that they can be left for
    others, and goes back to those after ``back_s``. What has time yet loses little by waiting.
    """
    met = sum(goal.worth(begins) for goal in model.running)
    at, rows = begins + model.again_s, len(model.running)
    for goal in model.goals:
        if rows >= model.slots:
            break
        if at + goal.prompt_s > goal.by:
            continue
        at += goal.prompt_s
        rows += 1
        met += goal.worth(at)
    if not rows and model.demand:
        met, rows = LATE, 1
    return Turn(model.weight * met, model.switch_s + at - begins + model.work.steps_s(model.steps, rows) + back_s)


@dataclass(slots=True)
class SwitchShare:
    """A request's part of what switches to its model take lately, seconds in which the device serves nobody."""

    each_s: float = 0.0
    _switch_s: float | None = None

    def switched(self, seconds: float) -> None:
        """A switch to the model took so long."""
        before = seconds if self._switch_s is None else self._switch_s
        self._switch_s = _LAST * seconds + (1 - _LAST) * before

    def among(self, requests: float) -> None:
        """So many come while the model is away, and share the next switch to it."""
        self.each_s = _AND_BACK * (self._switch_s or 0.0) / max(1.0, requests)


def too_many(prompts: Sequence[tuple[float, float]], begins: float, apart: float = 1.0) -> tuple[set[int], float]:
    """Which of some prompts to leave out so that all others are done in time, one after another from a moment; and when
    the next one may begin.

    Of each, by when it is to be done, and the seconds that it takes; they are done in order of the former, and the next
    one waits ``apart`` times as long for it. Where one would be late, the longest so far is left out, of several as
    long the last. Where none waits longer than another takes, no fewer could be (Moore and Hodgson's); else mostly.
    """
    at, done, left_out = begins, list[tuple[float, int]](), set[int]()
    for number in sorted(range(len(prompts)), key=lambda number: prompts[number][0]):
        by, seconds = prompts[number]
        heapq.heappush(done, (-seconds, -number))
        late = at + seconds > by
        at += apart * seconds
        if late:
            longest, last = heapq.heappop(done)
            at += apart * longest
            left_out.add(-last)
    return left_out, at


Price = tuple[float, float]
"""A priority, and what a request of that priority may cost at most, in seconds: those of a worse one are too dear."""
FREE: Price = (math.inf, math.inf)


def price(costs: Iterable[Price], seconds: float) -> Price:
    """What requests may cost the device to be served: of those that came in a time, the cheapest that fill it.

    ``costs`` are their priorities and what they cost. ``FREE`` where there is time for all. What is above the price
    stands aside: the device answers more of the others in the same time.
    """
    room = _FULL * seconds
    for priority, cost in sorted(costs):
        room -= cost
        if room < 0:
            return priority, cost
    return FREE
