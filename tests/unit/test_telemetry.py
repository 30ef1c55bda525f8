"""What is in no log line, in neither format."""

import logging
import sys

import pytest
import structlog

from service import settings as settings_module
from service import telemetry

CANARY = "canary-7f3a"


@pytest.fixture
def logging_as_it_was():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.usefixtures("logging_as_it_was")
def test_a_traceback_shows_no_local_variables(form, capsys):
    settings = settings_module.load(log_format=form, sasl_password=CANARY)
    telemetry.configure(settings.log)

    def ask(prompt: str, password: str) -> None:
        body = {"messages": [{"role": "user", "content": prompt}]}
        raise RuntimeError(f"{len(body)} bodies failed, {len(password)}")

    for log in (structlog.get_logger("ours").exception, logging.getLogger("theirs").exception):
        try:
            ask(f"a prompt with {CANARY}", settings.kafka.sasl_password.get_secret_value())
        except RuntimeError:
            log("it.failed")
    said = capsys.readouterr().err
    assert said.count("RuntimeError") >= 2, said
    assert said.count("in ask") == 2
    assert CANARY not in said
    assert sys.exc_info() == (None, None, None)
