"""vLLM's own spans, inside the trace that a request's record began."""

from pathlib import Path

import pytest

from schemas.requests import Endpoint
from service.ports import Call
from service.settings import LogSettings
from tests.engine.conftest import model_entries
from tests.support.bus import until
from tests.support.collector import attributes, collecting
from tests.support.engines import open_engine

pytestmark = pytest.mark.engine  # with an engine of its own: where spans go is decided at its start

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_the_engine_s_spans_are_inside_the_worker_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    entries = {"lynx": model_entries()["lynx"]}
    with collecting() as collector:
        log = LogSettings(otlp_endpoint=collector.endpoint)
        async with await open_engine(tmp_path, entries, log=log) as engine:
            body = {"model": "lynx", "prompt": "a secret prompt", "max_tokens": 4}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            call = Call(id="c1", alias="lynx", endpoint=Endpoint.COMPLETIONS, body=body, trace_headers=headers)
            assert (await engine.answer(call)).status == 200
            await until(lambda: bool([span for span in collector.spans if span.parent_span_id.hex() == PARENT]))
        (span,) = [span for span in collector.spans if span.parent_span_id.hex() == PARENT]
        assert span.trace_id.hex() == TRACE
        assert attributes(span)["gen_ai.usage.completion_tokens"] == 4
        assert "secret" not in str(collector.spans)
