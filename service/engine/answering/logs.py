"""vLLM's own lines in our format, in each of its processes: with the request's id and alias where they are known.

vLLM configures its logger in every process anew, from the file that VLLM_LOGGING_CONFIG_PATH names. ``vllm_logging``
gives it one that leads to the formatter of ``service.telemetry``.
"""

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, WrappedLogger

from service import telemetry
from service.engine.versions import vllm_core
from service.settings import LogSettings


@contextmanager
def vllm_logging(settings: LogSettings | None) -> Iterator[None]:
    """While this is open, vLLM configures its logging as ours: open it around the engine's start.

    None, or a file that the operator chose, leaves vLLM's logging as it is.
    """
    if settings is None or vllm_core.LOGGING in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="gearshift-logs-") as folder:
        path = Path(folder) / "logging.json"
        path.write_text(json.dumps(configuration(settings)))
        os.environ[vllm_core.LOGGING] = str(path)
        try:
            vllm_core.follow_logging()
            yield
        finally:
            del os.environ[vllm_core.LOGGING]


def import_hosting() -> None:
    """Import the library of vLLM's hosting routes, which sets the root logger to ERROR, and undo that.

    To be called before anything imports vLLM's server, which brings it in.
    """
    root = logging.getLogger()
    level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
    with suppress(ImportError):
        import_module("model_hosting_container_standards.logging_config")
    root.setLevel(level)
    for handler, its_level in handlers:
        handler.setLevel(its_level)


def configuration(settings: LogSettings) -> dict[str, Any]:
    """A ``logging.config`` dictionary for a vLLM process. vLLM's level follows VLLM_LOGGING_LEVEL where it is set."""
    level = os.environ.get("VLLM_LOGGING_LEVEL", settings.log_level).upper()
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"gearshift": {"()": f"{__name__}.formatter", "settings": settings.model_dump()}},
        "handlers": {
            "gearshift": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "gearshift"}
        },
        "loggers": {"vllm": {"handlers": ["gearshift"], "level": level, "propagate": False}},
    }


def formatter(settings: dict[str, Any]) -> logging.Formatter:
    """The service's formatter, with the process named where it is one of vLLM's."""
    chosen = telemetry.formatter(LogSettings(**settings))
    if isinstance(chosen, ProcessorFormatter):
        chosen.foreign_pre_chain = [*(chosen.foreign_pre_chain or ()), _with_process]
    return chosen


def _with_process(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
    record = event.get("_record")
    if isinstance(record, logging.LogRecord) and record.processName != "MainProcess":
        event["process"] = record.processName
    return event
