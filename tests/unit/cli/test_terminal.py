"""What strangers wrote, on an operator's terminal and where the output goes elsewhere."""

import io
import json
import unicodedata
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from schemas.status import Status, StatusState
from service.cli.main import app, reported
from service.cli.options import Terminal, print_json
from service.errors import ConfigError, NoAnswer

HOSTILE = "[/red][bold]a[/] :bug: \x1b[2J\x1b]0;title\x07 \x9b1m \u202e\u2028\ud800b"
CELLS = [str, Text, lambda text: Text.assemble("by ", (text, "red"))]
OBEYED = {"Cc", "Cf", "Cs", "Zl"}


def shown(*printed: object, terminal: bool) -> str:
    file = io.StringIO()
    Terminal(file=file, width=4000, force_terminal=terminal, color_system=None).print(*printed)
    return file.getvalue()


def table(cell: object) -> Table:
    made = Table("what")
    made.add_row(cell)
    return made


@pytest.mark.parametrize("made", CELLS)
@pytest.mark.parametrize("where", [table, lambda cell: cell])
@pytest.mark.parametrize("terminal", [True, False])
def test_brackets_and_colons_are_text_and_nothing_is_obeyed_at_the_end_of_a_pipe_either(made, where, terminal):
    text = shown(where(made(HOSTILE)), terminal=terminal)
    assert "[/red][bold]a[/] :bug:" in text
    assert not {unicodedata.category(char) for char in text.replace("\n", "")} & OBEYED


@given(st.text())
def test_no_text_is_too_strange_to_be_shown(said):
    for made in CELLS:
        text = shown(table(made(said)), made(said), terminal=True)
        assert not {char for char in text if unicodedata.category(char) == "Cc"} - {"\n"}


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_model_said_is_broken_nowhere_and_elsewhere_it_is_the_same_to_the_character(terminal):
    file = io.StringIO()
    said = "a \x1b[1m \u202e\r\n " + "long " * 100
    Terminal(file=file, width=40, force_terminal=terminal, color_system=None).say(said, end="")
    assert file.getvalue() == (said if not terminal else "a \ufffd[1m \ufffd\ufffd\n " + "long " * 100)


def test_json_is_ascii_whatever_was_said(capsys):
    status = Status(worker="\x9b1m \u202e", at=1.0, state=StatusState.REJECTED, kind="switch")
    for value in (status, {"worker": status.worker}):
        print_json(value)
        said = capsys.readouterr().out
        assert said.isascii()
        assert json.loads(said)["worker"] == status.worker


ANSWERS = {
    "/state": b"{}",
    "/list/state": b"[1]",
    "/text/state": b'"a"',
    "/deep/state": json.dumps({"worker": {"contexts": [None], "state": "serving"}, "history": {}}).encode(),
    "/none/state": b"<html>",
}


class Stranger(BaseHTTPRequestHandler):
    """A server that is no worker, and sends whoever asks below /away elsewhere."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["authorization"]))
        self.send_response(302 if self.path.startswith("/away") else 200)
        self.send_header("location", f"http://localhost:{self.server.server_port}/state")
        self.send_header("content-length", str(len(ANSWERS.get(self.path, b""))))
        self.end_headers()
        self.wfile.write(ANSWERS.get(self.path, b""))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_key_is_sent_to_the_server_that_was_named_and_to_no_other(stranger, tmp_path):
    (key := tmp_path / "key").write_text("sesame")
    Stranger.asked.clear()
    found = CliRunner().invoke(app, ["top", f"{stranger}/away", "--key-file", str(key), "--once"])
    assert isinstance(found.exception, NoAnswer)
    assert "302" in str(found.exception)
    assert Stranger.asked == [("/away/state", "Bearer sesame")]
    unnamed = CliRunner().invoke(app, ["top", "--key-file", str(key)])
    assert "URL" in str(unnamed.exception)
    assert isinstance(unnamed.exception, ConfigError)


@pytest.mark.parametrize("path", [path.removesuffix("/state") for path in ANSWERS])
def test_what_is_no_worker_is_said_in_words(stranger, path):
    assert isinstance(CliRunner().invoke(app, ["top", f"{stranger}{path}", "--once"]).exception, NoAnswer)


@pytest.mark.parametrize("address", ["http://h:x", "http://h\n", "http://", "http://[", "http://127.0.0.1:1"])
def test_an_address_that_is_none_is_said_in_words(address):
    assert isinstance(CliRunner().invoke(app, ["top", address, "--once"]).exception, NoAnswer)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["top", "http://127.0.0.1:1", "--once", "--key-file", "{}/none"], "{}/none: No such file or directory"),
        (["top", "http://127.0.0.1:1", "--once", "--key-file", "{}/key"], "{}/key: it is no text in UTF-8"),
        (["schemas", "export", "{}/key"], "{}/key: File exists"),
        (["offsets", "reset", "\N{SUPERSCRIPT TWO}"], "give an offset, 'beginning', 'end' or a moment"),
        (["status", "-b", "host:abc"], "bootstrap_servers: 'host:abc': write HOST:PORT"),
    ],
)
def test_what_does_not_do_is_told_in_a_line(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit) as ended:
        reported(lambda: app([word.format(tmp_path) for word in words], standalone_mode=False))
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith("gearshift: ")
    assert reason.format(tmp_path) in said.err.replace("\n", "")
