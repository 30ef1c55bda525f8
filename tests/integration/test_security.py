"""Getting to a broker that asks who is there, and not getting further than one may; on the real broker."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import TopicAuthorizationFailedError

from deploy.local.broker import LocalBroker
from service.client import Client
from service.errors import BrokerUnavailable, NoAnswer, RecordRefused, TopicError
from service.kafka.acls import Role, acls
from service.kafka.connection import client_options, reachable
from service.kafka.reader import TopicReader
from service.settings import KafkaSettings, Settings, load
from tests.support.pool import serving, settings_for
from tests.support.secure_broker import Authority, SecureBroker, secure_broker, unsigned_token

pytestmark = pytest.mark.broker

USERS = {
    "worker": Role.WORKER,
    "app": Role.PRODUCER,
    "reader": Role.CONSUMER,
    "fetcher": Role.BATCH,
    "operator": Role.OPERATOR,
    "watcher": Role.VIEWER,
}
PASSWORDS = {user: f"{user}-5ecret-word" for user in USERS}
CONTROL_KEY = "control-5ecret-word"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[SecureBroker]:
    if LocalBroker.missing():
        pytest.skip(f"a broker with certificates of ours must run here: {LocalBroker.missing()}")
    with secure_broker(tmp_path_factory.mktemp("secure"), PASSWORDS) as broker:
        yield broker


def login(broker: SecureBroker, user: str, mechanism: str = "PLAIN") -> dict[str, Any]:
    """The settings to log in with."""
    common = {"security_protocol": "SASL_SSL", "ssl_cafile": broker.authority.ca, "sasl_mechanism": mechanism}
    if mechanism == "OAUTHBEARER":
        token = broker.authority.folder / f"{user}.token"
        token.write_text(unsigned_token(user))
        return {**common, "oauth_token_file": token}
    password = broker.authority.folder / f"{user}.password"
    password.write_text(PASSWORDS[user] + "\n")
    return {**common, "sasl_username": user, "sasl_password_file": password}


def certificate(broker: SecureBroker, user: str) -> dict[str, Any]:
    own, key = broker.authority.issue(user)
    return {
        "security_protocol": "SSL",
        "ssl_cafile": broker.authority.ca,
        "ssl_certfile": own,
        "ssl_keyfile": key,
    }


def as_user(pool: Settings, bootstrap: str, **login_: Any) -> Settings:
    """The pool's settings with somebody else's way to the broker."""
    return pool.model_copy(update={"kafka": load(bootstrap_servers=bootstrap, **login_).kafka})


@pytest.fixture(scope="module")
async def pool(guarded: SecureBroker) -> AsyncIterator[Settings]:
    """A worker with its own login and a key for control events; each principal has its role's ACLs and no others."""
    key = guarded.authority.folder / "control.key"
    key.write_text(CONTROL_KEY)
    settings = settings_for(guarded.sasl, **login(guarded, "worker", "SCRAM-SHA-512"), control_key_file=key)
    replies = (f"{settings.topics.topic_prefix}replies",)
    settings = settings.model_copy(update={"topics": settings.topics.model_copy(update={"reply_topics": replies})})
    for user, role in USERS.items():
        await guarded.allow(f"User:{user}", acls(settings, role))
    async with serving(settings):
        yield settings


async def test_a_producer_reads_its_partition_of_a_reply_topic_that_the_workers_made(
    guarded: SecureBroker, pool: Settings
):
    mine = as_user(pool, guarded.sasl, **login(guarded, "app"))
    (replies,) = pool.topics.reply_topics
    asked = {"model": "llama", "prompt": "hello", "max_tokens": 2}
    async with Client(settings=mine, reply_topic=replies, reply_partition=1, timeout_s=30) as client:
        assert (await client.complete(**asked)).choices[0].text == "llama0 llama1 "
        assert "".join([piece.choices[0].text async for piece in client.stream(**asked)]) == "llama0 llama1 "
    async with TopicReader(kafka=mine.kafka, topics=[replies]) as reader:
        assert {record.partition async for record in reader.backlog()} == {1}


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"])
async def test_a_producer_logs_in_and_is_answered(guarded: SecureBroker, pool: Settings, mechanism: str):
    mine = as_user(pool, guarded.sasl, **login(guarded, "app", mechanism))
    async with Client(settings=mine) as client:
        answer = await client.complete(model="qwen", prompt="hello", max_tokens=1)
    assert answer.choices[0].text == "qwen0 "


async def test_a_certificate_is_a_login_too(guarded: SecureBroker, pool: Settings):
    async with Client(settings=as_user(pool, guarded.tls, **certificate(guarded, "app"))) as client:
        answer = await client.complete(model="llama", prompt="hello", max_tokens=1)
    assert answer.choices[0].text == "llama0 "


async def test_a_producer_can_t_say_what_workers_are_to_do(guarded: SecureBroker, pool: Settings):
    mine = as_user(pool, guarded.sasl, **login(guarded, "app"))
    topics = [pool.topics.named(name) for name in (pool.topics.control, pool.topics.commands, pool.topics.results)]
    async with AIOKafkaProducer(**client_options(mine.kafka)) as producer:
        for topic in topics:
            with pytest.raises(TopicAuthorizationFailedError):
                await producer.send_and_wait(topic, b'{"model": "qwen"}', b"x")
    async with Client(settings=mine) as client:
        with pytest.raises(RecordRefused, match="control"):
            await client.cancel("somebody's")


