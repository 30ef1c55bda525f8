"""A request's spans, as a collector gets them."""

import asyncio

import pytest

from tests.support.bus import until
from tests.support.collector import attributes, collecting, seconds
from tests.support.fake_engine import BROKEN, FakeEngine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Listening(FakeEngine):
    """Keeps the trace headers of its calls."""

    def __init__(self, **more) -> None:
        super().__init__(**more)
        self.headers: list[dict[str, str] | None] = []

    async def answer(self, call, on_chunk=None, progress=None):
        self.headers.append(call.trace_headers)
        return await super().answer(call, on_chunk, progress)


async def ask(s, headers=None, model="llama", prompt="a secret prompt", max_tokens=3) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens}
    await s.http.post("/v1/completions", json=body, headers=headers or {})


async def test_a_request_is_one_trace_from_its_producer_through_waiting_and_the_engine_to_its_result(served):
    engine = Listening(step_s=0.002)
    with collecting() as collector:
        async with served(engine=engine, otlp_endpoint=collector.endpoint) as s:
            await ask(s, CONTEXT)
        request = collector.one("request")
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
        assert {span.name: collector.parent(span) for span in collector.spans} == {
            "request": None,
            "wait": "request",
            "engine": "request",
            "publish": "request",
        }
        assert {span.trace_id for span in collector.spans} == {request.trace_id}
        wait, run, publish = (collector.one(name) for name in ("wait", "engine", "publish"))
        assert request.start_time_unix_nano == wait.start_time_unix_nano
        assert wait.end_time_unix_nano == run.start_time_unix_nano
        assert run.end_time_unix_nano <= publish.end_time_unix_nano == request.end_time_unix_nano
        assert seconds(run) >= 0.004
    (headers,) = engine.headers
    assert headers == {"traceparent": f"00-{TRACE}-{run.span_id.hex()}-01"}


async def test_a_freeze_is_a_span_of_its_own_inside_the_run(served):
    with collecting() as collector:
        async with served(engine=FakeEngine(step_s=0.002), otlp_endpoint=collector.endpoint, dev_mode=True) as s:
            asked = asyncio.create_task(ask(s, max_tokens=100_000))
            await until(lambda: any(s.engine.tokens(call) > 2 for call in list(s.engine._runs)))
            (call,) = s.engine._runs
            await s.http.post("/v1/models/switch", json={"model": "qwen", "mode": "keep"})
            await s.http.post("/v1/models/switch", json={"model": "llama", "mode": "keep"})
            await s.engine.abort(call)
            await asked
        freeze = collector.one("freeze")
        run = collector.one("engine")
        assert collector.parent(freeze) == "engine"
        assert attributes(freeze)["gearshift.freeze.for"] == "qwen"
        assert attributes(freeze)["gearshift.freeze.tokens"] > 2
        assert run.start_time_unix_nano < freeze.start_time_unix_nano < freeze.end_time_unix_nano
        assert freeze.end_time_unix_nano < run.end_time_unix_nano


async def test_each_attempt_is_a_run_of_its_own_and_a_failure_marks_its_request(served):
    with collecting() as collector:
        more = {"max_attempts": 2, "retry_backoff_s": 0.001, "retry_backoff_max_s": 0.001}
        async with served(otlp_endpoint=collector.endpoint, **more) as s:
            await ask(s, prompt=BROKEN)
        assert [attributes(span)["gearshift.attempt"] for span in collector.named("engine")] == [1, 2]
        request = collector.one("request")
        assert attributes(request)["gearshift.outcome"] == "failed"
        assert (request.status.code, request.status.message) == (2, "retries_exhausted")


async def test_spans_say_nothing_of_what_was_asked_or_answered(served):
    with collecting() as collector:
        async with served(otlp_endpoint=collector.endpoint) as s:
            await ask(s, {"authorization": "Bearer a-secret-key"})
        said = str(collector.spans)
        assert "secret" not in said
        assert "llama0" not in said
        assert attributes(collector.one("request"))["gen_ai.request.model"] == "llama"
        assert collector.resources[0]["service.name"] == "gearshift"


async def test_without_a_collector_the_producer_s_context_is_passed_on_to_the_engine(served):
    engine = Listening()
    async with served(engine=engine) as s:
        await ask(s, CONTEXT)
        await ask(s)
    assert engine.headers == [CONTEXT, None]


@pytest.mark.parametrize("wrong", ["junk", "00-0-0-00", f"00-{'0' * 32}-{PARENT}-01"])
async def test_a_context_that_is_none_begins_a_new_trace(served, wrong):
    with collecting() as collector:
        async with served(otlp_endpoint=collector.endpoint) as s:
            await ask(s, {"traceparent": wrong})
        assert not collector.one("request").parent_span_id


async def test_a_collector_that_is_away_holds_up_nothing(served):
    async with served(otlp_endpoint="http://127.0.0.1:1") as s:
        answer = await s.http.post("/v1/completions", json={"model": "llama", "prompt": "x", "max_tokens": 1})
        assert answer.status_code == 200
