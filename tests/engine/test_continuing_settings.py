"""The same under other settings of the scheduler: answers are gone on with as if nothing had been."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import KV_BYTES
from tests.engine.test_continuing import KINDS, SEEDED, check, draws_known, watched
from tests.support.engines import open_engine
from tests.support.kinds import NGRAM

pytestmark = [pytest.mark.engine, pytest.mark.long]

SETTINGS: dict[str, dict[str, Any]] = {
    "async": {"async_scheduling": True},
    "in turn": {"async_scheduling": False},
    "uncached": {"async_scheduling": True, "enable_prefix_caching": False},
    "small steps": {"async_scheduling": False, "max_num_batched_tokens": 64, "max_num_seqs": 4},
    "drafts": {"speculative_config": NGRAM},
}
ASKED = ("chat", "response", "penalties", "stop strings", "logprobs of a chat", "schema", "two prompts")
DRAWN = ("seed", "two samples of a chat")


@pytest.fixture(scope="module", params=SETTINGS)
async def set_so(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Any]:
    options = {
        "dtype": "float32",
        "max_model_len": 2048,
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_BYTES,
        **SETTINGS[request.param],
    }
    folder = tmp_path_factory.mktemp("set-so")
    async with await open_engine(folder, {"llama": {"model": str(models["llama"]), **options}}) as engine:
        yield engine


@pytest.mark.parametrize("kind", ASKED)
async def test_a_body_is_that_of_an_undisturbed_run(set_so: Any, kind: str) -> None:
    await check(set_so, KINDS[kind])


@pytest.mark.parametrize("kind", DRAWN)
async def test_a_seed_is_gone_on_with_or_not_kept(set_so: Any, request: pytest.FixtureRequest, kind: str) -> None:
    setting = request.node.callspec.params["set_so"]
    if not draws_known():
        pytest.skip("how often this version has drawn from a seed is not known")
    if setting == "drafts":
        assert (await watched(set_so, SEEDED[kind]))[1] == [], "how often drafts have drawn is not known"
    else:
        await check(set_so, SEEDED[kind])
