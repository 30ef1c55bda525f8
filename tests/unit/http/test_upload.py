"""A form with a file: the same whatever pieces it comes in, and bounded while it comes."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.base import Record
from schemas.batches import BatchAsked, Stored, StoredFile
from schemas.codec import encode_stored
from service.http.errors import Refused
from service.http.upload import Upload
from service.kafka.files import Files, new_id
from service.settings import load
from tests.support.waiting import PATIENCE_S

CONTENT = b'{"a": 1}\r\n--y\r\n--\r\n' * 3
PURPOSE = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n' + CONTENT + b"\r\n"
TYPE = "multipart/form-data; boundary=x"


@given(sizes=st.lists(st.integers(1, 40)), file_first=st.booleans())
def test_a_file_comes_whole_in_whatever_pieces(sizes: list[int], *, file_first: bool) -> None:
    left = (FILE + PURPOSE if file_first else PURPOSE + FILE) + b"--x--\r\n"
    upload, found = Upload(TYPE), b""
    for size in sizes:
        piece, left = left[:size], left[size:]
        found += upload.feed(piece)
    found += upload.feed(left)
    upload.end()
    assert (found, upload.filename, upload.fields) == (CONTENT, "in.jsonl", {"purpose": "batch"})


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (FILE + FILE + b"--x--\r\n", "two files"),
        (PURPOSE + b"--x--\r\n", "no file"),
        (FILE, "in the middle"),
        (b"hello", "can't be read"),
        (b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n' + b"a" * 2000 + b"\r\n--x--\r\n", "1024 bytes"),
        (PURPOSE * 17 + b"--x--\r\n", "16 parts"),
    ],
)
def test_a_form_that_is_none_is_refused(form: bytes, says: str) -> None:
    with pytest.raises(Refused) as caught:
        read(form)
    assert caught.value.response.status_code == 400
    assert says in bytes(caught.value.response.body).decode()


def read(form: bytes) -> None:
    upload = Upload(TYPE)
    upload.feed(form)
    upload.end()


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", TYPE[:-1], TYPE + "x" * 256])
def test_what_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(Refused) as caught:
        Upload(content_type)
    assert caught.value.response.status_code == 400


# --- at the door: what is shorter than a block of a file is asked of no broker before the file's end ---

HALF_MIB = 1 << 19
MIB = 1 << 20


@asynccontextmanager
async def arriving(s: Any, lines: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """An upload that stops behind these lines, and what it is answered."""
    where, form = urlsplit(s.server.address), PURPOSE + FILE.removesuffix(CONTENT + b"\r\n") + lines
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {TYPE}\r\ncontent-length: {4 * MIB}\r\n\r\n"
    writer.write(head.encode() + form)
    try:
        yield reader
    finally:
        writer.close()


async def until_held(s: Any, size: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while s.server.bus.held_bytes != size:
            await s.http.get("/health")


async def test_uploads_that_stop_within_a_line_are_held_within_the_bound_of_all(served) -> None:
    """A line without its end, and a block of the file that is not full: each upload holds both."""
    given = {"max_waiting_bytes": 4 * MIB, "max_request_bytes": 2 * MIB}
    async with served(**given) as s, contextlib.AsyncExitStack() as stack:
        s.server.files = Files(settings=load(**given))
        many = [await stack.enter_async_context(arriving(s, b" " * HALF_MIB)) for _ in range(12)]
        answers = [asyncio.create_task(reader.readline()) for reader in many]
        async with asyncio.timeout(PATIENCE_S):
            for refused, done in enumerate(asyncio.as_completed(answers), 1):
                assert (await done).startswith(b"HTTP/1.1 429")
                if refused == 8:  # the others wait for the rest of their lines
                    break
        assert s.server.bus.held_bytes <= 4 * MIB
        for task in answers:
            task.cancel()
        await stack.aclose()
        await until_held(s, 0)


async def test_what_an_upload_has_done_with_is_held_no_longer(served) -> None:
    line = b'{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "' + b"x" * HALF_MIB + b'"}}\n'
    async with served() as s:
        s.server.files = Files(settings=load())
        async with arriving(s, line), asyncio.timeout(PATIENCE_S):
            while not len(line) <= s.server.bus.held_bytes < len(line) + 1000:  # the block; of the line its mark
                await s.http.get("/health")
        await until_held(s, 0)


async def test_a_full_queue_keeps_no_file_from_being_looked_at(served) -> None:
    """An upload is no request: it is not counted among those that may wait."""
    async with served(max_waiting=1, max_running=1) as s, contextlib.AsyncExitStack() as stack:
        s.server.files = Files(settings=load())
        for number in range(2):
            stack.enter_context(s.server.bus.ask(b"{}", [], id_=str(number)))
        with pytest.raises(openai.BadRequestError, match="line 1: not JSON"):
            await s.openai.files.create(file=("in.jsonl", b"x"), purpose="batch")


async def test_one_key_takes_no_more_than_its_share_of_the_files_that_are_kept(served, tmp_path) -> None:
    (keys := tmp_path / "keys").write_text("mine\nother\nblue tenant=team\ngreen tenant=team\n")
    content = ("in.jsonl", b"no JSON")
    async with served(api_keys_file=keys) as s:
        s.server.files = Files(settings=load(http_most_files=9, http_files_share=0.34))
        mine, other, blue, green = (
            s.openai.with_options(api_key=key).files for key in ("mine", "other", "blue", "green")
        )

        def keep(owner: str, *begins: str) -> None:
            for begin in begins:
                kept = {"id": new_id(begin, owner), "at": time.time()}
                stored: Stored = (
                    StoredFile(filename="in.jsonl", purpose="batch", size=1, **kept)
                    if begin == "file-"
                    else BatchAsked(file="file-1", endpoint="/v1/completions", lines=1, window_s=60, **kept)
                )
                out = encode_stored("batches", stored)
                s.server.files.index.fold(Record("batches", 0, 0, time.time(), out.key, out.value, out.headers))

        keep(f"key {hashlib.sha256(b'mine').hexdigest()}", "file-", "batch_", "file-")
        keep("tenant team", "file-", "file-")
        with pytest.raises(openai.RateLimitError, match="3 files and batches of yours"):
            await mine.create(file=content, purpose="batch")
        for others in (other, blue, green):
            with pytest.raises(openai.BadRequestError, match="line 1: not JSON"):
                await others.create(file=content, purpose="batch")
        keep("tenant team", "file-")
        for full in (blue, green):
            with pytest.raises(openai.RateLimitError, match="3 files and batches of yours"):
                await full.create(file=content, purpose="batch")
        keep("somebody else", *["file-"] * 3)
        with pytest.raises(openai.RateLimitError, match="9 files and batches are kept"):
            await other.create(file=content, purpose="batch")


@pytest.mark.parametrize("purpose", ["user_data", "assistants"])
@pytest.mark.parametrize("content", [b"%PDF-1.7", b"x" * MIB], ids=["a short one", "in many pieces"])
async def test_a_file_for_something_else_is_refused_for_that_and_not_for_its_lines(served, purpose, content) -> None:
    async with served() as s:
        s.server.files = Files(settings=load())
        with pytest.raises(openai.BadRequestError, match="purpose must be 'batch': nothing else is done") as caught:
            await s.openai.files.create(file=("some.pdf", content), purpose=purpose)
        assert caught.value.param == "purpose"
