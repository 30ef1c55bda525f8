"""The independent reader's verdict: what came out, against nothing but what was asked."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.plan import Kind
from tests.chaos.reader import Read
from tests.support.workers import End

_PLACES = re.compile(r"([\w.-]+/\d+)/(\d+)(?: to (\d+))?: ")
_ENGINE_DIED, _NO_BROKER = "the engine died", "broker"
"""What a worker says at its end that it owes to its engine, or to a broker that is away."""
DEATHS_OF_POISON = 3
LATE_S = 2.0
"""A request that was answered later than this was held up by a fault; one of many words takes that long by itself."""
MANY_WORDS = 100


@dataclass
class Asked:
    """A request as it was sent: ``words`` are to come back. ``fatal`` ones kill engines, and are to end as poison."""

    model: str
    at: float
    words: int = 1
    fatal: bool = False
    cancelled: bool = False
    """Somebody asked for it to be cancelled; it may have been done by then."""
    expired: bool = False
    """Its deadline was over when it was sent."""
    unsure: bool = False
    """No broker said whether it was written, and who asked was told so."""


@dataclass(frozen=True)
class Strange:
    """A hostile record on a topic of requests. ``answered``: it is a good request but for its lies."""

    shape: str
    answered: bool = False
    once: bool = False
    """Another record of its key may stand for it, or have deleted it: then it has no result."""


@dataclass
class Verdict:
    """What the results say about what was asked."""

    sent: int
    results: int
    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    wrong_model: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Another outcome, or other words, than the request must have."""
    outcomes: Counter[str] = field(default_factory=Counter)
    strange_outcomes: Counter[str] = field(default_factory=Counter)
    """How hostile requests ended: their outcomes, or that they were stepped over."""

    @property
    def good(self) -> bool:
        return not (self.lost or self.repeated or self.unasked or self.wrong_model or self.wrong)


def judge(
    asked: Mapping[str, Asked],
    results: Sequence[Read],
    dead: Sequence[Read],
    *,
    strange: Mapping[str, Strange] | None = None,
    stepped_over: Iterable[str] = (),
) -> Verdict:
    """Exactly one result per request, by its model, with its words; dead letters for the poisonous ones alone.

    ``strange``: hostile requests by their origin (TOPIC/PARTITION/OFFSET); each has one result too, whatever it says,
    or is among those that were ``stepped_over``.
    """
    strange = strange or {}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    found_strange: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in results:
        result = json.loads(record.value or b"")
        place = origin_of(result)
        if place in strange:
            found_strange[place].append(result)
        else:
            found[result["id"]].append(result)
    asked = {id_: request for id_, request in asked.items() if id_ in found or not request.unsure}
    verdict = Verdict(sent=len(asked), results=len(results))
    ours = {result["id"] for answers in found_strange.values() for result in answers}
    letters = Counter((record.key or b"").decode("utf-8", "replace") for record in dead)
    for id_ in ours - asked.keys():
        del letters[id_]
    for id_, request in asked.items():
        _judge_one(verdict, id_, request, found.pop(id_, []), letters.pop(id_, 0))
    skipped = Counter(stepped_over)
    for place, one in strange.items():
        _judge_strange(verdict, f"{place}: {one.shape}", one, found_strange.get(place, []), skipped[place])
    verdict.unasked = [*found, *letters]
    return verdict


def origin_of(result: Mapping[str, Any]) -> str:
    """The place of the record that a result answers."""
    origin = result.get("origin") or {}
    return f"{origin.get('topic')}/{origin.get('partition')}/{origin.get('offset')}"


def stepped_over(status: Iterable[Read]) -> list[str]:
    """The origins of the records that workers say they could not read; a report may name the first and the last."""
    found: list[str] = []
    for record in status:
        for partition, first, last in _PLACES.findall(str(json.loads(record.value or b"{}").get("reason"))):
            found += [f"{partition}/{offset}" for offset in range(int(first), int(last or first) + 1)]
    return found


