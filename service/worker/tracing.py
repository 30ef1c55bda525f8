"""A request as spans: from its record to its committed result, with waiting, running, freezing and publishing inside.

The trace is the producer's where its record carries a W3C context, and goes on into the engine and the result's
headers. Spans say ids, models, times and outcomes; never a prompt, an answer or a header of the producer's.
"""

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from schemas.base import Headers
from schemas.requests import Request
from schemas.results import Outcome, Result
from service.worker.jobs import Job, Trace

_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Opens and ends the spans of jobs."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def engine_begins(self, job: Job) -> Mapping[str, str] | None:
        """A run begins: what is waited is over. Gives the headers that put the engine's own spans inside."""
        trace = self._of(job)
        request = set_span_in_context(trace.request)
        begun = _ns(job.started or job.request.received)
        wait = self._tracer.start_span("wait", request, start_time=_ns(job.request.received))
        for reason, seconds in job.waited_for.items():
            wait.set_attribute(f"gearshift.waited.{reason}_s", round(seconds, 6))
        wait.end(begun)
        attributes: Attributes = {"gen_ai.request.model": job.alias, "gearshift.attempt": job.attempt.n}
        trace.engine = self._tracer.start_span("engine", request, SpanKind.CLIENT, attributes, start_time=begun)
        return _headers(trace.engine) or None

    def engine_ends(self, job: Job) -> None:
        """The run is over, however it ended. Does nothing where none has begun."""
        trace = job.trace
        if trace is None or trace.engine is None:
            return
        inside = set_span_in_context(trace.engine)
        for freeze in job.freezes:
            told: Attributes = {"gearshift.freeze.tokens": freeze.tokens, "gearshift.freeze.for": freeze.model or ""}
            span = self._tracer.start_span("freeze", inside, attributes=told, start_time=_ns(freeze.began))
            span.end(_ns(freeze.began + freeze.seconds))
        trace.engine.end()
        trace.engine = None

    def headers(self, job: Job) -> Headers:
        """The context for the record of a job's result."""
        return tuple((name, value.encode()) for name, value in _headers(self._of(job).request).items())

    def published(self, job: Job, result: Result, *, took_s: float) -> None:
        """The result is committed: the request is over."""
        span = self._of(job).request
        ready, end = _ns(result.timing.finished), _ns(result.timing.finished + took_s)
        publish = self._tracer.start_span("publish", set_span_in_context(span), SpanKind.PRODUCER, start_time=ready)
        publish.end(end)
        span.set_attribute("gearshift.outcome", result.outcome.value)
        span.set_attribute("http.response.status_code", result.status)
        if result.outcome is Outcome.FAILED:
            span.set_status(Status(StatusCode.ERROR, "" if result.failure is None else result.failure.value))
        span.end(end)

    def dropped(self, job: Job) -> None:
        """The request is another worker's now, or moved; that one tells the rest."""
        self.engine_ends(job)
        if job.trace is not None:
            job.trace.request.set_attribute("gearshift.outcome", "given up")
            job.trace.request.end()

    def _of(self, job: Job) -> Trace:
        if job.trace is None:
            request, origin = job.request, job.origin
            attributes: Attributes = {
                "messaging.system": "kafka",
                "messaging.operation.type": "process",
                "messaging.destination.name": origin.topic,
                "messaging.destination.partition.id": str(origin.partition),
                "messaging.kafka.offset": origin.offset,
                "messaging.message.id": request.id,
                "gen_ai.request.model": request.model,
                "url.path": request.endpoint.value,
            }
            span = self._tracer.start_span(
                "request", _producer(request), SpanKind.CONSUMER, attributes, start_time=_ns(request.received)
            )
            job.trace = Trace(span)
        return job.trace


class Untraced(Tracing):
    """Nobody collects spans: the producer's context is passed on, and nothing is made where there is none."""

    def __init__(self) -> None:
        super().__init__(NoOpTracer())

    def engine_begins(self, job: Job) -> Mapping[str, str] | None:
        return _carried(_producer(job.request)) if job.request.traceparent else None

    def engine_ends(self, job: Job) -> None:
        pass

    def headers(self, job: Job) -> Headers:
        passed_on = self.engine_begins(job)
        return () if passed_on is None else tuple((name, value.encode()) for name, value in passed_on.items())

    def published(self, job: Job, result: Result, *, took_s: float) -> None:
        pass

    def dropped(self, job: Job) -> None:
        pass


def _producer(request: Request) -> Context:
    given = {"traceparent": request.traceparent, "tracestate": request.tracestate}
    return _W3C.extract({name: value for name, value in given.items() if value})


def _headers(span: Span) -> dict[str, str]:
    return _carried(set_span_in_context(span))


def _carried(context: Context) -> dict[str, str]:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, context)
    return carrier


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
