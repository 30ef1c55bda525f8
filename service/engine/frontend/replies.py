"""Where the answers of switches come in, past what vLLM reads answers by (``core/replies.py``)."""

import asyncio
import socket
from collections.abc import Mapping

import msgspec

from service.engine.frontend.frontend import Frontend

_MOST_BYTES = 1 << 18
"""More than a datagram may have."""


class Replies:
    """A socket that the event loop reads. Each answer is given to whoever waits for it in vLLM's own client."""

    def __init__(self, address: str, frontends: Mapping[str, Frontend]) -> None:
        self._frontends = frontends
        self._buffer = bytearray(_MOST_BYTES)
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(address)
        self._loop.add_reader(self._socket, self._read)

    def _read(self) -> None:
        try:
            size = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        key, call_id, answer = msgspec.msgpack.decode(memoryview(self._buffer)[:size])
        for frontend in self._frontends.values():
            if frontend.key == key:
                frontend.answered(call_id, answer)

    def close(self) -> None:
        """Read no more."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
        self._socket.close()
