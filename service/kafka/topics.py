"""The topics that must be there: which, how they are made, and whether those that exist will do."""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, TopicAlreadyExistsError, for_code

from service.errors import BrokerUnavailable, TopicError
from service.kafka.connection import client_options, close_client, start
from service.kafka.reader import partitions_of
from service.settings import KafkaSettings, Settings, TopicSettings

log = structlog.get_logger(__name__)

_MINUTE_MS = 60 * 1000
_DAY_MS = 24 * 60 * _MINUTE_MS
_COMPACTED = {"cleanup.policy": "compact", "segment.ms": str(_DAY_MS), "min.cleanable.dirty.ratio": "0.1"}
_TEXT = {
    "cleanup.policy": "compact,delete",
    "segment.bytes": str(16 << 20),
    "segment.ms": str(10 * _MINUTE_MS),
    "min.cleanable.dirty.ratio": "0.1",
    "delete.retention.ms": str(10 * _MINUTE_MS),
    "retention.ms": str(_DAY_MS),
}
"""Of what answers have said so far: whoever takes a partition over reads it all, and it is to go with the results."""
_TIMESTAMPS = "message.timestamp.type"
_BROKERS_TIME = {_TIMESTAMPS: "LogAppendTime"}
"""A request's time to live counts from when the broker had it, whatever its producer's clock says."""
_VISIBLE_WITHIN_S = 15.0
_NAME = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it should be. ``single``: its order is global, so it has one partition and no more."""

    name: str
    partitions: int = 1
    configs: Mapping[str, str] = field(default_factory=dict)
    single: bool = False

    @property
    def compacted(self) -> bool:
        return "compact" in self.configs.get("cleanup.policy", "")


@dataclass(frozen=True, slots=True)
class Found:
    """A topic as the broker has it; ``configs`` is empty where we may not read them."""

    partitions: int
    configs: Mapping[str, str] = field(default_factory=dict)


def plan(topics: TopicSettings, aliases: Iterable[str]) -> tuple[Topic, ...]:
    """The topics of a pool that serves ``aliases``, in an order fit for reading."""
    size = {"max.message.bytes": str(topics.max_message_bytes)}
    replies = [name for name in topics.reply_topics if not name.endswith("*") and name != topics.named(topics.results)]
    requests = topics.named(topics.requests)
    return (
        Topic(requests, topics.request_partitions, size | _BROKERS_TIME),
        *(Topic(topics.for_alias(alias), topics.request_partitions, size | _BROKERS_TIME) for alias in aliases),
        Topic(topics.named(topics.throttled), topics.request_partitions, size | _BROKERS_TIME),
        Topic(topics.named(topics.results), topics.result_partitions, size),
        Topic(topics.named(topics.chunks), topics.result_partitions, {"retention.ms": str(_DAY_MS)}),
        *(_reply_topic(topics, name) for name in replies),
        Topic(topics.named(topics.control), configs=_COMPACTED | _BROKERS_TIME, single=True),
        Topic(topics.named(topics.commands), configs={"retention.ms": str(_DAY_MS)} | _BROKERS_TIME, single=True),
        Topic(topics.named(topics.status)),
        Topic(topics.named(topics.workers), configs=_COMPACTED, single=True),
        Topic(topics.named(topics.ledgers), configs=_COMPACTED, single=True),
        Topic(topics.named(topics.progress), configs=size | _TEXT, single=True),
        Topic(topics.named(topics.calls), topics.request_partitions, size | _kept(topics) | _BROKERS_TIME),
        Topic(topics.named(topics.answers), topics.result_partitions, size | _kept(topics)),
        Topic(topics.named(topics.files), topics.result_partitions, size | _deletable(topics)),
        Topic(topics.named(topics.batches), configs=_deletable(topics), single=True),
        Topic(
            topics.named(topics.usage),
            topics.result_partitions,
            {"retention.ms": str(round(topics.usage_retention_s * 1000))},
        ),
        Topic(topics.named(topics.dead_letters), configs={**size, "retention.ms": str(30 * _DAY_MS)}),
    )


def _kept(topics: TopicSettings) -> dict[str, str]:
    """Kafka deletes a segment when the youngest record in it is old enough: one spans half of that time."""
    half = str(round(topics.calls_retention_s * 500))
    return {"retention.ms": str(round(topics.calls_retention_s * 1000)), "segment.ms": half}


def _deletable(topics: TopicSettings) -> dict[str, str]:
    """Compacted, so that what is deleted goes, and kept no longer than is set."""
    within, kept = round(topics.files_deleted_within_s * 1000), round(topics.files_retention_s * 1000)
    segment = round(topics.segment_of_files_s * 1000)
    return {
        "cleanup.policy": "compact,delete",
        "retention.ms": str(kept),
        "segment.ms": str(segment),
        "max.compaction.lag.ms": str(within),
        "min.cleanable.dirty.ratio": "0.01",
    }


def _reply_topic(topics: TopicSettings, name: str) -> Topic:
    """A topic that clients share; nobody needs for longer than a day what is in it."""
    configs = {"max.message.bytes": str(topics.max_message_bytes), "retention.ms": str(_DAY_MS)}
    return Topic(name, topics.reply_partitions, configs)


def refused_names(topics: Iterable[Topic]) -> tuple[str, ...]:
    """Those that Kafka allows no topic to have."""
    return tuple(topic.name for topic in topics if not _NAME.fullmatch(topic.name))


def objections(topic: Topic, found: Found) -> tuple[str, ...]:
    """What makes an existing topic unfit: an order that is not global, or state that retention would delete."""
    wrong = []
    if topic.single and found.partitions != 1:
        wrong.append(f"{topic.name} has {found.partitions} partitions and must have 1: delete it and create it again")
    policy = found.configs.get("cleanup.policy")
    if topic.compacted and policy is not None and "compact" not in policy:
        wrong.append(f"{topic.name} has cleanup.policy={policy} and must be compacted")
    return tuple(wrong)


def keeps_producers_time(topic: Topic, found: Found) -> bool:
    """Whether its records have their producers' timestamps, where they should have the broker's."""
    return _TIMESTAMPS in topic.configs and found.configs.get(_TIMESTAMPS) == "CreateTime"


async def ensure_topics(settings: Settings, aliases: Collection[str]) -> tuple[str, ...]:
    """Create what is missing, where settings allow it, and check what exists. Gives the names of those created.

    Raises TopicError with the command that puts it right, BrokerUnavailable.
    """
    return await _ensure(settings, plan(settings.topics, aliases))


async def ensure_reply_topic(settings: Settings, name: str) -> tuple[str, ...]:
    """The same for a topic of clients' results and chunks. Raises what ``ensure_topics`` raises."""
    return await _ensure(settings, (_reply_topic(settings.topics, name),))


