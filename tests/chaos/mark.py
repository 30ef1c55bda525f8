"""Batches that the run itself forged carry a mark, so that its reader can leave them out wherever they are.

The mark is the base sequence, which says nothing in a batch without a producer id; a broker keeps it as it is.
"""

import struct

from aiokafka.record.util import calc_crc32c

_MARK = -666
_CRC_AT, _CHECKED_FROM = 17, 21
_LAST_AT, _SEQUENCE_AT = 23, 53


def marked(batch: bytes) -> bytes:
    """The same batch with the mark."""
    made = bytearray(batch)
    struct.pack_into(">i", made, _SEQUENCE_AT, _MARK)
    struct.pack_into(">I", made, _CRC_AT, calc_crc32c(bytes(made[_CHECKED_FROM:])))
    return bytes(made)


def is_marked(batch: bytes | memoryview) -> bool:
    """Whether the run made this batch to do harm."""
    (sequence,) = struct.unpack_from(">i", batch, _SEQUENCE_AT)
    return bool(sequence == _MARK)


def last_offset(batch: bytes | memoryview) -> int:
    """The offset of a batch's last record, counted from its first."""
    (delta,) = struct.unpack_from(">i", batch, _LAST_AT)
    return int(delta)
