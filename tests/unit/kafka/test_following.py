"""What is given out of a call's pieces: each number once, of the run that counts, where the whole is in the log."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from schemas.base import Origin, Record
from schemas.codec import decode_chunk, decode_result, encode_chunk, encode_result, kind_of
from schemas.requests import Attempt
from schemas.results import Chunk, Outcome, Result, Timing
from service.errors import Unavailable
from service.kafka.following import Following
from tests.support.waiting import PATIENCE_S

CALL = Origin(topic="calls", partition=0, offset=0)
DONE = Result(id="a", origin=CALL, outcome=Outcome.COMPLETED, status=200, timing=Timing(received=0.0, finished=0.0))


def log_of(said: str) -> list[Record]:
    """Pieces as ``A0 A1``: an attempt and a number each; behind them lies the result."""
    pieces = [
        Chunk(id="a", seq=int(one[1:]), origin=CALL, attempt=Attempt(n=ord(one[0]) - 64), data={"said": one})
        for one in said.split()
    ]
    found = [*(encode_chunk("answers", piece) for piece in pieces), encode_result("answers", DONE)]
    return [Record(out.topic, 0, offset, 1.0, out.key, out.value, out.headers) for offset, out in enumerate(found)]


def answer_in(record: Record) -> Chunk | Result:
    return decode_chunk(record) if kind_of(record) == "chunk" else decode_result(record)


async def given(said: str, *, live: int = 0) -> str:
    """What a follower is given, to whom the last ``live`` records come only when it has taken all before them."""
    log = log_of(said)
    there = len(log) - live

    async def past(since: int) -> AsyncIterator[Record]:
        for record in log[since:there]:
            yield record

    following, taken = Following("a", past=past, answer_in=answer_in), []
    for record in log[there:]:
        following.put(record)
    while not isinstance(piece := await following.next(), Result):
        taken.append((piece.data or {})["said"])
    return " ".join(taken)


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        ("A0 A1 A2", "A0 A1 A2"),
        ("A0 A1 A2 B0 B1 B2 B3", "B0 B1 B2 B3"),
        ("A0 A1 A2 B2 B3", "A0 A1 B2 B3"),
        ("A0 A1 B2 B3", "A0 A1 B2 B3"),
        ("A0 A1 A2 B1 A3 B2 A4 B3", "A0 B1 B2 B3"),
        ("A0 A1 A0 A1 A2", "A0 A1 A2"),
        ("A0 A1 A2 B1 B2 C0 C1", "C0 C1"),
    ],
)
async def test_of_what_lies_in_the_log_only_the_runs_that_count_are_given_out(said: str, counts: str) -> None:
    assert await given(said) == counts


async def test_what_is_told_again_comes_again_to_who_has_it_and_what_goes_on_goes_on() -> None:
    assert await given("A0 A1 A2 B1 B2", live=3) == "A0 A1 A2 B1 B2"
    assert await given("A0 A1 B2 B3", live=3) == "A0 A1 B2 B3"


@pytest.mark.parametrize("later", [0, 1001])
async def test_who_follows_a_call_that_has_ended_here_is_told_so_whatever_comes_behind_it(later: int) -> None:
    async def past(_since: int) -> AsyncIterator[Record]:
        for record in ():
            yield record

    following = Following("a", past=past, answer_in=answer_in)
    following.end(Unavailable("over"))
    for record in log_of("A0")[:1] * later:
        following.put(record)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Unavailable, match="over"):
            await following.next()
