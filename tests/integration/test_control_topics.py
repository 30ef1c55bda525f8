"""Control events on the real broker: what a worker boots into, and what reaches it afterwards."""

import time
from collections.abc import AsyncIterator

import pytest
from aiokafka import AIOKafkaProducer

from schemas.base import Outgoing
from schemas.codec import tombstone
from schemas.control import Cancel, Pause, Query, Resume, Switch
from schemas.status import Presence
from service.kafka.announcements import Announcer
from service.kafka.control import ControlTopics, outgoing
from service.kafka.reader import TopicReader
from service.kafka.topics import ensure_topics
from service.ports import ControlRecord
from service.settings import Settings, read_keys
from tests.support.pool import delete_topics, settings_for

pytestmark = pytest.mark.broker


@pytest.fixture
async def settings(bootstrap: str, tmp_path) -> AsyncIterator[Settings]:
    made = settings_for(bootstrap)
    await ensure_topics(made, [])
    yield made
    await delete_topics(made)


async def publish(settings: Settings, *records: Outgoing) -> None:
    async with AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers) as producer:
        for record in records:
            await producer.send_and_wait(record.topic, record.value, record.key)


async def some(control: ControlTopics, count: int) -> list[ControlRecord]:
    found = []
    events = control.events()
    async for event in events:
        found.append(event)
        if len(found) == count:
            break
    await events.aclose()
    return found


async def test_a_worker_boots_into_what_was_asked_and_hears_what_comes_after(settings: Settings):
    async with Announcer(settings=settings) as announcer:
        for event in (Switch(model="a"), Pause(), Switch(model="b"), Resume(), Query(), Cancel(request="x")):
            await announcer.control(event)
        async with ControlTopics(settings=settings) as control:
            desired = await control.desired()
            assert [event.type for event in desired] == ["switch", "cancel"]
            assert desired[0].model == "b"
            await announcer.control(Query(request="later"))
            await announcer.control(Pause(target="another-pool"))
            await announcer.control(Pause(target=settings.worker.group_id))
            found = [record.event for record in await some(control, 2)]
    assert {event.type for event in found} == {"query", "pause"}
    assert all(event.target in {"*", settings.worker.group_id} for event in found)


async def test_a_command_between_opening_and_booting_is_not_lost_and_not_state(settings: Settings):
    async with Announcer(settings=settings) as announcer, ControlTopics(settings=settings) as control:
        await announcer.control(Query(request="early"))
        await announcer.control(Switch(model="a"))
        assert [event.type for event in await control.desired()] == ["switch"]
        (found,) = await some(control, 1)
    assert found.event.request == "early"


async def test_a_bare_switch_from_a_console_producer_and_nonsense_are_both_heard(settings: Settings):
    topic = settings.topics.named(settings.topics.control)
    async with ControlTopics(settings=settings) as control:
        assert await control.desired() == ()
        await publish(
            settings,
            Outgoing(topic, b"anything", b'{"model": "qwen"}'),
            Outgoing(topic, b"*/paused/*", None),
            Outgoing(topic, b"k", b"{nonsense"),
        )
        bare, nonsense = await some(control, 2)
    assert (bare.event.type, bare.event.model) == ("switch", "qwen")
    assert bare.event.id == str(bare.record.origin)
    assert nonsense.event is None
    assert nonsense.problem


async def test_where_a_key_is_set_only_signed_events_are_obeyed(settings: Settings, tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    signing = settings.model_copy(update={"worker": settings.worker.model_copy(update={"control_key_file": key})})
    async with ControlTopics(settings=signing) as control:
        await control.desired()
        async with Announcer(settings=settings) as unsigned, Announcer(settings=signing) as signed:
            await unsigned.control(Switch(model="a"))
            await signed.control(Switch(model="b"))
        pause = outgoing(Pause(), settings.topics, read_keys(key, "control_key_file"))
        erase = tombstone(pause.topic, "*/paused/*")
        async with AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers) as stranger:
            for record in (pause, pause, erase):
                await stranger.send_and_wait(record.topic, record.value, record.key, headers=list(record.headers))
        refused, obeyed, paused, replayed, erased = await some(control, 5)
    assert refused.event is None
    assert obeyed.event.model == "b"
    assert paused.event.type == "pause"
    assert "written before" in replayed.problem
    assert "signature" in erased.problem
    async with ControlTopics(settings=signing) as later:
        assert {event.type for event in await later.desired()} == {"pause", "switch"}


async def test_a_cancel_that_means_nothing_any_more_is_taken_back(settings: Settings):
    topic = settings.topics.named("control")
    async with Announcer(settings=settings, outdated=lambda: [tombstone(topic, "*/cancel/old")]) as announcer:
        for event in (Cancel(request="old"), Cancel(request="new")):
            await announcer.control(event)
        await announcer.presence(Presence(worker="w", pool="p", at=time.time(), interval_s=1))
    async with TopicReader(kafka=settings.kafka, topics=[settings.topics.named("control")]) as tail:
        last = {record.key: record.value async for record in tail.backlog()}
    assert {key for key, value in last.items() if value is None} == {b"*/cancel/old"}
    assert last[b"*/cancel/new"]
