"""What strangers wrote, on an operator's terminal and where the output goes elsewhere."""

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from service.cli.options import Terminal

HOSTILE = "[/red][bold]a[/] :bug: \x1b[2J\x1b]0;title\x07 \x9b1m \u202eb"
CELLS = [str, Text, lambda text: Text.assemble("by ", (text, "red"))]
OBEYED = {"Cc", "Cf"}


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
def test_brackets_and_colons_are_text_and_a_terminal_obeys_nothing(made, where):
    text = shown(where(made(HOSTILE)), terminal=True)
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
    assert file.getvalue() == (said if not terminal else "a \ufffd[1m \ufffd\n " + "long " * 100)
