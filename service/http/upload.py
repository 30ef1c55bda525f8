"""A form with a file, taken apart as it comes: the file is never held."""

from collections.abc import Iterator
from contextlib import contextmanager

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.http import errors
from service.http.errors import Refused

_FORM = b"multipart/form-data"
_FILE = "file"
_MOST_PARTS = 16
_LONGEST_FIELD = 1024
_LONGEST_NAME = 255


class Upload:
    """The parts of ``multipart/form-data``; ``fields`` are its short ones. Raises Refused for what is none."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != _FORM or not options.get(b"boundary"):
            raise Refused(errors.error(400, "A file comes as multipart/form-data"))
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._name = ""
        self._whole = False
        self._headers: dict[bytes, bytes] = {}
        self._header = b""
        self._value = b""
        self._parts = 0
        self._field = bytearray()
        self._data: list[bytes] = []
        with _readable():
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._part_begin,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
            )

    def feed(self, piece: bytes) -> bytes:
        """What of the file is in this piece. Raises Refused."""
        with _readable():
            self._parser.write(piece)
        found = b"".join(self._data)
        self._data.clear()
        return found

    def end(self) -> None:
        """All has come. Raises Refused where it is not whole, or has no file."""
        if not self._whole:
            raise Refused(errors.error(400, "The form ends in the middle"))
        if not self.filename:
            raise Refused(errors.error(400, "The form has no file", param=_FILE))

    # --- what the parser finds ---

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise Refused(errors.error(400, f"A form has at most {_MOST_PARTS} parts"))
        self._headers = {}
        self._field.clear()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == _FILE:
            if self.filename:
                raise Refused(errors.error(400, "The form has two files", param=_FILE))
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:_LONGEST_NAME] or _FILE

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._data.append(data[start:end])
        else:
            self._field += data[start:end]
            if len(self._field) > _LONGEST_FIELD:
                raise Refused(errors.error(400, f"A field has at most {_LONGEST_FIELD} bytes", param=self._name[:100]))

    def _part_end(self) -> None:
        if self._name != _FILE:
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    def _end(self) -> None:
        self._whole = True


@contextmanager
def _readable() -> Iterator[None]:
    """What the parser refuses, its boundary included, is for who sent it to mend. Raises Refused."""
    try:
        yield
    except FormParserError as wrong:
        raise Refused(errors.error(400, f"The form can't be read: {wrong}")) from None
