"""Many calls at once from one process."""

import asyncio

import pytest

from service.client import Client
from tests.support.pool import delete_topics, serving, settings_for

pytestmark = pytest.mark.broker

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("calls", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
async def test_calls_by_the_thousand_wait_at_once_and_each_gets_its_own_answer(bootstrap: str, calls: int):
    settings = settings_for(bootstrap)
    models = [("llama", "qwen")[n % 2] for n in range(calls)]
    async with serving(settings), Client(settings=settings, timeout_s=200) as client:
        answers = await asyncio.gather(
            *(client.chat(model=model, messages=HELLO, max_tokens=n % 3 + 1) for n, model in enumerate(models))
        )
    expected = ["".join(f"{model}{k} " for k in range(n % 3 + 1)) for n, model in enumerate(models)]
    assert [answer.choices[0].message.content for answer in answers] == expected
    await delete_topics(settings)
