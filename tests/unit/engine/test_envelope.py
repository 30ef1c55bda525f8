"""The envelope: only this launch's payloads are opened, and errors say nothing of what is inside."""

import os
from pathlib import Path

import pytest

from service.engine.system import envelope
from tests.support.judge import judge


class Harmful:
    """Unpickling it leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


@judge("vllm-gaudi", "test_deserialize_reconfigure_config_accepts_valid_payload")
def test_what_was_sealed_comes_out_again() -> None:
    assert envelope.unseal(envelope.seal({"a": (1, None)}, key="k"), key="k") == {"a": (1, None)}


@judge("vllm-gaudi", "test_deserialize_reconfigure_config_requires_insecure_serialization")
def test_a_foreign_payload_is_refused_before_it_is_unpickled(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with pytest.raises(envelope.ForgedEnvelope):
        envelope.unseal(envelope.seal(Harmful(trace), key="theirs"), key="ours")
    assert not trace.exists()


@pytest.mark.parametrize("sealed", [b"", b"short", b"\0" * 32, b"\0" * 64])
@judge("vllm-gaudi", "test_deserialize_reconfigure_config_rejects_non_vllm_config")
def test_anything_else_is_refused(sealed: bytes) -> None:
    with pytest.raises(envelope.ForgedEnvelope):
        envelope.unseal(sealed, key="ours")


def test_one_changed_bit_is_refused() -> None:
    sealed = bytearray(envelope.seal("secret prompt", key="ours"))
    sealed[-1] ^= 1
    with pytest.raises(envelope.ForgedEnvelope) as refusal:
        envelope.unseal(bytes(sealed), key="ours")
    assert "secret" not in str(refusal.value)


def test_a_process_that_was_not_launched_by_us_opens_nothing() -> None:
    assert envelope.KEY_VARIABLE not in os.environ
    with pytest.raises(envelope.ForgedEnvelope, match="not launched"):
        envelope.launch_key()
