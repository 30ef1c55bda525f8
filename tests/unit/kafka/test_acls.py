"""What each role may do on the broker: pure, and told as commands."""

import shlex
from fnmatch import fnmatch

import pytest
from typer.testing import CliRunner

from schemas.base import Record
from service.cli.main import app
from service.errors import ConfigError
from service.kafka.acls import Acl, Resource, Role, acls, commands
from service.kafka.dead_letters import read_dead_letter, redriven, where_asked
from service.kafka.topics import plan
from service.settings import Settings, load


def settings(**given: object) -> Settings:
    return load(topic_prefix="team-", group_id="pool", **given)


def allowed(role: Role, operation: str, made: Settings) -> set[str]:
    """The topics on which a role may do something; a prefix ends in *."""
    found = [acl for acl in acls(made, role) if acl.resource is Resource.TOPIC and operation in acl.operations]
    return {acl.name + "*" * acl.prefixed for acl in found}


def test_a_producer_writes_requests_and_nothing_else():
    assert allowed(Role.PRODUCER, "Write", settings()) == {"team-requests", "team-requests.*"}
    assert not [acl for acl in acls(settings(), Role.PRODUCER) if acl.resource is not Resource.TOPIC]


def test_what_is_asked_only_workers_and_operators_can_read():
    requests = {"team-requests", "team-requests.*"}
    readers = {role: allowed(role, "Read", settings()) & requests for role in Role}
    assert readers == {
        Role.WORKER: requests,
        Role.PRODUCER: set(),
        Role.CONSUMER: set(),
        Role.BATCH: set(),
        Role.OPERATOR: requests,
        Role.VIEWER: set(),
    }


def test_who_reads_answers_or_looks_writes_nothing():
    made = settings(reply_topics="mine")
    for role in (Role.CONSUMER, Role.VIEWER):
        assert not allowed(role, "Write", made)
    assert allowed(Role.CONSUMER, "Read", made) == {"team-results", "team-chunks", "mine"}
    assert allowed(Role.VIEWER, "Read", made) == {"team-status", "team-workers", "team-usage"}


def test_who_asks_batches_has_files_and_batches_and_nothing_else():
    for operation in ("Read", "Write"):
        assert allowed(Role.BATCH, operation, settings(reply_topics="mine")) == {"team-files", "team-batches"}


def test_who_looks_can_measure_the_group_s_lag():
    assert {"team-requests", "team-requests.*", "team-throttled"} <= allowed(Role.VIEWER, "Describe", settings())
    assert Acl(Resource.GROUP, "pool", ("Describe",)) in acls(settings(), Role.VIEWER)


def test_no_producer_writes_or_reads_what_others_asked_durably():
    durable = {"team-calls", "team-answers", "team-files", "team-batches", "team-throttled"}
    assert not any(durable & allowed(Role.PRODUCER, operation, settings()) for operation in ("Read", "Write"))
    assert durable <= allowed(Role.WORKER, "Read", settings()) & allowed(Role.WORKER, "Write", settings())


def test_only_an_operator_and_a_worker_write_control_events():
    control = {"team-control", "team-control.commands"}
    may = {role for role in Role if control <= allowed(role, "Write", settings())}
    assert may == {Role.OPERATOR, Role.WORKER}


@pytest.mark.parametrize("topic", ["requests", "requests.llama", "calls", "throttled"])
def test_an_operator_asks_dead_letters_again_wherever_they_were_read(topic: str):
    made = settings()
    written = allowed(Role.OPERATOR, "Write", made)
    record = Record("team-dead-letters", 0, 0, 1.0, b"a", b"{}", [("dl-origin", f"team-{topic}/0/3".encode())])
    where = redriven(where_asked(read_dead_letter(record), made.topics), "b").topic
    assert any(fnmatch(where, name) for name in written)
    assert "team-dead-letters" in written & allowed(Role.OPERATOR, "Read", made)


def test_an_operator_sets_the_offsets_of_every_topic_of_requests():
    """The broker takes an offset only of who may read the topic."""
    requests = {"team-requests", "team-requests.*", "team-calls", "team-throttled"}
    assert requests <= allowed(Role.OPERATOR, "Read", settings()) & allowed(Role.OPERATOR, "Describe", settings())


def test_a_worker_may_use_every_topic_of_its_plan_and_create_those_that_it_makes():
    made = settings()
    topics = {topic.name for topic in plan(made.topics, ["llama"])}
    described = allowed(Role.WORKER, "Describe", made)
    assert {name for name in topics if name not in described} == {"team-requests.llama"}
    assert "team-requests.*" in described
    assert allowed(Role.WORKER, "Create", made) == described
    assert allowed(Role.WORKER, "Create", settings(create_topics=False)) == set()


def test_a_worker_fences_and_commits_under_its_group_s_name():
    found = {acl.resource: acl for acl in acls(settings(), Role.WORKER) if acl.resource is not Resource.TOPIC}
    assert found[Resource.GROUP].name == "pool"
    assert found[Resource.TRANSACTIONAL_ID] == Acl(
        Resource.TRANSACTIONAL_ID, "pool/", ("Write", "Describe"), prefixed=True
    )


def test_reply_topics_are_a_worker_s_to_write_and_to_ask_for_their_rules():
    for operation in ("Write", "DescribeConfigs"):
        assert {"mine", "replies-*"} <= allowed(Role.WORKER, operation, settings(reply_topics="mine,replies-*"))


def test_reply_topics_that_are_named_are_made_by_workers_and_all_are_read_by_producers():
    made = settings(reply_topics="mine,replies-*")
    assert "mine" in {topic.name for topic in plan(made.topics, [])}
    assert {"mine", "replies-*"} & allowed(Role.WORKER, "Create", made) == {"mine"}
    assert {"mine", "replies-*"} <= allowed(Role.PRODUCER, "Read", made)
    assert {"mine", "replies-*"} & allowed(Role.PRODUCER, "Write", made) == set()


def test_each_acl_is_a_line_for_kafka_s_own_tool():
    lines = commands(settings(), [(Role.PRODUCER, "User:app")])
    assert lines[1] == (
        "kafka-acls.sh --bootstrap-server BROKER --add --allow-principal User:app --operation Write "
        "--operation Describe --topic team-requests. --resource-pattern-type prefixed"
    )
    asked = ["topics", "acls", "--producer", "User:app", "--topic-prefix", "team-", "--set", "group_id=pool"]
    assert CliRunner().invoke(app, asked).stdout.splitlines() == lines
    assert isinstance(CliRunner().invoke(app, asked[:2]).exception, ConfigError)


def test_a_principal_is_one_word_of_the_line_whatever_is_in_it():
    principal = "User:CN=Jane Doe,O=A&B;$(id)"
    for line in commands(settings(), [(Role.PRODUCER, principal)]):
        if not line.startswith("#"):
            words = shlex.split(line)
            assert words[words.index("--allow-principal") + 1] == principal


def test_a_worker_reads_what_results_have_cost_only_where_it_has_quotas(tmp_path):
    assert "team-usage" not in allowed(Role.WORKER, "Read", settings())
    assert "team-usage" in allowed(Role.WORKER, "Read", settings(quotas_file=tmp_path / "quotas.yaml"))
    assert "team-usage" in allowed(Role.WORKER, "Write", settings())
