"""What README.md says is current."""

import re
import shlex
from pathlib import Path

import pytest

from deploy.local.configuration import with_table
from schemas.base import Record
from schemas.codec import decode_request
from schemas.control import Switch, parse_control
from schemas.requests import Request

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def test_the_table_of_settings_is_that_of_the_code() -> None:
    assert with_table(README) == README


@pytest.mark.parametrize("command", sorted(set(re.findall(r"deploy/local/[a-z]+", README))))
def test_the_commands_it_names_are_there(command: str) -> None:
    assert (ROOT / command).is_file()


def piped_to(topic: str) -> list[bytes]:
    """The values that README's kcat examples write to a topic."""
    found = re.findall(rf"echo (.*?) \|[ \\\n]*kcat .*? -P -t {re.escape(topic)}(?!\S)", README)
    return [shlex.split(quoted)[0].encode() for quoted in found]


def test_its_requests_decode() -> None:
    values = piped_to("requests")
    assert values
    for value in values:
        record = Record(topic="requests", partition=0, offset=0, timestamp=0.0, key=None, value=value)
        assert isinstance(decode_request(record, max_bytes=1 << 20), Request)


def test_its_switches_decode() -> None:
    import json

    values = piped_to("control")
    assert values
    assert all(isinstance(parse_control(json.loads(value)), Switch) for value in values)
