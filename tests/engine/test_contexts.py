"""Contexts on the CPU's workers: what they do on every platform."""

import pytest

from tests.support.context_spec import *  # noqa: F403

pytestmark = [pytest.mark.engine, pytest.mark.parity]


@pytest.fixture
def frees() -> int:
    return 50 << 20
