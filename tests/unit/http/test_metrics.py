"""What Prometheus gets to see."""

import asyncio
import re
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S

NAME = re.compile(r"^(gearshift|process|python|vllm)[a-z0-9_:]*$")


async def scrape(http: httpx.AsyncClient) -> dict[tuple[str, frozenset], float]:
    """Every sample by its name and labels."""
    text = (await http.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset]:
    return name, frozenset(labels.items())


async def test_requests_are_counted_by_model_and_outcome_whatever_producers_write(served):
    async with served() as s:
        for model in ("llama", "llama", "qwen", "made up", "also made up"):
            await s.http.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 3})
        found = await scrape(s.http)
        assert found[key("gearshift_requests_total", model="llama", outcome="completed")] == 2
        assert found[key("gearshift_requests_total", model="qwen", outcome="completed")] == 1
        assert found[key("gearshift_requests_total", model="unknown", outcome="failed")] == 2
        assert found[key("gearshift_request_failures_total", model="unknown", failure="unknown_model")] == 2
        assert found[key("gearshift_dead_letters_total", failure="unknown_model")] == 2
        assert found[key("gearshift_tokens_total", model="llama", kind="completion")] == 6
        assert not [name for name, labels in found if "made up" in dict(labels).values()]


async def test_a_switch_is_counted_with_where_its_model_was_found(served):
    async with served(dev_mode=True) as s:
        await s.http.post("/v1/models/switch", json={"model": "qwen"})
        await s.http.post("/v1/models/switch", json={"model": "llama", "mode": "keep"})
        found = await scrape(s.http)
        there = {"from_model": "llama", "to_model": "qwen", "tier": "dropped", "mode": "drain"}
        back = {"from_model": "qwen", "to_model": "llama", "tier": "resident", "mode": "keep"}
        assert found[key("gearshift_switches_total", **there)] == 1
        assert found[key("gearshift_switches_total", **back)] == 1
        assert found[key("gearshift_switch_seconds_count", tier="resident", mode="keep")] == 1
        assert found[key("gearshift_control_events_total", kind="switch", state="completed")] == 2
        assert found[key("gearshift_model_active", model="llama")] == 1
        assert found[key("gearshift_context_tier", model="qwen", tier="resident")] == 1


async def test_a_switch_that_fails_is_counted_apart(served):
    engine = FakeEngine(broken_loads=frozenset({"qwen"}))
    async with served(dev_mode=True, engine=engine) as s:
        await s.http.post("/v1/models/switch", json={"model": "qwen"})
        found = await scrape(s.http)
        assert found[key("gearshift_switch_failures_total", to_model="qwen")] == 1
        assert not [name for name, _ in found if name == "gearshift_switches_total"]


async def test_where_the_time_of_a_request_went_is_measured_by_phase(served):
    async with served(engine=FakeEngine(step_s=0.002)) as s:
        await s.http.post("/v1/completions", json={"model": "llama", "prompt": "x", "max_tokens": 20})
        found = await scrape(s.http)
        spent = {
            phase: found[key("gearshift_request_phase_seconds_sum", model="llama", phase=phase)]
            for phase in ("read", "queue", "first_token", "decode", "publish")
        }
        total = found[key("gearshift_request_latency_seconds_sum", model="llama")]
        assert spent["first_token"] + spent["decode"] > 20 * 0.002 * 0.9  # one token may be late, and the next catch up
        assert spent["decode"] > 0
        assert spent["decode"] <= found[key("gearshift_serving_seconds_total")] < 1.5 * total
        assert sum(spent.values()) - spent["publish"] <= total * 1.01


async def test_what_waits_is_shown_with_how_long(served):
    async with served(engine=FakeEngine(step_s=0.002), max_running=1) as s:
        body = {"model": "llama", "prompt": "x", "max_tokens": 1_000_000}
        asked = [asyncio.create_task(s.http.post("/v1/completions", json=body)) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            found = await scrape(s.http)
            while found[key("gearshift_queue_requests", model="llama")] < 2:
                found = await scrape(s.http)
        later = await scrape(s.http)
        assert found[key("gearshift_running_requests", model="llama")] == 1
        oldest = key("gearshift_queue_oldest_seconds", model="llama")
        assert later[oldest] > found[oldest] > 0
        assert later[key("gearshift_held_requests")] == 3
        for task in asked:
            task.cancel()


async def test_the_engines_own_metrics_get_the_alias(served):
    class Measuring(FakeEngine):
        def __init__(self) -> None:
            super().__init__()
            self.kept = {alias: CollectorRegistry() for alias in self.aliases}
            for n, registry in enumerate(self.kept.values(), 1):
                Counter("vllm:prompt_tokens", "Prompt tokens.", ["model_name"], registry=registry).labels("m").inc(n)

        def registries(self) -> dict[str, Any]:
            return self.kept

    async with served(engine=Measuring()) as s:
        found = await scrape(s.http)
        assert found[key("vllm:prompt_tokens_total", model_name="m", alias="llama")] == 1
        assert found[key("vllm:prompt_tokens_total", model_name="m", alias="qwen")] == 2


async def test_names_and_units_keep_prometheus_rules(served):
    async with served(dev_mode=True) as s:
        await s.http.post("/v1/completions", json={"model": "llama", "prompt": "x"})
        await s.http.post("/v1/models/switch", json={"model": "qwen"})
        text = (await s.http.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            assert NAME.match(family.name), family.name
            assert family.documentation
            assert not family.name.endswith(("_ms", "_milliseconds", "_minutes", "_mb"))
            if family.type == "counter":
                assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples)
