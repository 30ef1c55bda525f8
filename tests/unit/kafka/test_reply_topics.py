"""Reply topics while a broker takes connections and says nothing."""

import asyncio

from schemas.requests import ReplyTo
from service.kafka.reply_topics import Place, ReplyTopics
from service.settings import KafkaSettings, TopicSettings
from tests.support.waiting import PATIENCE_S


async def test_all_that_wait_for_a_broker_that_says_nothing_share_one_look():
    connections = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        kafka = KafkaSettings(bootstrap_servers=f"{host}:{port}", request_timeout_s=0.3)
        replies = ReplyTopics(kafka=kafka, topics=TopicSettings(reply_topics=("*",)))
        wanted = [ReplyTo(f"mine-{n}", 3) for n in range(200)]
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(*map(replies.place, wanted)) == [Place(one) for one in wanted]
    assert connections < 10


async def test_what_may_not_be_written_to_is_not_even_looked_for():
    replies = ReplyTopics(kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"), topics=TopicSettings())
    for topic in ("control", "requests", "mine"):
        place = await replies.place(ReplyTo(topic))
        assert place.reply is None
        assert "may write" in (place.note or "")
