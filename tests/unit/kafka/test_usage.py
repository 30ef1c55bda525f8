"""Sums over what results have cost, and how the command asks for them."""

import io

import pytest

from schemas.base import Origin
from schemas.results import Outcome
from schemas.usage import Usage
from service.cli.options import Terminal
from service.cli.usage import groups_of, moment_of, table_of
from service.errors import ConfigError
from service.kafka.usage import Sums


def usage(tenant: str, model: str | None, prompt: int, generated: int) -> Usage:
    return Usage(
        id="r",
        origin=Origin(topic="requests", partition=0, offset=0),
        at=1.0,
        outcome=Outcome.COMPLETED,
        tenant=tenant,
        model=model,
        prompt_tokens=prompt,
        generated_tokens=generated,
        running_s=0.5,
    )


def test_each_group_has_its_sums_in_order():
    sums = Sums(("model", "tenant"))
    for one in (usage("b", "qwen", 1, 2), usage("a", "qwen", 3, 4), usage("b", "qwen", 5, 6), usage("b", None, 7, 8)):
        sums.add(one)
    shown = [
        (row["model"], row["tenant"], row["results"], row["prompt_tokens"], row["generated_tokens"], row["running_s"])
        for row in sums.rows()
    ]
    assert shown == [("", "b", 1, 7, 8, 0.5), ("qwen", "a", 1, 3, 4, 0.5), ("qwen", "b", 2, 6, 8, 1.0)]


def test_without_groups_there_is_one_sum():
    sums = Sums(())
    for one in (usage("a", "qwen", 1, 2), usage("b", "llama", 3, 4)):
        sums.add(one)
    (row,) = sums.rows()
    assert (row["results"], row["prompt_tokens"]) == (2, 4)


def test_spans_and_moments_are_told_apart():
    assert [moment_of(text, now=1000.0) for text in (None, "30s", "10m", "0d")] == [None, 970.0, 400.0, 1000.0]
    assert moment_of("1970-01-01T00:01:00+00:00", now=0.0) == moment_of("1970-01-01T00:01:00", now=0.0) == 60.0


@pytest.mark.parametrize("text", ["yesterday", "7w", "-1d", "", "1" * 10 + "d"])
def test_what_is_no_moment_is_refused_by_name(text: str):
    with pytest.raises(ConfigError, match="--since"):
        moment_of(text, now=0.0)


def test_an_unknown_group_is_refused_with_those_that_there_are():
    assert groups_of("tenant, model,tenant") == ("tenant", "model")
    with pytest.raises(ConfigError, match=r"unknown group 'tenat' .did you mean 'tenant'.*worker"):
        groups_of("model,tenat")


def test_a_narrow_table_has_every_number_whole_and_every_name_to_its_end():
    sums = Sums(("tenant", "model"))
    sums.add(usage("[/bold] is a tenant's name", None, 1, 1))
    sums.add(usage("a-department-of-theirs", "llama-3.1-8b-instruct", 12_345_678, 23_456_789))
    Terminal(width=80, file=(file := io.StringIO())).print(table_of(("tenant", "model"), sums))
    text = file.getvalue()
    assert {"12345678", "23456789", "generated"} <= set(text.split())
    assert "[/bold]" in text
    assert "…" not in text