def unexplained(ends: Iterable[End], disturbances: Sequence[tuple[Kind, float, float]]) -> list[End]:
    """The ends of processes that no planned fault accounts for: not told to end, and not bereft of engine or broker.

    A poisonous prompt ends as many engines as it takes to convict it, and no more; but while a broker is away, what a
    dying worker writes about it may be lost.
    """
    fatal = sorted(began for kind, began, _ in disturbances if kind is Kind.ENGINE)
    outages = [(began, ended) for kind, began, ended in disturbances if kind in {Kind.BROKER, Kind.BROKER_KILL}]
    left, died = [], 0
    for end in sorted(ends, key=lambda one: one.at):
        away = any(began <= end.at <= ended for began, ended in outages)
        if end.signalled:
            continue
        if _ENGINE_DIED in end.said and away and fatal and fatal[0] < end.at:
            continue
        if _ENGINE_DIED in end.said and died < DEATHS_OF_POISON * sum(began < end.at for began in fatal):
            died += 1
        elif not (_NO_BROKER in end.said and away):
            left.append(end)
    return left


def _judge_one(verdict: Verdict, id_: str, request: Asked, answers: list[dict[str, Any]], letters: int) -> None:
    if not answers:
        verdict.lost.append(id_)
        return
    if len(answers) > 1:
        verdict.repeated.append(id_)
    answer = answers[0]
    verdict.outcomes[answer["outcome"]] += 1
    if not _right_model(request, answer):
        verdict.wrong_model.append(id_)
    elif not _right(request, answer) or letters != request.fatal:
        verdict.wrong.append(id_)


def _judge_strange(verdict: Verdict, name: str, one: Strange, answers: list[dict[str, Any]], skipped: int) -> None:
    """One result, or else a report."""
    if not answers and not skipped:
        if not one.once:
            verdict.lost.append(name)
        return
    if len(answers) > 1:
        verdict.repeated.append(name)
    said = answers[0] if answers else {"outcome": "stepped over"}
    verdict.strange_outcomes[said["outcome"]] += 1
    if one.answered and said["outcome"] != "completed":
        verdict.wrong.append(f"{name}: {said['outcome']} {said.get('failure')} {said.get('error')}")


def _words(result: Mapping[str, Any]) -> list[str]:
    body = result.get("body")
    return [] if body is None else str(body["choices"][0]["message"]["content"]).split()


@dataclass(frozen=True)
class Continued:
    """What became of long answers. ``said``: words in results; ``decoded``: words that engines have said for them."""

    long: int
    continued: int
    """Results that say that they were."""
    said: int
    decoded: int

    @property
    def repeated_share(self) -> float:
        """What was said twice, or for nobody, over what was said."""
        return (self.decoded - self.said) / self.said if self.said else 0.0


def continued(asked: Mapping[str, Asked], results: Iterable[Read], *, decoded: int) -> Continued:
    """How often what outlives its worker did."""
    read = [json.loads(record.value or b"") for record in results]
    return Continued(
        long=sum(request.words > MANY_WORDS for request in asked.values()),
        continued=sum(bool(result.get("continued")) for result in read),
        said=sum(len(_words(result)) for result in read),
        decoded=decoded,
    )


def _right_model(request: Asked, result: Mapping[str, Any]) -> bool:
    """The fake engine's words name the model that spoke."""
    return result["model"] == request.model and all(word.startswith(request.model) for word in _words(result))


def _right(request: Asked, result: Mapping[str, Any]) -> bool:
    """Whether this is how the request must end: who is innocent is answered in full, whatever died around it."""
    wanted = [f"{request.model}{n}" for n in range(request.words)]
    words = _words(result)
    if request.fatal:
        return result["outcome"] == "failed" and result.get("failure") == "poison"
    if request.expired:
        return result["outcome"] == "expired" and not words
    if result["outcome"] == "cancelled":
        return request.cancelled and words == wanted[: len(words)]
    return result["outcome"] == "completed" and words == wanted


@dataclass(frozen=True)
class Recovery:
    """From a SIGKILL until requests were answered in time again; ``disturbed`` by another fault meanwhile or before."""

    at: float
    took_s: float
    disturbed: bool


def recovery(
    asked: Mapping[str, Asked],
    results: Iterable[Read],
    death: float,
    others: Iterable[tuple[float, float]],
) -> Recovery:
    """How long after a death it took until nobody waited longer than LATE_S any more.

    ``others``: from when to when other faults took a worker or the broker away.
    """
    answered = {(record.key or b"").decode(): record.at for record in results}
    back = death
    for id_, request in sorted(asked.items(), key=lambda item: item[1].at):
        if request.at < death - LATE_S or request.fatal or request.words > MANY_WORDS or id_ not in answered:
            continue
        if request.at > max(back, death + 1):
            break
        if answered[id_] > max(death, request.at + LATE_S):
            back = max(back, answered[id_])
    disturbed = any(began < back and death < ended for began, ended in others)
    return Recovery(death, round(back - death, 2), disturbed)
