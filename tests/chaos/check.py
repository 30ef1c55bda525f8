"""The independent reader's verdict: what came out, against nothing but what was asked."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka.structs import ConsumerRecord

LATE_S = 2.0
"""A request that was answered later than this was held up by a fault."""


@dataclass
class Asked:
    """A request as it was sent: ``words`` are to come back. ``fatal`` ones kill engines, and are to end as poison."""

    model: str
    at: float
    words: int = 1
    fatal: bool = False
    cancelled: bool = False
    """Somebody asked for it to be cancelled; it may have been done by then."""


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

    @property
    def good(self) -> bool:
        return not (self.lost or self.repeated or self.unasked or self.wrong_model or self.wrong)


def judge(asked: Mapping[str, Asked], results: Sequence[ConsumerRecord], dead: Sequence[ConsumerRecord]) -> Verdict:
    """Exactly one result per request, by its model, with its words; dead letters for the poisonous ones alone."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in results:
        result = json.loads(record.value)
        found[result["id"]].append(result)
    letters = Counter((record.key or b"").decode() for record in dead)
    verdict = Verdict(sent=len(asked), results=len(results))
    for id_, request in asked.items():
        answers, dead_letters = found.pop(id_, []), letters.pop(id_, 0)
        if not answers:
            verdict.lost.append(id_)
            continue
        if len(answers) > 1:
            verdict.repeated.append(id_)
        answer = answers[0]
        verdict.outcomes[answer["outcome"]] += 1
        if not _right_model(request, answer):
            verdict.wrong_model.append(id_)
        elif not _right(request, answer) or dead_letters != request.fatal:
            verdict.wrong.append(id_)
    verdict.unasked = [*found, *letters]
    return verdict


def _words(result: Mapping[str, Any]) -> list[str]:
    body = result.get("body")
    return [] if body is None else str(body["choices"][0]["message"]["content"]).split()


def _right_model(request: Asked, result: Mapping[str, Any]) -> bool:
    """The fake engine's words name the model that spoke."""
    return result["model"] == request.model and all(word.startswith(request.model) for word in _words(result))


def _right(request: Asked, result: Mapping[str, Any]) -> bool:
    """Whether this is how the request must end: who is innocent is answered in full, whatever died around it."""
    wanted = [f"{request.model}{n}" for n in range(request.words)]
    words = _words(result)
    if request.fatal:
        return result["outcome"] == "failed" and result.get("failure") == "poison"
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
    results: Iterable[ConsumerRecord],
    death: float,
    others: Iterable[tuple[float, float]],
) -> Recovery:
    """How long after a death it took until nobody waited longer than LATE_S any more.

    ``others``: from when to when other faults took a worker or the broker away.
    """
    answered = {(record.key or b"").decode(): record.timestamp / 1000 for record in results}
    back = death
    for id_, request in sorted(asked.items(), key=lambda item: item[1].at):
        if request.at < death - LATE_S or request.fatal or id_ not in answered:
            continue
        if request.at > max(back, death + 1):
            break
        if answered[id_] > max(death, request.at + LATE_S):
            back = max(back, answered[id_])
    disturbed = any(began < back and death < ended for began, ended in others)
    return Recovery(death, round(back - death, 2), disturbed)
