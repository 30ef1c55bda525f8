"""Logs and traces.

Logs: one line per event, readable at a terminal and JSON otherwise, the standard library's lines included.
What is bound with ``structlog.contextvars`` (request id, alias) is on every line of a request. Prompts are not logged.
Nobody can fill a disk: of each event there are a hundred lines in ten seconds, and then how many more there were; of
what aiokafka says, which tries a broker that is away ten times a second and complains each time, there are three.
"""

import asyncio
import importlib.metadata
import io
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TextIO

import structlog
from opentelemetry.trace import Tracer

from schemas.words import shown
from service.settings import LogSettings

_EVENT_CHARS = 200
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def shared_processors() -> list[Any]:
    """What every line goes through, ours and the standard library's alike."""
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def formatter(settings: LogSettings) -> logging.Formatter:
    """The formatter of the one handler: console at a terminal, JSON otherwise."""
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    # Tracebacks as Python has them: structlog's own would show the values of local variables, prompts and passwords.
    last: list[structlog.typing.Processor] = (
        [_harmless, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_traceback)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared_processors(),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )


def _harmless(_logger: object, _method: str, said: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """What strangers wrote moves no cursor, and begins no line that would look like one of ours."""
    return {_indented(name): _indented(word) if isinstance(word, str) else word for name, word in said.items()}


def _indented(text: str) -> str:
    return shown(text).replace("\n", "\n    ")


def _traceback(to: TextIO, raised: structlog.typing.ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, raised)
    to.write(_indented(text.getvalue()))


class Flood(logging.Filter):
    """Lets through ``lines`` of each event and logger in each ``within_s`` seconds; debugging passes whole.

    Of ``chatty`` loggers, by how their names begin, it is ``lines_of_chatty``. ``log.suppressed`` then counts the
    others by logger and event; it comes with the first line of a later period.
    """

    def __init__(
        self,
        *,
        lines: int = 100,
        within_s: float = 10.0,
        chatty: str = "aiokafka",
        lines_of_chatty: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._lines = lines
        self._chatty, self._lines_of_chatty = chatty, lines_of_chatty
        self._within_s = within_s
        self._clock = clock
        self._until = float("-inf")
        self._seen: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        if self._clock() >= self._until:
            suppressed = {event: more for event, count in self._seen.items() if (more := count - self._most(event)) > 0}
            self._until = self._clock() + self._within_s
            self._seen.clear()
            if suppressed:
                structlog.get_logger(__name__).warning("log.suppressed", lines=suppressed)
        message = record.msg
        event = f"{record.name}: {message.get('event') if isinstance(message, dict) else message}"[:_EVENT_CHARS]
        self._seen[event] += 1
        return self._seen[event] <= self._most(event)

    def _most(self, event: str) -> int:
        return self._lines_of_chatty if event.startswith(self._chatty) else self._lines


def configure(settings: LogSettings) -> None:
    """Route all logging of this process to standard error, in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(settings))
    handler.addFilter(Flood())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[settings.log_level])
    logging.getLogger("aiokafka").setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared_processors(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


_EXPORT_WITHIN_S = 5
_ENDS_WITHIN_S = 5.0
"""For how long a collector is waited for at the end: less than a supervisor gives a worker that is stopped."""
SERVICE = "gearshift"


def traces_url(settings: LogSettings) -> str | None:
    """Where OTLP over HTTP takes spans, from the collector's address."""
    if settings.otlp_endpoint is None:
        return None
    base = settings.otlp_endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


@asynccontextmanager
async def tracer(settings: LogSettings, *, worker: str) -> AsyncIterator[Tracer | None]:
    """A tracer that exports in the background while the block runs; None without an endpoint.

    At its end what is left is sent, as far as a collector takes it within some seconds.
    OpenTelemetry's own variables (``OTEL_TRACES_SAMPLER``, ``OTEL_RESOURCE_ATTRIBUTES``...) hold as everywhere.
    """
    url = traces_url(settings)
    if url is None:
        yield None
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    version = importlib.metadata.version("gearshift")
    resource = Resource.create({"service.name": SERVICE, "service.version": version, "service.instance.id": worker})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_WITHIN_S)))
    try:
        yield provider.get_tracer(SERVICE, version)
    finally:
        if not await _done_within(_ENDS_WITHIN_S, provider.shutdown, name="traces"):
            structlog.get_logger(__name__).warning(
                "traces.lost", endpoint=url, reason=f"not taken within {_ENDS_WITHIN_S:g} s"
            )


async def _done_within(seconds: float, work: Callable[[], object], *, name: str) -> bool:
    """Whether what blocks is done in time; it goes on otherwise, and keeps neither this nor the process."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        work()
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            await done.wait()
    except TimeoutError:
        return False
    return True