async def test_each_reads_what_its_role_is_for_and_nothing_else(guarded: SecureBroker, pool: Settings):
    app = as_user(pool, guarded.sasl, **login(guarded, "app"))
    async with Client(settings=app) as client:
        await client.complete(model="llama", prompt="hello", max_tokens=1)
    async with AIOKafkaProducer(**client_options(app.kafka)) as producer:
        await producer.send_and_wait(pool.topics.named("requests"), b'{"model": "llama", "prompt": "mine alone"}')

    async def reads(user: str) -> set[str]:
        kafka, found = as_user(pool, guarded.sasl, **login(guarded, user)).kafka, set()
        for name in ("requests", "results", "usage", "workers"):  # none of them is empty
            with contextlib.suppress(TopicError, BrokerUnavailable):
                async with TopicReader(kafka=kafka, topics=[pool.topics.named(name)], within_s=0.1) as reader:
                    assert [record async for record in reader.backlog()]
                found.add(name)
        return found

    assert {user: await reads(user) for user in USERS if user != "worker"} == {
        "app": {"results", "workers"},
        "reader": {"results"},
        "fetcher": set(),
        "operator": {"requests", "usage", "workers"},
        "watcher": {"usage", "workers"},
    }


async def test_who_may_write_nothing_can_read_with_the_client(guarded: SecureBroker, pool: Settings):
    async with Client(settings=as_user(pool, guarded.sasl, **login(guarded, "app"))) as client:
        asked = await client.submit({"model": "llama", "prompt": "hello", "max_tokens": 1})
        await client.result(asked)
    async with Client(settings=as_user(pool, guarded.sasl, **login(guarded, "watcher"))) as client:
        assert pool.worker.worker_id in {presence.worker for presence in await client.presences()}
    async with Client(settings=as_user(pool, guarded.sasl, **login(guarded, "reader"))) as client:
        assert asked in [result.id async for result in client.results(past=True, follow=False)]


async def test_who_asks_batches_needs_no_other_right(guarded: SecureBroker, pool: Settings, tmp_path: Path):
    body = {"model": "llama", "prompt": "hello", "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    async with Client(settings=as_user(pool, guarded.sasl, **login(guarded, "fetcher"))) as client:
        done = await client.batch.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
        assert (done.status, done.completed) == ("completed", 1)
        with pytest.raises(TopicError, match="may not see"):
            await client.submit({"model": "llama", "prompt": "hello"})
    async with Client(settings=as_user(pool, guarded.sasl, **login(guarded, "app"))) as client:
        with pytest.raises(TopicError, match="may not see"):
            await client.batch.submit(tmp_path / "in.jsonl")


async def test_an_operator_switches_with_the_key_and_is_not_heard_without(guarded: SecureBroker, pool: Settings):
    operator = as_user(pool, guarded.sasl, **login(guarded, "operator"))
    async with Client(settings=operator) as client:
        status = await client.switch("qwen", timeout_s=30)
        assert status.state == "completed"
    unsigned = operator.model_copy(update={"worker": pool.worker.model_copy(update={"control_key_file": None})})
    async with Client(settings=unsigned) as client:
        with pytest.raises(NoAnswer):  # who can't sign is not answered: the worker's log has the reason
            await client.switch("llama", timeout_s=5)


async def test_who_is_refused_is_told_why_at_once_and_not_the_password(guarded: SecureBroker, tmp_path: Path):
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-pa55word")
    user = {**login(guarded, "app"), "sasl_password_file": wrong}
    stranger = Authority(tmp_path)
    cases = {
        "refuses us.*Authentication": (guarded.sasl, user),
        "refuses us.*certificate": (guarded.sasl, {**login(guarded, "app"), "ssl_cafile": stranger.ca}),
    }
    for reason, (where, given) in cases.items():
        kafka = load(bootstrap_servers=where, **given).kafka
        began = asyncio.get_running_loop().time()
        with pytest.raises(BrokerUnavailable, match=f"(?i){reason}") as caught:
            await reachable(kafka, within_s=60)
        assert asyncio.get_running_loop().time() - began < 20
        assert "pa55word" not in str(caught.value)
        assert "5ecret" not in str(caught.value)


async def test_a_door_without_tls_is_not_taken_for_one_with(guarded: SecureBroker):
    with pytest.raises(BrokerUnavailable):
        await reachable(KafkaSettings(bootstrap_servers=guarded.sasl, request_timeout_s=2), within_s=3)


async def test_secrets_are_in_nothing_that_a_worker_says(guarded: SecureBroker, pool: Settings, capsys, caplog):
    """Not in its logs, its presence, its statuses or its results; nor in how its settings print."""
    async with Client(settings=as_user(pool, guarded.sasl, **login(guarded, "app"))) as client:
        await client.complete(model="llama", prompt="hello", max_tokens=1)
    given = load(sasl_password="a-5ecret-word", ssl_password="another-5ecret-word")
    names = [pool.topics.named(name) for name in ("workers", "status", "results", "chunks")]
    admin = KafkaSettings(bootstrap_servers=guarded.admin)
    async with TopicReader(kafka=admin, topics=names) as tail:
        said = [record.value or b"" for record in [record async for record in tail.backlog()]]
    assert any(json.loads(value).get("worker") == pool.worker.worker_id for value in said if value)
    printed = capsys.readouterr()
    everything = [*map(bytes.decode, said), printed.out, printed.err, caplog.text, repr(given), given.model_dump_json()]
    assert not [text for text in everything if "5ecret" in text]
