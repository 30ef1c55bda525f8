"""The independent reader: read_committed, from the beginning, knowing only what was asked."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka.structs import ConsumerRecord


@dataclass(frozen=True)
class Asked:
    """A request as it was sent; ``fatal`` ones kill engines, and are to fail."""

    model: str
    at: float
    fatal: bool = False


@dataclass
class Verdict:
    """What the results say about what was asked."""

    sent: int
    results: int
    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    wrong_model: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    blamed: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        return not (self.lost or self.repeated or self.unasked or self.wrong_model or self.failed)


def judge(asked: Mapping[str, Asked], records: Sequence[ConsumerRecord]) -> Verdict:
    """Exactly one terminal result per request, by the model that it named, and none that nobody asked for."""
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        result = json.loads(record.value)
        results[result["id"]].append(result)
    verdict = Verdict(sent=len(asked), results=len(records))
    for id_, request in asked.items():
        found = results.pop(id_, [])
        if not found:
            verdict.lost.append(id_)
            continue
        if len(found) > 1:
            verdict.repeated.append(id_)
        result = found[0]
        verdict.outcomes[result["outcome"]] += 1
        if result["outcome"] == "completed" and not right_model(request, result):
            verdict.wrong_model.append(id_)
        if result["outcome"] == "failed" and not request.fatal:
            # Whoever was there at three deaths is taken for the culprit; with this many faults an innocent can be.
            (verdict.blamed if result.get("failure") == "poison" else verdict.failed).append(id_)
    verdict.unasked = list(results)
    return verdict


def right_model(request: Asked, result: dict[str, Any]) -> bool:
    """The fake engine's words name the model that spoke."""
    text = result["body"]["choices"][0]["message"]["content"]
    return result["model"] == request.model and bool(text) and all(request.model in word for word in text.split())


def recovery_s(asked: Mapping[str, Asked], records: Sequence[ConsumerRecord], death: float) -> float:
    """How long after a death until all that was asked around it was answered."""
    answered = {json.loads(record.value)["id"]: record.timestamp / 1000 for record in records}
    around = [id_ for id_, request in asked.items() if death - 1 <= request.at <= death + 1 and not request.fatal]
    return max([0.0, *(answered[id_] - death for id_ in around if id_ in answered)])
