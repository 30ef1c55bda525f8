"""The real engine through the worker's port: what every engine does, and what only a real one can show."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_spec import *  # noqa: F403
from tests.support.engine_spec import chat
from tests.support.profiles import traces

pytestmark = pytest.mark.engine


async def test_a_profile_ends_where_it_began_whichever_model_is_active_then(engine: Any, profiles: Path) -> None:
    before = traces(profiles)
    await engine.switch("lynx")
    await engine.profile(start=True)
    await engine.switch("llama")
    await engine.answer(chat("llama", max_tokens=2))
    assert traces(profiles).keys() == before.keys()
    await engine.profile(start=False)
    assert [b"aten::" in trace for name, trace in traces(profiles).items() if name not in before] == [True]
