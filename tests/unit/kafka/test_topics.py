"""Which topics a pool needs, and which existing ones won't do."""

from service.kafka.topics import Found, Topic, create_command, keeps_producers_time, objections, plan
from service.settings import KafkaSettings, TopicSettings


def planned(**given):
    return {topic.name: topic for topic in plan(TopicSettings(**given), ["qwen"])}


def test_every_topic_is_planned_and_one_for_each_alias():
    assert set(planned(topic_prefix="p.")) == {
        f"p.{name}"
        for name in (
            "requests", "requests.qwen", "results", "chunks", "control", "control.commands", "status", "workers",
            "dead-letters", "ledgers", "progress", "calls", "answers", "files", "batches", "usage",
            "throttled",
        )
    }  # fmt: skip


def test_state_is_compacted_in_one_partition():
    topics = planned()
    for name in ("control", "workers", "ledgers", "progress"):
        assert (topics[name].compacted, topics[name].partitions, topics[name].single) == (True, 1, True)


def test_durable_calls_and_their_answers_are_kept_as_long_as_is_set():
    topics = planned(calls_retention_s=3600)
    for name in ("calls", "answers"):
        assert topics[name].configs["retention.ms"] == "3600000"
        assert topics[name].configs["segment.ms"] == "1800000"
        assert not topics[name].compacted


def test_what_carries_bodies_takes_records_of_the_configured_size():
    topics = planned(max_message_bytes=5_000_000)
    for name in ("requests", "requests.qwen", "results", "dead-letters", "progress", "calls", "answers", "throttled"):
        assert topics[name].configs["max.message.bytes"] == "5000000"


def test_partitions_follow_the_settings():
    topics = planned(request_partitions=3, result_partitions=5)
    assert (topics["requests"].partitions, topics["results"].partitions) == (3, 5)


def test_a_reply_topic_that_is_named_is_made_for_many_clients():
    topics = planned(reply_topics="replies,mine-*,results", reply_partitions=48)
    assert topics["replies"].partitions == 48
    assert topics["replies"].configs["retention.ms"] == "86400000"
    assert "mine-*" not in topics
    assert topics["results"].partitions == 12


def test_an_existing_topic_with_more_partitions_or_other_sizes_is_taken_as_it_is():
    assert objections(planned()["requests"], Found(96, {"max.message.bytes": "1000"})) == ()


def test_state_that_retention_would_delete_and_an_order_that_is_not_global_are_objected_to():
    control = planned()["control"]
    assert objections(control, Found(1, {"cleanup.policy": "compact,delete"})) == ()
    assert "must be compacted" in objections(control, Found(1, {"cleanup.policy": "delete"}))[0]
    assert "has 3 partitions" in objections(control, Found(3, {"cleanup.policy": "compact"}))[0]


def test_what_may_not_be_read_is_not_objected_to():
    assert objections(planned()["workers"], Found(1)) == ()


def test_the_command_to_create_a_topic_says_all_that_we_would():
    topic = Topic("control", configs={"cleanup.policy": "compact"})
    command = create_command(topic, KafkaSettings(bootstrap_servers="b:1"), TopicSettings(replication_factor=3))
    assert command == (
        "kafka-topics.sh --bootstrap-server b:1 --create --topic control --partitions 1 --replication-factor 3 "
        "--config cleanup.policy=compact"
    )


def test_requests_and_control_events_have_the_time_of_the_broker_and_not_of_their_producers():
    topics = planned()
    for name in ("requests", "requests.qwen", "control", "control.commands", "calls"):
        assert topics[name].configs["message.timestamp.type"] == "LogAppendTime"
        assert keeps_producers_time(topics[name], Found(1, {"message.timestamp.type": "CreateTime"}))
        assert not keeps_producers_time(topics[name], Found(1, topics[name].configs))
        assert not keeps_producers_time(topics[name], Found(1)), "what may not be read is not complained of"
    assert not keeps_producers_time(topics["results"], Found(1, {"message.timestamp.type": "CreateTime"}))
