"""Every alert, fired by making its cause true: what a worker shows Prometheus then is given to promtool and the rules.

Where a cause takes minutes of waiting, the worker's own metrics show a worker that stands so, minute by minute.
"""

import asyncio
import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.setup import home
from schemas.base import Origin
from schemas.objectives import Objective
from schemas.results import Outcome, Result, Timing
from schemas.status import Presence, QueueInfo
from service.ports import Settlement, SourceState
from service.worker.attainment import attainment
from service.worker.metrics import Metrics, Standing
from tests.support.fake_engine import BROKEN, FakeEngine
from tests.support.waiting import PATIENCE_S

RULES = Path(__file__).parents[3] / "deploy/kubernetes/gearshift/files/alerts.yaml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
REFERENCE = (RULES.parents[3] / "REFERENCE.md").read_text()
PROMTOOL = home() / "checkers" / "promtool"
WHERE = {"job": "gearshift", "instance": "w1:8080"}
SOURCE = {"lag", "lag_tokens", "rebalances", "transaction_open_s", "overtaken", "forgotten", "unreadable"}
Scrapes = list[str | None]
"""What /metrics said, once a minute; None where nobody answered."""


async def down(served) -> Scrapes:
    async with served() as s:
        text = (await s.http.get("/metrics")).text
        s.stop.set()
        await s.done
        with pytest.raises(httpx.ConnectError):
            await s.http.get("/metrics")
    return [text, None, None, None, None]


async def healthy(served) -> Scrapes:
    async with served() as s:
        found: Scrapes = []
        for _ in range(15):
            await ask(s, "hello", "llama")
            await ask(s, "hello", "qwen")
            found.append((await s.http.get("/metrics")).text)
        return found


async def failing(served) -> Scrapes:
    """One request in two fails, after a second try."""
    async with served(max_attempts=2, retry_backoff_s=0.001, retry_backoff_max_s=0.001) as s:
        found: Scrapes = []
        for _ in range(20):
            await ask(s, "hello")
            await ask(s, BROKEN)
            found.append((await s.http.get("/metrics")).text)
        return found


async def late(served) -> Scrapes:
    """Every request expires before it is answered."""
    async with served(engine=FakeEngine(step_s=0.001), ttl_s=0.02) as s:
        found: Scrapes = []
        for _ in range(20):
            await ask(s, "hello", max_tokens=100_000)
            found.append((await s.http.get("/metrics")).text)
        return found


async def unloadable(served) -> Scrapes:
    async with served(dev_mode=True, engine=FakeEngine(broken_loads=frozenset({"qwen"}))) as s:
        await s.http.post("/v1/models/switch", json={"model": "qwen"})
        return [(await s.http.get("/metrics")).text] * 2


async def stuck(served) -> Scrapes:
    """An engine that takes no step, and a worker that says so after a moment."""
    async with served(engine=FakeEngine(step_s=3600.0), stall_after_s=0.5) as s:
        asking = asyncio.create_task(ask(s, "hello"))
        async with asyncio.timeout(PATIENCE_S):
            while (await s.http.get("/health")).status_code == 200:
                pass
        text = (await s.http.get("/metrics")).text
        asking.cancel()
        return [text] * 4


def shown(minutes: int, **by_minute: Callable[[int], object]) -> Scrapes:
    """A worker's metrics as it stands each minute."""
    metrics, clock = Metrics(), iter(range(minutes))

    def standing() -> Standing:
        minute = next(clock)
        values = {name: value(minute) for name, value in by_minute.items()}
        queues = {"llama": QueueInfo(**values.pop("queue", {}))}  # type: ignore[arg-type]
        state = values.pop("state", "serving")
        presence = Presence(worker="w1", pool="p", at=0.0, interval_s=1.0, queues=queues, state=state)  # type: ignore[arg-type]
        source = SourceState(**{name: values.pop(name) for name in SOURCE & values.keys()})  # type: ignore[arg-type]
        still = {"held": 0, "active_s": {}, "switching_s": 0.0, "serving_s": 0.0, "stalled_s": 0.0}
        return Standing(presence=presence, source=source, **{**still, **values})  # type: ignore[arg-type]

    metrics.watch(standing)
    return [metrics.render().decode() for _ in range(minutes)]


async def absent(_served) -> Scrapes:
    return [None] * 12


async def never_ready(served) -> Scrapes:
    """Its engine does not come up, though Prometheus is answered all the time."""
    opens = asyncio.Event()
    async with served(opens=opens, wait=False) as s:
        while (await s.http.get("/health")).json()["state"] != "loading":
            pass
        return [(await s.http.get("/metrics")).text] * 32


