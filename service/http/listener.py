"""Takes connections for TLS: asyncio's own server counts none, and times none as we do, until its handshake is done."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sized

import structlog

from service.http.connection import RESERVED, Limits

log = structlog.get_logger(__name__)
_ACCEPT_AGAIN_S = 1.0


class TlsListener:
    """Gives each connection to a protocol of its own once its handshake is done.

    ``connections`` are those whose handshake is done: with those that still are at it, they stay within the cap and
    what is reserved beyond it for probes. Nothing can be said to one too many, so it is closed.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        connections: Sized,
        limits: Limits,
    ) -> None:
        self._listening = listening
        self._context = context
        self._protocol = protocol
        self._connections = connections
        self._limits = limits
        self._handshakes = 0

    async def accept(self) -> None:
        """Take whoever comes, until this is cancelled: then nobody can, and handshakes that are not done end, too."""
        self._listening.setblocking(False)
        async with asyncio.TaskGroup() as tasks:
            with self._listening:
                await self._accept_into(tasks)

    async def _accept_into(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            accepted = await self._accepted()
            others = len(self._connections) + self._handshakes
            if others >= self._limits.connections + RESERVED:
                accepted.close()
                continue
            self._handshakes += 1
            tasks.create_task(self._shake_hands(accepted, self._limits.headers_within_s(others)), name="handshake")

    async def _accepted(self) -> socket.socket:
        while True:
            try:
                return (await asyncio.get_running_loop().sock_accept(self._listening))[0]
            except ConnectionAbortedError:
                continue
            except OSError as error:  # as many files are open as may be: some will be closed
                log.warning("http.not_accepted", why=str(error))
                await asyncio.sleep(_ACCEPT_AGAIN_S)

    async def _shake_hands(self, accepted: socket.socket, within_s: float) -> None:
        """Who does not come to the end of it, or speaks no TLS, has been hung up on."""
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, accepted, ssl=self._context, ssl_handshake_timeout=within_s
            )
        except Exception as error:  # whatever a stranger's handshake stumbles over ends no other one's
            log.debug("http.no_handshake", why=repr(error))
        finally:
            self._handshakes -= 1
