"""Logs: one line per event, readable at a terminal and JSON otherwise, the standard library's lines included.

What is bound with ``structlog.contextvars`` (request id, alias) is on every line of a request. Prompts are not logged.
"""

import logging
import sys
from typing import Any

import structlog

from service.settings import LogSettings

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
    last = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared_processors(),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )


def configure(settings: LogSettings) -> None:
    """Route all logging of this process to standard error, in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(settings))
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