async def restarting(_served) -> Scrapes:
    """Each process of it, or each engine of a process, begins later than the one before."""
    (text,) = shown(1)
    (line,) = [line for line in text.splitlines() if line.startswith("gearshift_start_time_seconds ")]
    began = float(line.split()[1])
    return [text.replace(line, f"gearshift_start_time_seconds {began + 300 * (minute // 5)}") for minute in range(20)]


async def disconnected(_served) -> Scrapes:
    return shown(3, state=lambda _minute: "disconnected")


async def waiting(_served) -> Scrapes:
    return shown(10, queue=lambda minute: {"waiting": 1, "oldest_s": 60.0 * minute})


async def still(_served) -> Scrapes:
    return shown(4, stalled_s=lambda minute: 60.0 * minute)


async def growing(_served) -> Scrapes:
    return shown(
        40,
        queue=lambda minute: {"waiting": 100, "tokens": 60_000},
        lag=lambda minute: {"requests": 100 * minute},
        lag_tokens=lambda minute: {"requests": 20_000 * minute},
    )


async def thrashing(_served) -> Scrapes:
    return shown(30, switching_s=lambda minute: 30.0 * minute, serving_s=lambda minute: 30.0 * minute)


async def rebalancing(_served) -> Scrapes:
    return shown(15, rebalances=lambda minute: 2 * minute)


async def hidden(_served) -> Scrapes:
    return shown(4, transaction_open_s=lambda minute: {"requests": 60.0 * minute})


async def overtaken(_served) -> Scrapes:
    return shown(3, overtaken=lambda minute: 7 * (minute > 1))


async def unreadable(_served) -> Scrapes:
    return shown(3, unreadable=lambda minute: 2 * (minute > 1))


async def forgotten(_served) -> Scrapes:
    """It is so from the worker's first moment on."""
    return shown(2, forgotten=lambda _minute: 1)


def answered(timing: Timing) -> Result:
    origin = Origin(topic="requests", partition=0, offset=0)
    return Result(id="r", origin=origin, outcome=Outcome.COMPLETED, status=200, model="llama", timing=timing)


async def slow_broker(_served) -> Scrapes:
    """Results that take seconds until they are committed."""
    metrics = Metrics()
    found: Scrapes = []
    for _ in range(15):
        result = answered(Timing(received=0.0, finished=1.0, latency_s=1.0))
        metrics.settled(Settlement(result), alias="llama", publish_s=4.0)
        found.append(metrics.render().decode())
    return found


async def missed(_served) -> Scrapes:
    """Every other request comes too late for its objective, where one of ten may."""
    metrics, objective = Metrics(), Objective(ttft_s=2.0, tpot_s=0.1)
    presence = Presence(worker="w1", pool="p", at=0.0, interval_s=1.0, state="serving")
    metrics.watch(lambda: Standing(presence=presence, objectives={"llama": {"": objective}}))
    found: Scrapes = []
    for minute in range(30):
        timing = Timing(received=0.0, finished=1.0, latency_s=1.0 + 2 * (minute % 2))
        reached = attainment(objective, "", Outcome.COMPLETED, timing, 1)
        result = answered(timing).model_copy(update={"objective": reached})
        metrics.settled(Settlement(result), alias="llama", publish_s=0.1)
        found.append(metrics.render().decode())
    return found


CAUSES: dict[str, Callable[..., Awaitable[Scrapes]]] = {
    "GearshiftWorkerDown": down,
    "GearshiftNoWorkers": absent,
    "GearshiftNeverReady": never_ready,
    "GearshiftRestarts": restarting,
    "GearshiftWorkerUnhealthy": stuck,
    "GearshiftDisconnected": disconnected,
    "GearshiftStalled": still,
    "GearshiftWaitTooLong": waiting,
    "GearshiftBacklogGrows": growing,
    "GearshiftRequestsFail": failing,
    "GearshiftRequestsExpire": late,
    "GearshiftDeadLetters": failing,
    "GearshiftRunsRepeat": failing,
    "GearshiftSwitchFails": unloadable,
    "GearshiftThrashes": thrashing,
    "GearshiftRebalances": rebalancing,
    "GearshiftRecordsMalformed": unreadable,
    "GearshiftTransactionOpen": hidden,
    "GearshiftRequestsOvertaken": overtaken,
    "GearshiftOffsetsForgotten": forgotten,
    "GearshiftPublishesSlowly": slow_broker,
    "GearshiftObjectiveMissed": missed,
}


@pytest.mark.parametrize("alert", sorted(ALERTS))
async def test_an_alert_fires_when_its_cause_is_there(alert, served, tmp_path):
    assert alert in firing(await CAUSES[alert](served), tmp_path)


