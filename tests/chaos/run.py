"""One chaos run: producers at a steady rate, three workers, what the plan has in store for them, and a verdict."""

import asyncio
import json
import math
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.cluster import LocalCluster
from service.kafka.topics import ensure_topics
from service.settings import load
from tests.chaos.asking import ALIASES, Asking
from tests.chaos.caller import Caller
from tests.chaos.check import LATE_S, Recovery, continued, judge, origin_of, recovery, stepped_over, unexplained
from tests.chaos.plan import Kind, plan
from tests.chaos.reader import Read, everything, reading
from tests.chaos.wreck import Wrecker
from tests.support.tally import total
from tests.support.workers import Workers

SESSION_TIMEOUT_S = 10.0
RECOVERED_WITHIN_S = SESSION_TIMEOUT_S + 5
STEP_S = 0.005
SETTLE_WITHIN_S = 180.0
JUDGED = ("lost", "repeated", "unasked", "wrong_model", "wrong")


@dataclass(frozen=True)
class Scale:
    requests: int
    faults: int
    seed: int
    rate: float
    workers: int
    kinds: frozenset[Kind]
    hold_s: float
    park_after_s: float
    long_answers: bool = False
    partitions: int = 6
    largest: float = math.inf
    """Bytes of a hostile batch; a larger one is written to the topic of requests, and to no other."""


