"""A broker that its controller has fenced, as its clients see it: it takes connections, and tells of no broker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from io import BytesIO

from aiokafka.protocol.api import Response
from aiokafka.protocol.metadata import MetadataRequest

_METADATA = MetadataRequest.API_KEY
_ANSWERS: dict[int, type[Response]] = {one.API_VERSION: one.RESPONSE_TYPE for one in MetadataRequest._CLASSES}


@asynccontextmanager
async def fenced_at_first(bootstrap: str, *, answers: int = 3) -> AsyncIterator[str]:
    """An address in front of the broker at ``bootstrap``, where each connection is told of it by a later answer only.

    Of what is asked for metadata, so many answers name no broker, as with Kafka where the only one is fenced: behind a
    pause that is longer than its session. Everything else passes.
    """
    host, _, port = bootstrap.rpartition(":")
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, to_broker = await asyncio.open_connection(host, int(port))
        asked: dict[int, int] = {}
        ways = [
            asyncio.create_task(_ask(reader, to_broker, asked)),
            asyncio.create_task(_answer(theirs, writer, asked, answers)),
        ]
        tasks.update(ways)
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        to_broker.close()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield "{}:{}".format(*server.sockets[0].getsockname())
        for task in tasks:
            task.cancel()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[int, int]) -> None:
    """Pass requests on, and note the version of those for metadata by their correlation id."""
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            request = await _framed(reader)
            if int.from_bytes(request[:2], "big") == _METADATA:
                asked[int.from_bytes(request[4:8], "big")] = int.from_bytes(request[2:4], "big")
            _send(writer, request)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[int, int], fenced: int
) -> None:
    """Pass answers on; the first so many about metadata without a broker."""
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            answer = await _framed(reader)
            kind = _ANSWERS.get(asked.pop(int.from_bytes(answer[:4], "big"), -1))
            if kind is not None and fenced:
                fenced -= 1
                told = kind.decode(BytesIO(answer[4:]))
                told.brokers = []
                answer = answer[:4] + told.encode()
            _send(writer, answer)


async def _framed(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


def _send(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(len(content).to_bytes(4, "big") + content)
