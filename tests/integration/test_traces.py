"""One trace, over the real broker: what the producer began goes on in the worker, and the result says where to look."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from schemas import headers as h
from service.client import Client
from service.kafka.reader import TopicReader
from tests.support.bus import until
from tests.support.collector import attributes, collecting
from tests.support.pool import delete_topics, serving, settings_for

pytestmark = pytest.mark.broker


async def test_a_request_s_trace_goes_from_the_producer_through_the_worker_to_its_result(bootstrap):
    produced = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(produced))
    trace.set_tracer_provider(provider)  # once per process; what other tests produce stays in memory too
    with collecting() as collector:
        settings = settings_for(bootstrap, otlp_endpoint=collector.endpoint)
        try:
            async with serving(settings), Client(settings=settings) as client:

                async def there() -> bool:
                    return any(presence.contexts for presence in await client.presences())

                await until(there)
                with provider.get_tracer("an application").start_as_current_span("its own") as own:
                    await client.complete(model="qwen", prompt="hello", max_tokens=2)
            async with TopicReader(kafka=settings.kafka, topics=[settings.topics.named("results")]) as tail:
                (result,) = [record async for record in tail.backlog()]
        finally:
            await delete_topics(settings)
    (send,) = [span for span in produced.get_finished_spans() if span.name == "send request"]
    request = collector.one("request")
    trace_id = f"{own.get_span_context().trace_id:032x}"
    assert send.parent.span_id == own.get_span_context().span_id
    assert request.trace_id.hex() == trace_id
    assert request.parent_span_id.hex() == f"{send.context.span_id:016x}"
    assert {span.trace_id.hex() for span in collector.spans} == {trace_id}
    assert {span.name for span in collector.spans} == {"request", "wait", "engine", "publish"}
    assert attributes(request)["messaging.destination.name"] == settings.topics.for_alias("qwen")
    found = h.attributes(result.headers)
    version, *where, flags = (found.get(h.TRACEPARENT) or "").split("-")
    assert (version, where) == ("00", [trace_id, request.span_id.hex()])
    assert int(flags, 16) & 1, "sampled; that ids are random may be said too"
