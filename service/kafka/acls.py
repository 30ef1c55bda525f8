"""Who may do what on the broker: the least that a worker, a producer and an operator need, as Kafka's ACLs."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from service.settings import Settings


class Role(StrEnum):
    """Who asks the broker."""

    WORKER = "worker"
    """Reads requests and control events, writes everything else."""
    PRODUCER = "producer"
    """Asks and reads answers. It can't say what workers are to do, nor cancel: a deadline ends its requests."""
    OPERATOR = "operator"
    """Says what workers are to do, reads what they say, looks at dead letters and asks them again."""


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
        words = ["kafka-acls.sh --bootstrap-server BROKER --add", f"--allow-principal {principal}"]
        words += [f"--operation {operation}" for operation in self.operations]
        words += [f"--{self.resource} {self.name}"]
        return " ".join(words + ["--resource-pattern-type prefixed"] * self.prefixed)


_READ = ("Read", "Describe")
_WRITE = ("Write", "Describe")
_BOTH = ("Read", "Write", "Describe")


def acls(settings: Settings, role: Role) -> tuple[Acl, ...]:
    """What a role needs, for these topics and this group. Pure."""
    topics = settings.topics
    own_topics = topics.for_alias("")

    def topic(name: str, *operations: str) -> Acl:
        return Acl(Resource.TOPIC, topics.named(name), operations)

    if role is Role.WORKER:
        group = settings.worker.group_id
        making = ("Create", "DescribeConfigs") if topics.create_topics else ("DescribeConfigs",)
        return (
            topic(topics.requests, *_READ, *making),
            Acl(Resource.TOPIC, own_topics, (*_BOTH, *making), prefixed=True),
            *(
                topic(name, *_BOTH, *making)
                for name in (topics.control, topics.commands, topics.workers, topics.ledgers)
            ),
            *(
                topic(name, *_WRITE, *making)
                for name in (topics.results, topics.chunks, topics.status, topics.dead_letters)
            ),
            *(_reply(name, *_WRITE, *(() if name.endswith("*") else making)) for name in topics.reply_topics),
            Acl(Resource.GROUP, group, _READ),
            Acl(Resource.TRANSACTIONAL_ID, f"{group}/", _WRITE, prefixed=True),
        )
    if role is Role.PRODUCER:
        return (
            topic(topics.requests, *_BOTH),
            Acl(Resource.TOPIC, own_topics, _BOTH, prefixed=True),
            *(topic(name, *_READ) for name in (topics.results, topics.chunks, topics.workers)),
            *(_reply(name, *_READ) for name in topics.reply_topics),
        )
    return (
        *(topic(name, *_BOTH) for name in (topics.control, topics.commands, topics.requests, topics.ledgers)),
        *(topic(name, *_READ) for name in (topics.status, topics.workers, topics.dead_letters)),
        Acl(Resource.GROUP, settings.worker.group_id, _READ),
        Acl(Resource.TRANSACTIONAL_ID, f"{settings.worker.group_id}/", _WRITE, prefixed=True),
    )


def commands(settings: Settings, principals: Iterable[tuple[Role, str]]) -> list[str]:
    """The lines that give each principal what its role needs."""
    return [acl.command(principal) for role, principal in principals for acl in acls(settings, role)]


def _reply(name: str, *operations: str) -> Acl:
    return Acl(Resource.TOPIC, name.removesuffix("*"), operations, prefixed=name.endswith("*"))
