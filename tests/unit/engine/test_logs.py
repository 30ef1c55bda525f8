"""vLLM's processes log as we do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.engine.answering.logs import vllm_logging
from service.settings import LogSettings

VLLM_PROCESS = """
import json, logging, logging.config, os, sys, structlog
with open(os.environ["VLLM_LOGGING_CONFIG_PATH"]) as file:
    logging.config.dictConfig(json.load(file))  # as vLLM does when it is imported
logger = logging.getLogger("vllm.entrypoints.serving")
"""


@pytest.fixture(autouse=True)
def nobody_chose_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)


def lines_of(code: str) -> list[dict[str, Any]]:
    """What a process that was started with our logging writes to standard error."""
    with vllm_logging(LogSettings(log_format="json")):
        ran = subprocess.run([sys.executable, "-c", VLLM_PROCESS + code], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in ran.stderr.splitlines()]


def test_a_line_of_vllm_has_the_requests_id_and_alias() -> None:
    code = "structlog.contextvars.bind_contextvars(request_id='r1', alias='qwen'); logger.warning('%s is slow', 'it')"
    (line,) = lines_of(code)
    assert line["event"] == "it is slow"
    assert (line["request_id"], line["alias"], line["level"]) == ("r1", "qwen", "warning")


def test_a_line_of_another_process_names_it() -> None:
    code = "import multiprocessing; multiprocessing.current_process().name = 'EngineCore'; logger.info('loaded')"
    (line,) = lines_of(code)
    assert line["process"] == "EngineCore"


def test_what_is_below_the_level_is_not_written() -> None:
    assert lines_of("logger.debug('details')") == []


def test_vllm_finds_the_configuration_only_while_the_engine_starts() -> None:
    with vllm_logging(LogSettings()):
        path = Path(os.environ["VLLM_LOGGING_CONFIG_PATH"])
        assert path.is_file()
    assert "VLLM_LOGGING_CONFIG_PATH" not in os.environ
    assert not path.exists()


def test_a_configuration_that_the_operator_chose_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "/etc/theirs.json")
    with vllm_logging(LogSettings()):
        assert os.environ["VLLM_LOGGING_CONFIG_PATH"] == "/etc/theirs.json"


def test_the_library_of_the_hosting_routes_leaves_our_root_logger_as_it_is() -> None:
    """It sets the root logger, and each handler there, to ERROR as it is imported."""
    code = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from service.engine.answering.logs import import_hosting
import_hosting()
assert "model_hosting_container_standards.logging_config" in sys.modules
import model_hosting_container_standards.sagemaker
root = logging.getLogger()
assert (root.level, [handler.level for handler in root.handlers]) == (logging.INFO, [logging.NOTSET])
"""
    subprocess.run([sys.executable, "-c", code], check=True)
