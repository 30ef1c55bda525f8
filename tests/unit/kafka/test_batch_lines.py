"""A batch's input as it comes over HTTP: checked line by line, in whatever pieces."""

import codecs
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.requests import Endpoint
from service.errors import BatchInvalid
from service.kafka.batch_lines import Arriving, Line, parse_line
from service.kafka.batch_runs import Unsent


def line(custom_id: str, **changed: object) -> bytes:
    body = {"model": "m", "prompt": "x"}
    return json.dumps({"custom_id": custom_id, "url": "/v1/completions", "body": body, **changed}).encode()


def checked(content: bytes, *sizes: int) -> Arriving:
    arriving = Arriving(most_lines=3, most_bytes=200)
    for size in sizes:
        arriving.take(content[:size])
        content = content[size:]
    arriving.take(content)
    arriving.end()
    return arriving


@given(st.lists(st.integers(0, 60)))
def test_lines_are_the_same_in_whatever_pieces(sizes: list[int]) -> None:
    known = checked(b"\n".join([line("a"), b"  ", line("b"), line("c")]), *sizes).known
    assert (len(known), known.endpoints) == (3, {Endpoint.COMPLETIONS})


@pytest.mark.parametrize("content", [line("a"), b"\n" + line("a")])
def test_the_mark_that_some_editors_begin_a_file_with_is_passed_over(content: bytes) -> None:
    assert len(checked(codecs.BOM_UTF8 + content, 1, 1).known) == 1
    with pytest.raises(BatchInvalid, match="line 2"):
        checked(line("a") + b"\n" + codecs.BOM_UTF8 + line("b"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no requests"),
        (b"\n\n", "no requests"),
        (b"\xff\n", "line 1: not JSON"),
        (line("a") + b"\n" + line("a"), "line 2: custom_id 'a' is that of line 1"),
        (line("a", url="/v1/none"), "line 1: unknown url"),
        (line("a", url=[]), "line 1: url must be a string"),
        (line("\ud800"), "line 1: not JSON"),
        (line("a", body={"prompt": "\udfff"}), "line 1: not JSON"),
        (line("a", body={"prompt": [1e15] * 12}).replace(b"1000000000000000.0", b"1e15"), "line 1: .* at most 200"),
        (b"\n".join(line(each) for each in "abcd"), "line 4: a batch has at most 3 requests"),
        (line("a" * 200), "line 1: a request has at most 200 bytes"),
        (line("a") + b"\n" + b" " * 300, "line 2: a request has at most 200 bytes"),
    ],
)
def test_what_is_wrong_is_told_by_its_line(content: bytes, says: str) -> None:
    with pytest.raises(BatchInvalid, match=says):
        checked(content)


def test_what_is_nested_too_deep_to_be_written_again_is_refused() -> None:
    depth = 100_000
    with pytest.raises(BatchInvalid, match="line 7: not JSON"):
        parse_line(7, b'{"body":' + b"[" * depth + b"]" * depth + b"}")


def test_custom_ids_are_bounded() -> None:
    arriving = Arriving(most_lines=3, most_bytes=2000)
    arriving.take(line("é" * 256) + b"\n")
    with pytest.raises(BatchInvalid, match="line 2: a custom_id has at most 512 bytes"):
        arriving.take(line("é" * 256 + "x") + b"\n")


@pytest.mark.parametrize(("size", "count"), [(1, 2048), (1 << 20, 8)])
def test_lines_are_written_together_until_they_are_many_or_large(size: int, count: int) -> None:
    unsent, one = Unsent(), Line(1, "a", Endpoint.COMPLETIONS, {"prompt": "x" * size})
    for number in range(count):
        assert not unsent.is_full
        unsent.add(str(number), one)
    assert unsent.is_full
