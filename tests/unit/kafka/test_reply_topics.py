"""Reply topics: what is looked for, and how often; also while a broker takes connections and says nothing."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from schemas.requests import ReplyTo
from service.kafka import reply_topics
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


class Admin:
    """aiokafka's admin of a broker that has two topics, and says nothing of their rules while it is ``cut_off``."""

    opened = 0
    cut_off = False
    asked: asyncio.Event

    def __init__(self, **_options: Any) -> None:
        self._client = SimpleNamespace(bootstrap=None)
        Admin.opened += 1

    async def start(self) -> None:
        await asyncio.sleep(0)

    async def close(self) -> None:
        """There is nothing to close."""

    async def describe_topics(self) -> list[dict[str, Any]]:
        return [{"topic": name, "partitions": [0], "error_code": 0} for name in ("mine", "other")]

    async def describe_configs(self, resources: list[Any]) -> list[Any]:
        Admin.asked.set()
        await asyncio.sleep(0)
        if Admin.cut_off:
            raise KafkaConnectionError("away")
        rules = {"mine": [], "other": [("message.timestamp.before.max.ms", "0")]}
        return [SimpleNamespace(resources=[(0, None, 2, one.name, rules[one.name]) for one in resources])]


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> ReplyTopics:
    monkeypatch.setattr(Admin, "opened", 0)
    monkeypatch.setattr(Admin, "cut_off", False)
    monkeypatch.setattr(Admin, "asked", asyncio.Event(), raising=False)
    monkeypatch.setattr(reply_topics, "AIOKafkaAdminClient", Admin)
    return ReplyTopics(kafka=KafkaSettings(), topics=TopicSettings(reply_topics=("mine", "other")))


async def test_all_that_wait_for_the_rules_of_topics_share_a_look(replies: ReplyTopics):
    places = await asyncio.gather(*[replies.place(ReplyTo(topic)) for topic in ("mine", "other") for _ in range(100)])
    assert places[:100] == [Place(ReplyTo("mine"))] * 100
    assert all(one.reply is None and "before.max.ms of 0" in (one.note or "") for one in places[100:])
    assert Admin.opened <= 4, "for the topics, and for the rules of each"


async def test_rules_that_are_not_told_are_not_asked_for_with_each_result(replies: ReplyTopics):
    Admin.cut_off = True
    for _ in range(50):
        assert await replies.place(ReplyTo("other")) == Place(ReplyTo("other"))
    assert Admin.opened == 2


async def test_a_rule_that_is_known_counts_until_another_is_told(replies: ReplyTopics, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reply_topics, "_FRESH_S", 0.0)
    strict = await replies.place(ReplyTo("other"))
    Admin.cut_off = True
    assert await replies.place(ReplyTo("other")) == strict


async def test_who_is_cancelled_while_it_looks_for_rules_takes_no_others_with_it(replies: ReplyTopics):
    assert (await replies.place(ReplyTo("mine"))).reply is not None
    Admin.asked.clear()
    first, second = (asyncio.create_task(replies.place(ReplyTo("other"))) for _ in range(2))
    await asyncio.wait_for(Admin.asked.wait(), PATIENCE_S)
    first.cancel()
    assert (await second).reply is None


@pytest.mark.parametrize(
    ("limit", "hangs"),
    [
        ("0", True),
        ("59999", True),
        ("60000", False),
        (str(2**63 - 1), False),
        ("-1", False),
        ("", False),
        (None, False),
    ],
)
def test_a_limit_that_is_no_time_hangs_nothing(limit: Any, hangs: bool) -> None:
    """Other brokers than Apache's say so that there is none."""
    rule = reply_topics._hanging_rule({"message.timestamp.before.max.ms": limit})
    assert (rule is not None) is hangs
