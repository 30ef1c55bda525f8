"""Settings come from the command line, then the environment, then the defaults; misspelt ones are errors."""

import re
from pathlib import Path

import pytest

from service import settings
from service.errors import ConfigError
from service.settings import Inactive, TopicSettings


def test_the_command_line_wins_over_the_environment_and_that_over_the_default(monkeypatch):
    monkeypatch.setenv("GEARSHIFT_GROUP_ID", "from-environment")
    monkeypatch.setenv("GEARSHIFT_INACTIVE", "park")
    loaded = settings.load(group_id="from-command-line", max_running=None)
    assert loaded.worker.group_id == "from-command-line"
    assert loaded.worker.inactive is Inactive.PARK
    assert loaded.worker.max_running == 256


@pytest.mark.parametrize("name", ["KAFKA_BOOTSTRAP_SERVERS", "GEARSHIFT_BOOTSTRAP_SERVERS"])
def test_the_brokers_usual_variable_is_understood(monkeypatch, name):
    monkeypatch.delenv("KAFKA_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.setenv(name, "broker:1")
    assert settings.load().kafka.bootstrap_servers == "broker:1"


def test_a_misspelt_variable_is_an_error_that_names_the_right_one(monkeypatch):
    monkeypatch.setenv("GEARSHIFT_GRUOP_ID", "x")
    with pytest.raises(ConfigError, match=r"GEARSHIFT_GRUOP_ID.*'group_id'"):
        settings.load()


def test_what_chooses_the_environment_is_no_setting(monkeypatch):
    script = (Path(__file__).parents[2] / "deploy/local/environment.sh").read_text()
    asked = set(re.findall(r"GEARSHIFT_[A-Z]+", script))
    assert "GEARSHIFT_PYTHON" in asked
    for name in asked:
        monkeypatch.setenv(name, "3.11")
    assert settings.load()


def test_a_misspelt_option_is_an_error_that_names_the_right_one():
    with pytest.raises(ConfigError, match=r"max_runing.*'max_running'"):
        settings.load(max_runing=3)


def test_wrong_values_are_named_but_secrets_are_not_shown(monkeypatch):
    with pytest.raises(ConfigError, match="max_running") as caught:
        settings.load(max_running="lots")
    assert "'lots'" in str(caught.value)
    monkeypatch.setenv("GEARSHIFT_SASL_PASSWORD", "hunter2")
    assert "hunter2" not in repr(settings.load())


@pytest.mark.parametrize(
    "name",
    [
        *("calls_retention_s", "files_retention_s", "files_deleted_within_s", "usage_retention_s"),
        *("request_timeout_s", "session_timeout_s", "rebalance_timeout_s"),
    ],
)
def test_what_kafka_counts_in_milliseconds_ends_some_time(name):
    for endless in ("inf", "nan"):
        with pytest.raises(ConfigError, match=name):
            settings.load(**{name: endless})


def test_several_reply_topics_are_separated_by_commas_and_may_be_prefixes(monkeypatch):
    monkeypatch.setenv("GEARSHIFT_REPLY_TOPICS", "mine, team-*")
    topics = settings.load().topics
    assert topics.allows_reply("mine")
    assert topics.allows_reply("team-a")
    assert topics.allows_reply("results")
    assert not topics.allows_reply("requests")


@pytest.mark.parametrize("prefix", ["", "p-"])
def test_the_pools_own_topics_are_never_reply_topics_whatever_is_allowed(prefix: str):
    topics = TopicSettings(topic_prefix=prefix, reply_topics=("*",))
    own = (
        "requests",
        "requests.qwen",
        "requests.",
        "control",
        "control.commands",
        "workers",
        "ledgers",
        "status",
        "calls",
        "files",
        "batches",
        "usage",
        "throttled",
    )
    for name in (*own, "dead-letters", "chunks", "progress"):
        assert not topics.allows_reply(f"{prefix}{name}"), name
    assert not topics.allows_reply("__consumer_offsets")
    for name in ("results", "mine", "requests-of-mine", "control-room"):
        assert topics.allows_reply(f"{prefix}{name}"), name


def test_a_prefix_names_every_topic():
    topics = TopicSettings(topic_prefix="blue.")
    assert topics.named(topics.results) == "blue.results"
    assert topics.for_alias("qwen") == "blue.requests.qwen"


def test_without_the_prefix_only_what_other_programs_promise_counts():
    choices = (
        choice
        for group in settings.GROUPS.values()
        for name, field in group.model_fields.items()
        for choice in getattr(field.validation_alias, "choices", ())
        if choice != name and not choice.startswith("GEARSHIFT_")
    )
    gaudis = {"VLLM_HPU_MULTI_MODEL_CONFIG", "MODEL", "QUANT_CONFIG", "VLLM_SERVER_DEV_MODE"}
    assert set(choices) == {"KAFKA_BOOTSTRAP_SERVERS", *gaudis}


@pytest.mark.parametrize("variable", ["DEV_MODE", "dev_mode", "BOOTSTRAP_SERVERS", "MODELS", "DEFAULT_MODEL"])
def test_a_variable_without_the_prefix_is_somebody_elses(monkeypatch, variable):
    for known in ("KAFKA_BOOTSTRAP_SERVERS", "VLLM_HPU_MULTI_MODEL_CONFIG", "VLLM_SERVER_DEV_MODE", "MODEL"):
        monkeypatch.delenv(known, raising=False)
    plain = settings.load()
    monkeypatch.setenv(variable, "1")
    loaded = settings.load()
    for group in ("kafka", "engine", "http"):
        assert getattr(loaded, group) == getattr(plain, group)


@pytest.mark.parametrize(
    ("variable", "setting", "value"),
    [
        ("KAFKA_BOOTSTRAP_SERVERS", "bootstrap_servers", "other:1"),
        ("GEARSHIFT_BOOTSTRAP_SERVERS", "bootstrap_servers", "other:1"),
        ("VLLM_SERVER_DEV_MODE", "dev_mode", "true"),
        ("GEARSHIFT_DEV_MODE", "dev_mode", "true"),
    ],
)
def test_the_command_line_wins_over_each_name_that_a_setting_has(monkeypatch, variable, setting, value):
    monkeypatch.setenv(variable, value)
    loaded = settings.load(**{setting: "mine:1" if setting == "bootstrap_servers" else False})
    assert not loaded.http.dev_mode
    assert loaded.kafka.bootstrap_servers != "other:1"


def test_our_own_variable_wins_over_vllms(monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("GEARSHIFT_DEV_MODE", "false")
    assert not settings.load().http.dev_mode
