"""Over HTTP a tenant that has what it may have is told so, and when to come again."""

import asyncio
import re
import time
from pathlib import Path

import anthropic
import openai
import pytest

from service.errors import ConfigError
from service.http.server import HttpServer
from service.settings import load
from tests.support.bus import until
from tests.support.fake_engine import FakeEngine

LONG = {"model": "llama", "prompt": "x", "max_tokens": 1_000_000}
SHORT = {"model": "llama", "prompt": "x", "max_tokens": 1}


def quotas(folder: Path, text: str) -> Path:
    (folder / "quotas.yaml").write_text(text)
    return folder / "quotas.yaml"


async def test_a_request_too_many_is_refused_until_another_has_ended_and_nobody_else_is(served, tmp_path):
    (tmp_path / "keys").write_text("one ask tenant=blue\ntwo ask tenant=blue\nother ask tenant=red\n")
    file = quotas(tmp_path, "default: {concurrent: 2}")
    async with served(engine=FakeEngine(step_s=0.001), quotas_file=file, api_keys_file=tmp_path / "keys") as s:
        one, two, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two", "other"))
        waiting = [asyncio.create_task(s.http.post("/v1/completions", json=LONG, headers=each)) for each in (one, two)]
        await until(lambda: len(s.server.bus) == 2)
        refused = await s.http.post("/v1/completions", json=SHORT, headers=two)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert "2 requests" in refused.json()["error"]["message"]
        assert (await s.http.post("/v1/completions", json=SHORT, headers=other)).status_code == 200
        pretending = {**two, "x-gearshift-tenant": "red"}
        assert (await s.http.post("/v1/completions", json=SHORT, headers=pretending)).status_code == 429
        waiting[0].cancel()
        await until(lambda: len(s.server.bus) == 1)
        assert (await s.http.post("/v1/completions", json=SHORT, headers=two)).status_code == 200
        waiting[1].cancel()


async def test_many_at_once_do_not_slip_in_together(served, tmp_path):
    file = quotas(tmp_path, "default: {concurrent: 3}")
    async with served(engine=FakeEngine(step_s=0.001), quotas_file=file) as s:
        body = {**SHORT, "max_tokens": 300}
        answers = await asyncio.gather(*(s.http.post("/v1/completions", json=body) for _ in range(20)))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 17


def go_on(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """So much later by the clock that is never set."""
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds)


async def test_what_was_spent_is_waited_for_as_long_as_the_answer_says(served, tmp_path, monkeypatch):
    file = quotas(tmp_path, "default: {tokens_per_minute: 600}")
    async with served(quotas_file=file) as s:
        spent = {**SHORT, "max_tokens": 160}
        assert (await s.http.post("/v1/completions", json=spent)).status_code == 200
        refused = await s.http.post("/v1/completions", json=SHORT)
        assert refused.status_code == 429
        assert "600 tokens per minute" in refused.json()["error"]["message"]
        again_s = int(refused.headers["retry-after"])
        assert 1 <= again_s <= 11
        go_on(monkeypatch, again_s)
        assert (await s.http.post("/v1/completions", json=SHORT)).status_code == 200