async def request_topics(settings: Settings) -> tuple[str, ...]:
    """The topics with requests that exist: the shared one, and those of single models. Raises BrokerUnavailable."""
    admin = AIOKafkaAdminClient(**client_options(settings.kafka))
    shared = settings.topics.named(settings.topics.requests)
    try:
        await start(admin)
        there = await _existing(admin)
    except (KafkaError, OSError, TimeoutError) as error:
        raise BrokerUnavailable(f"topics: the broker does not answer: {error}") from error
    finally:
        await close_client(admin.close())
    return (shared, *sorted(name for name in there if settings.topics.alias_of(name) is not None))


async def _ensure(settings: Settings, wanted: Sequence[Topic]) -> tuple[str, ...]:
    admin = AIOKafkaAdminClient(**client_options(settings.kafka))
    try:
        await start(admin)
        there = await _existing(admin)
        missing = [topic for topic in wanted if topic.name not in there]
        if missing and not settings.topics.create_topics:
            raise TopicError(_instructions(missing, settings, "are missing, and create_topics is off"))
        created = await _create(admin, missing, settings) if missing else ()
        if missing:
            there = await partitions_of(settings.kafka, [topic.name for topic in wanted], within_s=_VISIBLE_WITHIN_S)
        await _check(admin, wanted, there, settings)
    except (KafkaError, OSError, TimeoutError) as error:
        raise BrokerUnavailable(f"topics: the broker does not answer: {error}") from error
    finally:
        await close_client(admin.close())
    return created