class Run:
    """From an empty broker to figures. ``folder`` is for the workers' logs."""

    def __init__(self, scale: Scale, cluster: LocalCluster, folder: Path) -> None:
        self.scale = scale
        self.folder = folder
        self.cluster = cluster
        self.bootstrap = cluster.bootstrap
        prefix = f"chaos-{uuid.uuid4().hex[:6]}"
        secret = secrets.token_hex()
        key = folder / "key"
        key.write_text(secret)
        self.values = values = {
            "bootstrap_servers": cluster.bootstrap,
            "topic_prefix": f"{prefix}-",
            "group_id": prefix,
            "request_partitions": str(scale.partitions),
            "result_partitions": str(scale.partitions),
            "session_timeout_s": str(SESSION_TIMEOUT_S),
            "rebalance_timeout_s": "20",
            "shutdown_timeout_s": "5",
            "hold_s": str(scale.hold_s),
            "park_after_s": str(scale.park_after_s),
            "max_wait_s": str(LATE_S / 2),  # who waits longer than LATE_S is held up by a fault, not by the schedule
            "control_key_file": str(key),
            "pool_key_file": str(key),
            "log_level": "info",
        }
        self.settings = load(**values)
        self.topics = self.settings.topics
        self.workers = Workers(settings=[values] * scale.workers, folder=folder, aliases=ALIASES, step_s=STEP_S)
        self.asking = Asking(
            topics=self.topics, bootstrap=cluster.bootstrap, seed=scale.seed, long_answers=scale.long_answers
        )
        self.caller = Caller(
            settings=self.settings, asked=self.asking.asked, seed=scale.seed, long_answers=scale.long_answers
        )
        self.wrecker = Wrecker(
            settings=self.settings,
            cluster=cluster,
            workers=self.workers,
            asking=self.asking,
            keys=(secret.encode(),),
            seed=scale.seed,
            largest=scale.largest,
        )

    async def __call__(self) -> dict[str, Any]:
        await ensure_topics(self.settings, list(ALIASES))
        async with self.workers:
            async with self.asking.producer() as producer:
                await (await self.asking.ask(producer))  # so that the clock starts when somebody serves
            await self._wait_for_results()
            enough = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.caller.ask_until(enough))
                done = await self._traffic()
                enough.set()
            await self._wait_for_results()
            await self.caller.look()
            ends, more = list(self.workers.ends), await self._while_they_live()
        return await self._figures(done, ends) | more

    async def _traffic(self) -> dict[str, int]:
        """Requests at the scale's rate, and meanwhile what is done to workers and brokers: how often of each kind."""
        scale = self.scale
        faults = plan(
            seed=scale.seed,
            faults=scale.faults,
            over_s=scale.requests / scale.rate,
            workers=scale.workers,
            kinds=scale.kinds,
        )
        async with asyncio.TaskGroup() as traffic:
            traffic.create_task(self.asking.at_a_rate(range(scale.requests), scale.rate))
            traffic.create_task(self.wrecker.all(faults))
        return dict(Counter(fault.kind.value for fault in faults))

    async def _while_they_live(self) -> dict[str, Any]:
        """More figures, taken when all is answered and the workers are still there."""
        return {}

    async def _figures(self, faults: dict[str, int], ends: Sequence[Any]) -> dict[str, Any]:
        wrecker, asking = self.wrecker, self.asking
        results, dead = await self._all(self.topics.results), await self._all(self.topics.dead_letters)
        skipped = stepped_over(await self._all(self.topics.status))
        self._note(results)
        verdict = judge(asking.asked, results, dead, strange=wrecker.strange, stepped_over=skipped)
        by_record = unexplained(ends, wrecker.disturbances)
        recoveries = self._recoveries(results)
        undisturbed = [one.took_s for one in recoveries if not one.disturbed]
        return {
            "sent": verdict.sent,
            "results": verdict.results,
            **{name: len(getattr(verdict, name)) for name in JUDGED},
            "outcomes": dict(verdict.outcomes),
            "parked": sum([len(await self._all(f"{self.topics.requests}.{alias}")) for alias in ALIASES]),
            "calls": self.caller.calls,
            "calls_wrong": len(self.caller.wrong),
            "calls_unsure": self.caller.unsure,
            "skewed": asking.skewed,
            "hostile": wrecker.hostile.total(),
            "hostile_by_topic": dict(wrecker.hostile),
            "hostile_requests": len(wrecker.strange),
            "hostile_outcomes": dict(verdict.strange_outcomes),
            "hostile_refused_by_broker": dict(wrecker.refused),
            "faults": sum(faults.values()),
            "faults_by_kind": faults,
            "worker_ends": len(ends),
            "worker_ends_by_record": len(by_record),
            "recovery_max_s": max(undisturbed, default=0.0),
            "recovery_disturbed_max_s": max((one.took_s for one in recoveries if one.disturbed), default=0.0),
            "recoveries_s": undisturbed,
            "recovered_in_time": sum(took <= RECOVERED_WITHIN_S for took in undisturbed),
            **(self._continued(results) if self.scale.long_answers else {}),
            "good": verdict.good and not by_record and not self.caller.wrong,
            "examples": {name: getattr(verdict, name)[:5] for name in JUDGED} | {"calls_wrong": self.caller.wrong[:5]},
            "answers_of_wrong": self._answers(results, [*verdict.repeated, *verdict.wrong_model, *verdict.wrong]),
            "ends_by_record": [f"worker {end.worker}, exit {end.code}: {end.said}" for end in by_record[:10]],
        }

    def _continued(self, results: Sequence[Read]) -> dict[str, Any]:
        found = continued(self.asking.asked, results, decoded=total(self.folder))
        return {
            "long_answers": found.long,
            "continued": found.continued,
            "words_in_results": found.said,
            "words_decoded": found.decoded,
            "repeated_words_share": round(found.repeated_share, 4),
        }

    async def _all(self, topic: str) -> list[Read]:
        return await everything(self.bootstrap, self.topics.named(topic))

    def _answers(self, results: Sequence[Read], names: Sequence[str]) -> list[dict[str, Any]]:
        """What was asked and answered where that does not agree, for the first few of ``names``."""
        names = [name.split(": ")[0] for name in names[:5]]
        found: list[dict[str, Any]] = []
        for record in results:
            result = json.loads(record.value or b"")
            if result["id"] in names or origin_of(result) in names:
                where = f"{record.partition}/{record.offset} at {record.at}"
                asked = str(self.asking.asked.get(result["id"]))
                found.append({**result, "asked": asked, "written": where, "body": str(result.get("body"))[:200]})
        return found

    def _note(self, results: Sequence[Read]) -> None:
        """When each request was asked and answered, beside the workers' logs: for whoever looks for a delay."""
        asked = self.asking.asked
        began = min(request.at for request in asked.values())
        with (self.folder / "answers.csv").open("w") as table:
            table.write("id,asked_s,answered_s,origin\n")
            for record in results:
                id_ = (record.key or b"").decode("utf-8", "replace")
                if id_ in asked:
                    place = origin_of(json.loads(record.value or b""))
                    table.write(f"{id_},{asked[id_].at - began:.3f},{record.at - began:.3f},{place}\n")

    def _recoveries(self, results: Sequence[Read]) -> list[Recovery]:
        deaths = self.wrecker.deaths
        away = [(began, ended) for _, began, ended in self.wrecker.disturbances]
        away += [(death, death + 2 * SESSION_TIMEOUT_S) for death in deaths]
        return [
            recovery(self.asking.asked, results, death, [one for one in away if one[0] != death]) for death in deaths
        ]

    async def _wait_for_results(self) -> None:
        """Until all is answered, hostile requests too, or too long. What perhaps no broker took is not waited for."""
        waiting = {place for place, one in self.wrecker.strange.items() if not one.once}
        waiting |= {id_ for id_, one in self.asking.asked.items() if not one.unsure}
        deadline = time.time() + SETTLE_WITHIN_S
        names = [self.topics.named(topic) for topic in (self.topics.results, self.topics.status)]
        async with reading(self.bootstrap, names[0]) as results, reading(self.bootstrap, names[1]) as status:
            while waiting and time.time() < deadline:
                for record in await results.more():
                    result = json.loads(record.value or b"")
                    waiting -= {result["id"], origin_of(result)}
                waiting -= set(stepped_over(await status.more()))
