"""What the core hears of a call that failed in a worker, and what is logged there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from service.engine.worker import calls


@pytest.mark.parametrize(
    ("contexts", "heard", "logged"),
    [
        (SimpleNamespace(by_key={}), "KeyError: 7", True),
        (SimpleNamespace(), "AttributeError: ", True),
        (SimpleNamespace(awake=lambda _: Path("/no/such/file").stat()), "FileNotFoundError: ", False),
    ],
)
def test_a_mistake_is_logged_with_where_it_was_made_and_a_failure_is_only_told(
    contexts: Any, heard: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if "KeyError" in heard:
        contexts.awake = lambda key: contexts.by_key[key]
    answer = calls.awake(SimpleNamespace(gearshift=contexts), 7)
    assert isinstance(answer, calls.Failure)
    assert str(answer).startswith(heard)
    assert [record.getMessage() for record in caplog.records] == ["awake failed"] * logged
    assert all(record.exc_info is not None for record in caplog.records)
