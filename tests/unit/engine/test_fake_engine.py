"""The fake engine does what every engine does; so what is tested with it holds for the real one."""

from collections.abc import AsyncIterator

import pytest

from tests.support.engine_spec import *  # noqa: F403
from tests.support.fake_engine import FakeEngine


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine(step_s=0.001)
    yield fake
    await fake.close()
