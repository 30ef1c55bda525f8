"""A pool's own traffic, read back from its results and usage records: who asked for how much of which model, and when.

Kept in columns: a day of a million requests takes some thirty megabytes.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pydantic_core import from_json

from schemas.results import Outcome
from schemas.usage import tokens_of

_COUNTED = frozenset({Outcome.COMPLETED.value, Outcome.CANCELLED.value, Outcome.EXPIRED.value})
_LATEST = 1e12
"""Seconds since the epoch beyond which a clock is not believed."""
_MOST_TOKENS = 10_000_000
"""Of a prompt or an answer; nothing has more, whatever a record says."""
_PROMPT, _ANSWER = 500, 256
"""Tokens, where no record of any model tells."""
_SLICES, _SLICE_S = 64, 300.0
"""So many slices stand for long traffic, of so long on average: what waits has to come to rest in each."""


class LeftOut(Enum):
    """Why a record is not replayed. Nothing that is left out is silently so."""

    UNREADABLE = "no result and no usage record"
    TWICE = "told twice, as a result and as usage"
    FAILED = "failed: it never cost a model its time"
    STRANGER = "of a model that models.yaml does not have"


@dataclass(slots=True)
class Traffic:
    """Requests in order of their arrival, in columns. ``of`` is a place in ``aliases``, ``at`` seconds."""

    aliases: tuple[str, ...]
    at: "array[float]" = field(default_factory=lambda: array("d"))
    of: "array[int]" = field(default_factory=lambda: array("i"))
    prompt: "array[int]" = field(default_factory=lambda: array("i"))
    output: "array[int]" = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.at)

    def __iter__(self) -> Iterator[tuple[float, int, int, int]]:
        return zip(self.at, self.of, self.prompt, self.output, strict=True)

    def add(self, at: float, of: int, prompt: int, output: int) -> None:
        """One more, after all others. A request has a token to read and one to say, at least."""
        self.at.append(at)
        self.of.append(of)
        self.prompt.append(min(max(1, prompt), _MOST_TOKENS))
        self.output.append(min(max(1, output), _MOST_TOKENS))

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.at[-1] - self.at[0] if self.at else 0.0

    def counts(self) -> list[int]:
        """Requests by model, in the order of ``aliases``."""
        found = Counter(self.of)
        return [found[place] for place in range(len(self.aliases))]

    def sped(self, by: float) -> "Traffic":
        """The same requests, coming ``by`` times as fast."""
        at = array("d", (moment / by for moment in self.at))
        return Traffic(self.aliases, at, self.of, self.prompt, self.output)

    def sliced(self, most: int) -> "Traffic":
        """Of more than ``most`` requests about so many: slices of it all, spread evenly, one after the other.

        Within a slice nothing is left out, so what comes at once and what waits for what is as it was. Each has as many
        requests, so that busy hours count for what was asked in them.
        """
        if most >= len(self):
            return self
        count = max(1, min(_SLICES, most, int(self.span_s * most / len(self) / _SLICE_S)))
        size, made, now = most // count, Traffic(self.aliases), 0.0
        for number in range(count):
            begin, end = (len(self) * each // count for each in (number, number + 1))
            first = begin + (end - begin - size) // 2
            for place in range(first, first + size):
                now += self.at[place] - self.at[place - 1] if place else 0.0
                made.add(now, self.of[place], self.prompt[place], self.output[place])
        return made

    def joined(self, alias: str, share: float) -> "Traffic":
        """With requests for a new model, as many as ``share`` of all: each beside one that is there, and like it."""
        made = Traffic((*self.aliases, alias))
        new, added = len(self.aliases), 0
        for number, (at, of, prompt, output) in enumerate(self, start=1):
            made.add(at, of, prompt, output)
            while added < math.floor(number * share + 1e-9):
                made.add(at, new, prompt, output)
                added += 1
        return made


class Log:
    """Records as they are read, made into traffic. What a request cost is believed of its result first."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """``names``: the alias that each name stands for, its own and those of its LoRA adapters."""
        self._names = names
        self._results: set[int] = set()
        self._usage: dict[int, _Row] = {}
        self._rows: list[_Row] = []
        self.left_out: Counter[LeftOut] = Counter()
        self.assumed: tuple[str, ...] = ()
        """Of the traffic that was made last, the aliases of which no answer says how long theirs are."""

    def add(self, line: bytes | str) -> None:
        """A result or a usage record as JSON, or kcat's envelope of one."""
        why = self._add(_object(line))
        if why is not None:
            self.left_out[why] += 1

    def _add(self, found: Mapping[str, Any] | None) -> LeftOut | None:
        if found is None or (origin := _origin(found)) is None or (at := _arrived(found)) is None:
            return LeftOut.UNREADABLE
        result = "timing" in found
        if origin in self._results or (not result and origin in self._usage):
            return LeftOut.TWICE
        outcome, alias = found.get("outcome"), self._names.get(str(found.get("model")))
        if not isinstance(outcome, str) or outcome not in _COUNTED:
            return LeftOut.FAILED
        if alias is None:
            return LeftOut.STRANGER
        tokens = tokens_of(found.get("body")) if result else _tokens(found)
        said = tokens["generated_tokens"] or (1 if outcome == Outcome.COMPLETED else 0)
        row = _Row(at, alias, tokens["prompt_tokens"], said, whole=said > 0 and outcome != Outcome.EXPIRED)
        if not result:
            self._usage[origin] = row
            return None
        self._results.add(origin)
        self._rows.append(row)
        return LeftOut.TWICE if self._usage.pop(origin, None) else None

    def traffic(self, aliases: Sequence[str]) -> Traffic:
        """All of it, in order of arrival, from the second 0 on.

        A request that was given up is taken to have wanted what its model's others say on average, or what it had said
        where that is more: it was asked for, and a larger pool would have answered it. Where nobody answered any of a
        model's, it is what all models' say.
        """
        rows = sorted([*self._rows, *self._usage.values()], key=lambda row: row.at)
        answers = _usual((row.alias, row.said) for row in rows if row.whole)
        prompts = _usual((row.alias, row.prompt) for row in rows if row.prompt)
        self.assumed = tuple(dict.fromkeys(row.alias for row in rows if row.alias not in answers))
        places = {alias: place for place, alias in enumerate(aliases)}
        made = Traffic(tuple(aliases))
        for row in rows:
            prompt = row.prompt or prompts.get(row.alias, prompts.get(None, _PROMPT))
            usual = 0 if row.whole else answers.get(row.alias, answers.get(None, _ANSWER))
            made.add(row.at - rows[0].at, places[row.alias], prompt, max(row.said, usual))
        return made


