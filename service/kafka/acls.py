"""Who may do what on the broker: the least that each role needs, as Kafka's ACLs."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from service.settings import Settings


class Role(StrEnum):
    """Who asks the broker."""

    WORKER = "worker"
    """Reads requests and control events, writes everything else."""
    PRODUCER = "producer"
    """Asks and reads answers. It can't say what workers are to do, nor cancel: a deadline ends its requests. What
    others ask it can't read."""
    CONSUMER = "consumer"
    """Reads answers that others asked for. With a consumer group of its own it needs Read on that, too."""
    BATCH = "batch"
    """Stores files and batches, which are asked in its name, and fetches everybody's."""
    OPERATOR = "operator"
    """Says what workers are to do, reads what they say, looks at dead letters and asks them again, and sets the offsets
    of a stopped pool."""
    VIEWER = "viewer"
    """Sees who is there, what they did, what it cost and how far the group is, and no prompt and no answer."""


class Resource(StrEnum):
    """What an ACL is about, by the words of Kafka's tools."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"


@dataclass(frozen=True, slots=True)
class Acl:
    """Operations on one resource, or on all whose name begins so."""

    resource: Resource
    name: str
    operations: tuple[str, ...]
    prefixed: bool = False

    def command(self, principal: str) -> str:
        """As a line for Kafka's own tool."""
        words = ["kafka-acls.sh --bootstrap-server BROKER --add", f"--allow-principal {shlex.quote(principal)}"]
        words += [f"--operation {operation}" for operation in self.operations]
        words += [f"--{self.resource} {shlex.quote(self.name)}"]
        return " ".join(words + ["--resource-pattern-type prefixed"] * self.prefixed)


_READ = ("Read", "Describe")
_WRITE = ("Write", "Describe")
_BOTH = ("Read", "Write", "Describe")


def acls(settings: Settings, role: Role) -> tuple[Acl, ...]:
    """What a role needs, for these topics and this group. Pure."""
    topics, group = settings.topics, settings.worker.group_id

    def each(names: Iterable[str], *operations: str) -> tuple[Acl, ...]:
        return tuple(Acl(Resource.TOPIC, topics.named(name), operations) for name in names)

    def own_topics(*operations: str) -> Acl:
        return Acl(Resource.TOPIC, topics.for_alias(""), operations, prefixed=True)

    requests, replies = (topics.requests,), tuple(_reply(name, *_READ) for name in topics.reply_topics)
    transactions = Acl(Resource.TRANSACTIONAL_ID, f"{group}/", _WRITE, prefixed=True)
    match role:
        case Role.WORKER:
            making = ("Create", "DescribeConfigs") if topics.create_topics else ("DescribeConfigs",)
            kept = (topics.control, topics.commands, topics.workers, topics.ledgers, topics.progress)
            durable = (topics.throttled, topics.calls, topics.answers, topics.files, topics.batches)
            told = (topics.results, topics.chunks, topics.status, topics.dead_letters)
            counted = _WRITE if settings.worker.quotas_file is None else _BOTH
            return (
                *each(requests, *_READ, *making),
                own_topics(*_BOTH, *making),
                *each((*kept, *durable), *_BOTH, *making),
                *each(told, *_WRITE, *making),
                *each((topics.usage,), *counted, *making),
                *(
                    _reply(name, *_WRITE, *(("DescribeConfigs",) if name.endswith("*") else making))
                    for name in topics.reply_topics
                ),
                Acl(Resource.GROUP, group, _READ),
                transactions,
            )
        case Role.PRODUCER:
            answers = each((topics.results, topics.chunks, topics.workers), *_READ)
            return (*each(requests, *_WRITE), own_topics(*_WRITE), *answers, *replies)
        case Role.CONSUMER:
            return (*each((topics.results, topics.chunks), *_READ), *replies)
        case Role.BATCH:
            return each((topics.files, topics.batches), *_BOTH)
        case Role.OPERATOR:
            written = (topics.control, topics.commands, *requests, topics.calls, topics.ledgers, topics.dead_letters)
            read = (topics.status, topics.workers, topics.usage, topics.throttled)
            return (
                *each(written, *_BOTH),
                own_topics(*_BOTH),
                *each(read, *_READ),
                Acl(Resource.GROUP, group, _READ),
                transactions,
            )
        case Role.VIEWER:
            seen = (topics.status, topics.workers, topics.usage)
            lag = (
                *each((*requests, topics.throttled), "Describe"),
                own_topics("Describe"),
                Acl(Resource.GROUP, group, ("Describe",)),
            )
            return (*each(seen, *_READ), *lag)


def commands(settings: Settings, principals: Iterable[tuple[Role, str]]) -> list[str]:
    """The lines that give each principal what its role needs."""
    return [acl.command(principal) for role, principal in principals for acl in acls(settings, role)]


def _reply(name: str, *operations: str) -> Acl:
    return Acl(Resource.TOPIC, name.removesuffix("*"), operations, prefixed=name.endswith("*"))