async def _existing(admin: AIOKafkaAdminClient) -> dict[str, int]:
    """Partitions by topic. Asked without names: asking for a missing topic makes some brokers create it."""
    return {
        topic["topic"]: len(topic["partitions"]) for topic in await admin.describe_topics() if topic["error_code"] == 0
    }


async def _create(admin: AIOKafkaAdminClient, missing: list[Topic], settings: Settings) -> tuple[str, ...]:
    factor = settings.topics.replication_factor
    # aiokafka takes -1, the broker's default, only beside assignments, be they empty.
    assignments: dict[int, list[int]] | None = {} if factor == -1 else None
    response = await admin.create_topics(
        [NewTopic(topic.name, topic.partitions, factor, assignments, dict(topic.configs)) for topic in missing]
    )
    created = []
    for name, code, *message in response.topic_errors:
        if code == 0:
            created.append(name)
        elif code != TopicAlreadyExistsError.errno:
            reason = next(filter(None, message), None) or for_code(code).__name__
            left = [topic for topic in missing if topic.name == name]
            raise TopicError(_instructions(left, settings, f"can't be created: {reason}"))
    return tuple(created)


async def _check(
    admin: AIOKafkaAdminClient, wanted: Iterable[Topic], there: Mapping[str, int], settings: Settings
) -> None:
    configs = await configs_of(admin, [topic.name for topic in wanted])
    wrong: list[str] = []
    for topic in wanted:
        found = Found(there[topic.name], configs.get(topic.name, {}))
        wrong += objections(topic, found)
        size, needed = found.configs.get("max.message.bytes"), topic.configs.get("max.message.bytes")
        if size and needed and int(size) < int(needed):
            log.warning("topic.takes_less", topic=topic.name, takes=size, wanted=needed)
        if keeps_producers_time(topic, found):
            _say_whose_time(topic, settings.kafka)
    if wrong:
        fix = f"To compact a topic: {_alter(settings.kafka, 'NAME')} cleanup.policy=compact"
        raise TopicError("\n".join([*wrong, fix]))


def _say_whose_time(topic: Topic, kafka: KafkaSettings) -> None:
    """What a worker does with such a topic: it goes on, by its producers' clocks as far as these can be believed.

    A timestamp that lies ahead is taken for the moment of reading (``records.moment_of``); one that lies behind
    can't be told from a record that has waited.
    """
    log.error(
        "topic.keeps_producers_time",
        topic=topic.name,
        effect="times to live count by the producers' clocks: a request of one that is slow expires early",
        mend=f"{_alter(kafka, topic.name)} {_TIMESTAMPS}=LogAppendTime",
    )


def _alter(kafka: KafkaSettings, name: str) -> str:
    words = ["kafka-configs.sh", "--bootstrap-server", kafka.bootstrap_servers, "--alter"]
    return shlex.join([*words, "--entity-type", "topics", "--entity-name", name, "--add-config"])


async def configs_of(admin: AIOKafkaAdminClient, names: list[str]) -> dict[str, dict[str, str]]:
    """The configuration of topics by name; those that we may not read are left out."""
    responses = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names])
    found: dict[str, dict[str, str]] = {}
    for response in responses:
        for code, _message, _kind, name, entries in response.resources:
            if code == 0:
                found[name] = {entry[0]: entry[1] for entry in entries}
    return found


def _instructions(missing: Iterable[Topic], settings: Settings, why: str) -> str:
    """What to type where we may not create topics ourselves."""
    names = ", ".join(topic.name for topic in missing)
    commands = (create_command(topic, settings.kafka, settings.topics) for topic in missing)
    return "\n  ".join([f"topics {names} {why}. Create them with:", *commands])


def create_command(topic: Topic, kafka: KafkaSettings, topics: TopicSettings) -> str:
    """The command of Kafka's own tools that creates a topic."""
    words: list[Any] = ["kafka-topics.sh", "--bootstrap-server", kafka.bootstrap_servers, "--create", "--topic"]
    words += [topic.name, "--partitions", topic.partitions]
    if topics.replication_factor > 0:
        words += ["--replication-factor", topics.replication_factor]
    words += [word for key, value in topic.configs.items() for word in ("--config", f"{key}={value}")]
    return shlex.join(map(str, words))
