"""Request ids that tell when they were made, that nobody guesses, and that have their results where their client reads.

Results and chunks are keyed by the request's id, and Kafka's partitioner makes a partition of a key. So a client that
chooses its ids needs to read one partition only.
"""

import re
import secrets
import time

from service.kafka.producer import partition_of

_SEED, _M, _MASK = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF
_MADE = re.compile(r"ask-([0-9a-f]{8,12})-")
_LENGTH = 40
"""Of an id, in characters; a multiple of four, as the hash takes four at a time."""
_DRAWS = 1 << 16


def place_of(id_: str, partitions: int) -> int:
    """The partition that an id's records are in, of this many."""
    return partition_of(id_.encode(), partitions)


def made_at(id_: str) -> float | None:
    """When an id of a client was made, in seconds since the epoch; None for ids of another kind."""
    found = _MADE.match(id_)
    return int(found[1], 16) / 1000 if found else None


def new_id(place: int, partitions: int) -> str:
    """A new id whose records are in partition ``place`` of so many; 92 random bits but for that choice.

    Its last four digits are counted on until they fit, with one step of the hash each: hashing whole ids would cost
    more than sending the request.
    """
    while True:
        begun = f"ask-{round(time.time() * 1000):012x}-{secrets.token_hex(10)[: _LENGTH - 21]}"
        state = _SEED ^ _LENGTH
        for at in range(0, len(begun), 4):
            state = _mixed(state, begun[at : at + 4])
        first = secrets.randbelow(_DRAWS)
        for drawn in range(first, first + _DRAWS):
            last = f"{drawn % _DRAWS:04x}"
            if (_finished(_mixed(state, last)) & 0x7FFFFFFF) % partitions == place:
                return begun + last


def _mixed(state: int, four: str) -> int:
    """Murmur2's step for four bytes."""
    k = (int.from_bytes(four.encode(), "little") * _M) & _MASK
    k = ((k ^ (k >> 24)) * _M) & _MASK
    return ((state * _M) & _MASK) ^ k


def _finished(state: int) -> int:
    state = ((state ^ (state >> 13)) * _M) & _MASK
    return state ^ (state >> 15)
