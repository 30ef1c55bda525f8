"""What is in no log line, in neither format, and how many lines there are."""

import json
import logging
import socket
import sys
import threading
import unicodedata

import pytest
import structlog

from service import settings as settings_module
from service import telemetry
from tests.support.waiting import PATIENCE_S

CANARY = "canary-7f3a"


@pytest.fixture
def logging_as_it_was():
    root = logging.getLogger()
    before, level, configured = root.handlers[:], root.level, structlog.get_config()
    yield
    root.handlers[:] = before
    root.setLevel(level)
    structlog.configure(**configured)


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


@pytest.mark.parametrize("form", ["console", "json"])
@pytest.mark.usefixtures("logging_as_it_was")
def test_what_strangers_wrote_moves_no_cursor_and_begins_no_line(form, capsys):
    telemetry.configure(settings_module.load(log_format=form).log)
    said = "replies.\x1b]52;c;AA\x07\x9b2J\u202e\n2026-01-01 00:00:00 [info] forged"
    structlog.get_logger("ours").warning("it.happened", topic=said, list=[said], **{said[:12]: 1})
    logging.getLogger("theirs").warning("of %s", said)
    try:
        raise RuntimeError(said)
    except RuntimeError:
        structlog.get_logger("ours").exception("it.failed")
    written = capsys.readouterr().err
    assert not {char for char in written if unicodedata.category(char) in {"Cc", "Cf"}} - {"\n"}
    assert not [line for line in written.splitlines() if line.startswith("2026-01-01")]
    assert written.count("forged") >= 4
    if form == "json":
        assert len([json.loads(line) for line in written.splitlines()]) == 3


@pytest.mark.usefixtures("logging_as_it_was")
def test_of_each_event_there_are_only_so_many_lines_and_the_others_are_counted(capsys):
    telemetry.configure(settings_module.load(log_format="json", log_level="debug").log)
    now = 0.0
    logging.getLogger().handlers[0].filters[:] = [telemetry.Flood(lines=3, within_s=10.0, clock=lambda: now)]
    ours, theirs = structlog.get_logger("ours"), logging.getLogger("theirs")
    for number in range(10):
        ours.warning("record.malformed", offset=number)
        theirs.error("no broker at %s", number)
        ours.debug("told.whole", number=number)
    ours.info("another.event")
    first = capsys.readouterr().err
    counts = [first.count(event) for event in ("record.malformed", "no broker at", "told.whole", "another.event")]
    assert counts == [3, 3, 10, 1]
    assert "log.suppressed" not in first

    now = 11.0
    ours.warning("record.malformed", offset=11)
    later = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in later] == ["log.suppressed", "record.malformed"]
    assert later[0]["lines"] == {"ours: record.malformed": 7, "theirs: no broker at %s": 7}


@pytest.mark.usefixtures("logging_as_it_was")
def test_what_aiokafka_repeats_while_a_broker_is_away_hides_nothing_else(capsys):
    telemetry.configure(settings_module.load(log_format="json").log)
    now = 0.0
    logging.getLogger().handlers[0].filters[:] = [telemetry.Flood(clock=lambda: now)]
    for _ in range(100):
        logging.getLogger("aiokafka.cluster").error("Unable to update metadata from %s", [1])
        structlog.get_logger("ours").warning("bus.not_joined")
    said = capsys.readouterr().err
    assert [said.count("Unable to update metadata"), said.count("bus.not_joined")] == [3, 100]
    now = 11.0
    logging.getLogger("aiokafka.cluster").error("Unable to update metadata from %s", [1])
    first = json.loads(capsys.readouterr().err.splitlines()[0])
    assert first["lines"] == {"aiokafka.cluster: Unable to update metadata from %s": 97}


@pytest.mark.usefixtures("logging_as_it_was")
def test_a_worker_s_log_is_bounded(capsys):
    telemetry.configure(settings_module.load(log_format="json").log)
    for number in range(5000):
        structlog.get_logger("ours").warning("record.malformed", offset=number)
    assert 100 <= capsys.readouterr().err.count("record.malformed") <= 1000


async def test_a_collector_that_takes_nothing_keeps_no_worker_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts, and never answers: what is left is given up, and the thread that waits for it is nobody's."""
    monkeypatch.setattr(telemetry, "_ENDS_WITHIN_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = settings_module.load(otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with structlog.testing.capture_logs() as said:
            async with telemetry.tracer(settings.log, worker="w1") as tracer:
                assert tracer is not None
                tracer.start_span("request").end()
        (waiting,) = [thread for thread in threading.enumerate() if thread.name == "traces"]
        assert waiting.daemon
    assert [line["event"] for line in said] == ["traces.lost"]
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
