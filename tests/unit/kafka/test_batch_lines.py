"""A batch's input as it comes over HTTP: checked line by line, in whatever pieces."""

import codecs
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.requests import Endpoint
from service.errors import BatchInvalid
from service.kafka.batch_lines import Arriving, Line, parse_line, window_of
from service.kafka.batch_runs import Unsent
from service.settings import TopicSettings


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
    ("path", "endpoint"),
    [("/v1/score", Endpoint.SCORE), ("/v1/rerank", Endpoint.RERANK), ("/v2/rerank", Endpoint.RERANK)],
)
def test_a_line_s_url_is_any_path_that_a_door_serves(path: str, endpoint: Endpoint) -> None:
    assert parse_line(1, line("a", url=path)).endpoint is endpoint


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


HOUR_S, NOW = 3600.0, 1_700_000_000.0


@pytest.mark.parametrize(
    ("window", "kept_s", "age_s", "says"),
    [
        ("24h", 168 * HOUR_S, 0.0, None),
        ("24h", 168 * HOUR_S, 143 * HOUR_S, None),
        ("24h", 168 * HOUR_S, 144 * HOUR_S, "at 2023-11-15T22:13:20Z: upload it again, or take 82800 s at most"),
        ("1m", 168 * HOUR_S, 168 * HOUR_S, "at 2023-11-14T22:13:20Z: upload it again$"),
        ("25h", 168 * HOUR_S, 0.0, "like 24h, and 86400 s at most"),
        ("24h", 24 * HOUR_S, 0.0, "like 24h, and 82800 s at most"),
        ("45s", 168 * HOUR_S, 0.0, "like 24h"),
        ("1m", 80.0, 0.0, None),
    ],
)
def test_a_batch_s_window_ends_before_what_it_needs_is_kept_no_longer(
    window: str, kept_s: float, age_s: float, says: str | None
) -> None:
    topics = TopicSettings(calls_retention_s=48 * HOUR_S, files_retention_s=kept_s)
    if says is None:
        assert window_of(window, file_at=NOW - age_s, now=NOW, topics=topics) in {60.0, 24 * HOUR_S}
        return
    with pytest.raises(BatchInvalid, match=says):
        window_of(window, file_at=NOW - age_s, now=NOW, topics=topics)
