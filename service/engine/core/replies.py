"""The short way for the answers of switches, past what vLLM sends answers by."""

import socket
from typing import Any

import msgspec


class Replies:
    """A socket that the callers' event loop reads.

    vLLM's own way for an answer wakes four threads one after another, which takes longer than a switch. None of its
    outputs has to come before that of a switch: the model that it is to has said nothing since it was left.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.connect(address)

    def send(self, client: int, output: Any) -> bool:
        """Answer a client's call with what vLLM would tell it; False where it has to go vLLM's way."""
        if output.failure_message is not None:
            return False
        try:
            self._socket.send(msgspec.msgpack.encode((client, output.call_id, output.result.result)))
        except (OSError, TypeError):  # nobody reads, or not fast enough; it is too long, or only vLLM can write it
            return False
        return True
