"""A form with a file: the same whatever pieces it comes in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.http.errors import Refused
from service.http.upload import Upload

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


@pytest.mark.parametrize("content_type", ["", "application/json", "multipart/form-data", TYPE[:-1]])
def test_what_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(Refused):
        Upload(content_type)
