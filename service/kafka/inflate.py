"""Inflating what a producer compressed, within a bound: a few kilobytes can stand for gigabytes.

The bound holds while it is inflated: no more memory than that is ever written.
"""

import mmap
import struct
import zlib
from collections.abc import Callable, Iterator

import cramjam

_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_HEADER = 16
_GZIP = 31
"""zlib's window bits for a gzip header."""
_MOST_MEMBERS = 1000
"""A producer writes one; each takes time, and may have no content."""
_PIECE = 1 << 16


class NotInflated(Exception):
    """The bytes can't be inflated, or not within the bound; the message says which."""


def inflate(codec: int, data: bytes, most: int) -> bytes:
    """The content of a compressed batch, by the number of its codec in Kafka's protocol; at most ``most`` bytes.

    Raises NotInflated.
    """
    codecs: dict[int, Callable[[bytes, int], bytes]] = {1: _gzip, 2: _snappy, 3: _lz4, 4: _zstd}
    if codec not in codecs:
        raise NotInflated(f"unknown codec {codec}")
    try:
        return codecs[codec](data, most)
    except (zlib.error, cramjam.DecompressionError, struct.error, ValueError) as error:
        raise NotInflated(f"{codecs[codec].__name__[1:]} content that can't be inflated: {error}") from None


def _too_large(most: int) -> NotInflated:
    return NotInflated(f"the batch inflates to more than {most} bytes")


def _gzip(data: bytes, most: int) -> bytes:
    """All members of a gzip stream, taken in pieces: each member copies what is behind it in its last piece."""
    found, at, members = bytearray(), 0, 0
    while at < len(data):
        members += 1
        if members > _MOST_MEMBERS:
            raise NotInflated(f"the gzip content has more than {_MOST_MEMBERS} members")
        member = zlib.decompressobj(_GZIP)
        while not member.eof:
            piece = data[at : at + _PIECE]
            if not piece:
                raise NotInflated("the gzip content ends too early")
            found += member.decompress(piece, most + 1 - len(found))
            if len(found) > most:
                raise _too_large(most)
            at += len(piece) - len(member.unused_data)
    return bytes(found)


def _snappy(data: bytes, most: int) -> bytes:
    """One block, or the framing of the xerial library, which Java's producers use. Blocks tell their sizes."""
    blocks = list(_framed(data)) if data.startswith(_XERIAL) else [data]
    if sum(cramjam.snappy.decompress_raw_len(block) for block in blocks) > most:
        raise _too_large(most)
    return b"".join(bytes(cramjam.snappy.decompress_raw(block)) for block in blocks)


def _framed(data: bytes) -> Iterator[bytes]:
    at = _XERIAL_HEADER
    while at < len(data):
        (size,) = struct.unpack_from(">i", data, at)
        at += 4
        if not 0 < size <= len(data) - at:
            raise NotInflated(f"a snappy block of {size} bytes does not end within the batch")
        yield data[at : at + size]
        at += size


def _lz4(data: bytes, most: int) -> bytes:
    return _into(cramjam.lz4.decompress_into, data, most)


def _zstd(data: bytes, most: int) -> bytes:
    return _into(cramjam.zstd.decompress_into, data, most)


def _into(decompress_into: Callable[[bytes, mmap.mmap], int], data: bytes, most: int) -> bytes:
    """Into memory that is only there where something is written."""
    with mmap.mmap(-1, most) as room:
        try:
            return room[: decompress_into(data, room)]
        except cramjam.DecompressionError as error:
            if "whole buffer" in str(error):
                raise _too_large(most) from None
            raise