async def test_who_hangs_up_has_spent_what_was_said_by_then(served, tmp_path):
    file = quotas(tmp_path, "default: {tokens_per_minute: 600}")
    async with served(engine=FakeEngine(step_s=0.001), quotas_file=file) as s:
        async with s.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            pieces = answer.aiter_lines()
            for _ in range(2 * 600):
                await anext(pieces)
        await until(lambda: s.server.history.tokens >= 600)
        refused = await s.http.post("/v1/completions", json=SHORT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 30, "a minute's tokens, less what may be spent at once"
        assert 'gearshift_requests_total{model="llama",outcome="cancelled"} 1.0' in (await s.http.get("/metrics")).text


async def test_a_clock_that_is_set_back_makes_nobody_wait_longer(served, tmp_path, monkeypatch):
    file = quotas(tmp_path, "default: {tokens_per_minute: 600}")
    async with served(quotas_file=file) as s:
        assert (await s.http.post("/v1/completions", json={**SHORT, "max_tokens": 160})).status_code == 200
        assert (await s.http.post("/v1/completions", json=SHORT)).status_code == 429
        ahead = time.time
        monkeypatch.setattr(time, "time", lambda: ahead() - 3600.0)
        go_on(monkeypatch, 11)
        assert (await s.http.post("/v1/completions", json=SHORT)).status_code == 200


async def test_official_clients_know_it_for_a_rate_limit(served, tmp_path):
    file = quotas(tmp_path, "default: {tokens_per_minute: 1}")
    async with served(quotas_file=file) as s:
        await s.openai.completions.create(**{**SHORT, "max_tokens": 75})
        with pytest.raises(openai.RateLimitError, match="tokens per minute"):
            await s.openai.completions.create(**SHORT)
        messages = {"model": "llama", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
        async with anthropic.AsyncAnthropic(base_url=s.server.address, api_key="none", max_retries=0) as claude:
            with pytest.raises(anthropic.RateLimitError, match="tokens per minute"):
                await claude.messages.create(**messages)


async def test_official_clients_come_again(served, tmp_path):
    file = quotas(tmp_path, "default: {tokens_per_minute: 600}")
    async with served(quotas_file=file) as s:
        await s.openai.completions.create(**{**SHORT, "max_tokens": 75})
        patient = s.openai.with_options(max_retries=5)
        assert (await patient.completions.create(**SHORT)).choices[0].text


async def test_a_body_that_would_be_too_much_is_refused_and_leaves_nothing_behind(served, tmp_path):
    file = quotas(tmp_path, "default: {waiting_bytes: 2000}")
    async with served(quotas_file=file) as s:
        refused = await s.http.post("/v1/completions", json={**SHORT, "prompt": "x" * 2000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, 429)
        assert (await s.http.post("/v1/completions", json={**SHORT, "prompt": "x" * 1000})).status_code == 200
        assert s.server.quotas.shares(10) == {}


async def test_a_quota_of_one_tenant_is_nobody_elses(served, tmp_path):
    file = quotas(tmp_path, "tenants: {blue: {concurrent: 1}}")
    async with served(engine=FakeEngine(step_s=0.001), quotas_file=file) as s:
        body = {**SHORT, "max_tokens": 100}
        began = time.monotonic()
        for headers in ({}, {"x-gearshift-tenant": "red"}):
            answers = await asyncio.gather(
                *(s.http.post("/v1/completions", json=body, headers=headers) for _ in range(10))
            )
            assert {answer.status_code for answer in answers} == {200}
        assert time.monotonic() - began < 20


def test_a_file_that_is_none_is_an_error_at_once(tmp_path):
    with pytest.raises(ConfigError, match="quotas_file"):
        HttpServer(load(http_port=0, quotas_file=quotas(tmp_path, "default: {tokens: 1}")))


async def test_a_request_whose_answer_is_there_is_under_way_no_more(served, tmp_path):
    """Else who asks one after the other would be one too many now and then."""
    file = quotas(tmp_path, "default: {concurrent: 1}")
    async with served(quotas_file=file) as s:
        for stream in (False, True) * 20:
            answer = await s.http.post("/v1/completions", json={**SHORT, "stream": stream})
            assert (answer.status_code, s.server.quotas.shares(10)) == (200, {})


async def test_metrics_tell_apart_what_the_named_tenants_cost_and_no_others(served, tmp_path):
    (tmp_path / "keys").write_text("one ask tenant=blue\nother ask tenant=red\n")
    file = quotas(tmp_path, "tenants: {blue: {concurrent: 9}}")
    async with served(engine=FakeEngine(step_s=0.01), quotas_file=file, api_keys_file=tmp_path / "keys") as s:
        for key, words in (("one", 7), ("other", 3), ("other", 2)):
            body, headers = {**SHORT, "max_tokens": words}, {"authorization": f"Bearer {key}"}
            assert (await s.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        metrics = (await s.http.get("/metrics")).text
        assert 'gearshift_tenant_tokens_total{kind="completion",tenant="blue"} 7.0' in metrics
        assert 'gearshift_tenant_tokens_total{kind="completion",tenant="(others)"} 5.0' in metrics
        assert 'tenant="red"' not in metrics
        found = re.search(r'gearshift_tenant_running_seconds_total\{tenant="blue"\} (\S+)', metrics)
        assert found is not None
        assert float(found[1]) >= 0.07, "seven words of ten milliseconds"