@pytest.mark.parametrize("alert", sorted(ALERTS.keys() - {"GearshiftNoWorkers", "GearshiftWorkerDown"}))
async def test_what_a_rule_looks_at_is_shown_where_its_cause_is_there(alert, served):
    """With or without promtool. The two that are left out are about what is not shown."""
    shown = [sample for text in await CAUSES[alert](served) for sample in ours(text)]
    wanted, names = selectors(ALERTS[alert]["expr"]), {name for name, _ in shown}
    documented = set(re.findall(r"`(gearshift_\w+?)`", REFERENCE))
    assert {name for name, _ in wanted} <= documented | names
    assert names & {name for name, _ in wanted}
    assert [
        (name, labels)
        for name, labels in wanted
        if name in names and not any(name == there and labels.items() <= found.items() for there, found in shown)
    ] == []


def test_a_rule_s_selectors_are_its_metrics_with_the_labels_that_they_must_have():
    expr = 'sum by (model) (rate(gearshift_requests_total{outcome="failed",model!="unknown"}[10m])) > gearshift_x'
    assert selectors(expr) == [("gearshift_requests_total", {"outcome": "failed"}), ("gearshift_x", {})]


def selectors(expr: str) -> list[tuple[str, dict[str, str]]]:
    """The metrics of a rule, and the values that their labels must have; ``job`` is Prometheus' own."""
    found = re.findall(r"\b(gearshift_\w+)(?:\{([^}]*)\})?", expr)
    return [
        (name, {label: value for label, value in re.findall(r'(\w+)="([^"]*)"', within) if label != "job"})
        for name, within in found
    ]


def ours(text: str | None) -> Iterator[tuple[str, dict[str, str]]]:
    for family in text_string_to_metric_families(text or ""):
        yield from ((sample.name, dict(sample.labels)) for sample in family.samples)


async def test_none_fires_for_a_worker_that_does_its_work(served, tmp_path):
    assert firing(await healthy(served), tmp_path) == set()


async def test_a_worker_that_has_just_begun_may_not_be_ready_yet(served, tmp_path):
    assert firing((await never_ready(served))[:25], tmp_path) == set()


async def test_one_that_ends_and_begins_again_without_ever_being_ready_fires(served, tmp_path):
    scrapes = await never_ready(served)
    scrapes[3::4] = [None] * len(scrapes[3::4])
    assert firing(scrapes, tmp_path) == {"GearshiftNeverReady"}


async def ask(s, prompt: str, model: str = "llama", max_tokens: int = 2) -> None:
    await s.http.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": max_tokens})


def firing(scrapes: Scrapes, folder: Path) -> set[str]:
    """The alerts that fire at the end of what was scraped, says Prometheus' own rule engine.

    It is told to expect none, and complains of each that there is.
    """
    if not PROMTOOL.exists():
        pytest.skip("promtool is not here; deploy/local/checkers builds it")
    series = [{"series": name, "values": " ".join(values)} for name, values in series_of(scrapes).items()]
    minute = f"{len(scrapes) - 1}m"
    expected = [
        {"expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})', "eval_time": minute, "exp_samples": []}
        for alert in sorted(ALERTS)
    ]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expected}],
    }
    file = folder / "alerts.yaml"
    file.write_text(yaml.safe_dump(test))
    done = subprocess.run([PROMTOOL, "test", "rules", file], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    found = re.findall(r'expr: "count\(ALERTS\{alertname=\\"(\w+)\\".*?\n\s+exp: ?nil\n\s+got: ?\{\} 1E\+00', said)
    assert ("SUCCESS" in said) if not found else (said.count("expr: ") == len(found)), said
    return set(found)


def series_of(scrapes: Scrapes) -> dict[str, list[str]]:
    """Per series its value at every scrape, in promtool's notation; ``up`` is Prometheus' own word on the scrape."""
    found: dict[str, list[str]] = {}
    for minute, text in enumerate(scrapes):
        for name, value in samples(text):
            found.setdefault(name, ["_"] * minute).append(value)
        for values in found.values():
            values.extend("_" * (minute + 1 - len(values)))
    return found


def samples(text: str | None) -> Iterator[tuple[str, str]]:
    yield named("up", WHERE), str(int(text is not None))
    for family in text_string_to_metric_families(text or ""):
        for sample in family.samples:
            if sample.name.startswith("gearshift_"):
                yield named(sample.name, {**sample.labels, **WHERE}), repr(sample.value)


def named(name: str, labels: dict[str, str]) -> str:
    return f"{name}{{{','.join(f'{label}={chr(34)}{value}{chr(34)}' for label, value in labels.items())}}}"