@dataclass(frozen=True, slots=True)
class _Row:
    """A request as its record tells. ``whole``: ``said`` is all that it wanted."""

    at: float
    alias: str
    prompt: int
    said: int
    whole: bool


def _usual(counts: Iterable[tuple[str, int]]) -> dict[str | None, int]:
    """The mean by alias, and that of all under None."""
    sums: dict[str | None, tuple[int, int]] = {}
    for alias, tokens in counts:
        for name in (alias, None):
            total, n = sums.get(name, (0, 0))
            sums[name] = total + tokens, n + 1
    return {name: total // n for name, (total, n) in sums.items()}


def _object(line: bytes | str) -> dict[str, Any] | None:
    """A JSON object, out of its envelope where it has kcat's."""
    try:
        found = from_json(line, allow_inf_nan=False)
    except ValueError:
        return None
    if isinstance(found, dict) and isinstance(payload := found.get("payload"), str):
        return _object(payload)
    return found if isinstance(found, dict) else None


def _origin(found: Mapping[str, Any]) -> int | None:
    """The record that asked: a result and its usage name the same one. A hash, for there are millions."""
    match found.get("origin"):
        case {"topic": str(topic), "partition": int(partition), "offset": int(offset)}:
            return hash((topic, partition, offset))
    return None


def _arrived(found: Mapping[str, Any]) -> float | None:
    """When it was asked. Usage does not say: before it ran and waited for a switch, at the latest."""
    match found:
        case {"timing": {"received": int() | float() as at}}:
            return _moment(at)
        case {"timing": _}:
            return None
        case {"at": int() | float() as at}:
            ended = _moment(at)
            return (
                None if ended is None else _moment(ended - _seconds(found, "running_s") - _seconds(found, "switch_s"))
            )
    return None


def _seconds(found: Mapping[str, Any], name: str) -> float:
    """What a record says of a time; nothing where that can't be."""
    value = found.get(name)
    return (_moment(value) or 0.0) if isinstance(value, int | float) else 0.0


def _moment(value: float) -> float | None:
    return float(value) if 0 <= value < _LATEST else None


def _tokens(usage: Mapping[str, Any]) -> dict[str, int]:
    counts = {name: usage.get(name, 0) for name in ("prompt_tokens", "generated_tokens")}
    return {name: value if isinstance(value, int) and value >= 0 else 0 for name, value in counts.items()}
