"""What one engine began, another one goes on with: here one that prefills in small pieces, and caches no prefixes."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.progress import Progress, Said
from service.errors import NotContinued
from service.ports import Call
from tests.engine.conftest import KV_BYTES
from tests.support.engine_spec import LONG, broken_off, chat, completion, text

pytestmark = pytest.mark.engine

PIECE = 64
"""Tokens that a step takes at the most: what is gone on with here is longer."""


@pytest.fixture(scope="module")
async def elsewhere(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    from service.engine import VllmEngine
    from service.engine.answering import arguments
    from service.models_file import load_models
    from service.settings import EngineSettings

    options = {
        "dtype": "float32",
        "max_model_len": 4096,
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_BYTES,
        "max_num_batched_tokens": PIECE,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
    }
    path = tmp_path_factory.mktemp("elsewhere") / "models.yaml"
    path.write_text(
        json.dumps({"default_model": "llama", "models": {"llama": {"model": str(models["llama"]), **options}}})
    )
    settings = EngineSettings()
    keys = {"engine_keys": arguments.engine_arg_names(), "frontend_keys": arguments.frontend_arg_names()}
    async with await VllmEngine.open(load_models(path, settings, **keys), settings) as engine:
        yield engine


async def begun(engine: Any, call: Call) -> Progress:
    progress = await broken_off(engine, call, tokens=2 * PIECE)
    assert progress.tokens >= 2 * PIECE
    return progress


@pytest.mark.parametrize("make", [chat, completion])
async def test_an_answer_is_that_of_an_engine_that_was_not_interrupted(engine: Any, elsewhere: Any, make: Any) -> None:
    call = make(max_tokens=LONG, logprobs=True if make is chat else 1)
    whole = await engine.answer(call)
    progress = await begun(engine, call)
    answer = await elsewhere.answer(call, progress=progress)
    assert answer.continued == (progress.tokens,)
    assert answer.body["usage"] == whole.body["usage"]
    said = [body["choices"][0].get("text") or body["choices"][0]["message"] for body in (answer.body, whole.body)]
    assert said[0] == said[1]


async def test_many_go_on_beside_each_other_and_beside_new_ones(engine: Any, elsewhere: Any) -> None:
    calls = [completion(prompt=f"Number {index}", max_tokens=LONG) for index in range(6)]
    whole = [await engine.answer(call) for call in calls]
    progresses = [await begun(engine, call) for call in calls[:4]]
    asked = zip(calls, [*progresses, None, None], strict=True)
    answers = await asyncio.gather(*(elsewhere.answer(call, progress=progress) for call, progress in asked))
    for answer, other in zip(answers, whole, strict=True):  # but for the fingerprint, which is the engine's
        assert (text(answer), answer.body["usage"]) == (text(other), other.body["usage"])
    assert [answer.continued for answer in answers] == [*((each.tokens,) for each in progresses), (), ()]


async def test_what_this_model_can_not_have_said_is_refused(engine: Any) -> None:
    """A token that is none would end the worker."""
    call = completion(max_tokens=LONG, logprobs=1)
    progress = await begun(engine, call)
    (request,) = progress.requests
    (said,) = request.sequences
    mixed = (said.logprobs or [])[::-1]
    for sequence, reason in (
        (Said(tokens=[-1]), "no such tokens"),
        (Said(tokens=[1 << 30]), "no such tokens"),
        (Said(tokens=said.tokens, logprobs=[[] for _ in said.tokens]), "log-probabilities"),
        (Said(tokens=said.tokens, logprobs=mixed), "log-probabilities"),
    ):
        forged = request.model_copy(update={"sequences": (sequence,)})
        with pytest.raises(NotContinued, match=reason):
            await engine.answer(call, progress=progress.model_copy(update={"requests": (forged,)}))
    nothing = request.model_copy(update={"sequences": ()})
    answer = await engine.answer(call, progress=progress.model_copy(update={"requests": (nothing,)}))
    assert (answer.status, answer.continued) == (200, ())


async def test_a_seed_that_a_prefill_in_pieces_would_draw_from_is_refused(engine: Any, elsewhere: Any) -> None:
    """Runner V1 rewinds the generator after each piece but the last, and a CPU's has nothing to rewind by."""
    greedy = completion(max_tokens=LONG)
    progress = await begun(engine, greedy)
    seeded = replace(greedy, body={**greedy.body, "temperature": 1.0, "seed": 7})
    with pytest.raises(NotContinued, match=r"rewound|vocabulary"):
        await elsewhere.answer(seeded, progress=progress)
    assert (await elsewhere.answer(seeded)).body["usage"]["completion_tokens"] == LONG
