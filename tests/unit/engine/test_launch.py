"""What the engine's processes inherit."""

import os

import pytest
import structlog

from service.engine.processes.launch import refuse_insecure_serialization

INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"


@pytest.mark.parametrize(("exported", "warnings"), [("1", 1), ("0", 0), (None, 0)])
def test_who_exported_insecure_serialization_is_told_once_that_it_is_off(
    monkeypatch: pytest.MonkeyPatch, exported: str | None, warnings: int
) -> None:
    monkeypatch.delenv(INSECURE, raising=False)
    if exported is not None:
        monkeypatch.setenv(INSECURE, exported)
    with structlog.testing.capture_logs() as logs:
        refuse_insecure_serialization()
        refuse_insecure_serialization()
    told = [log for log in logs if log["event"] == "engine.insecure_serialization_refused"]
    assert [log["log_level"] for log in told] == ["warning"] * warnings
    assert INSECURE not in os.environ
