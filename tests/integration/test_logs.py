"""What a worker's process prints while it is asked with all that must not be told."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
from aiokafka import AIOKafkaProducer

from service.client import Client
from service.errors import RequestFailed
from service.settings import Settings
from tests.support.fake_engine import BROKEN
from tests.support.pool import delete_topics, settings_for
from tests.support.process import options_of, started
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.broker
CANARY = "canary-7f3a"
KEY = f"key-{CANARY}"
BODY = {"model": "llama", "max_tokens": 1, "prompt": CANARY}
REFUSED = 8
"""Of the records that are written to the bus."""


async def ask_over_http(address: str) -> list[int]:
    """With the canary in the prompt, the tenant, the key, the URL and every header that means something: statuses."""
    asked = [
        {"json": BODY, "headers": {"tenant": CANARY}, "params": {"key": CANARY}},
        {"json": BODY, "headers": {"ttl": CANARY}},
        {"json": BODY, "headers": {"deadline": CANARY}},
        {"json": BODY, "headers": {"x-gearshift-priority": CANARY}},
        {"json": BODY, "headers": {"authorization": f"Bearer wrong-{CANARY}"}},
        {"json": {**BODY, "prompt": f"{BROKEN} {CANARY}"}},
        {"content": f'{{"{CANARY}', "headers": {"content-type": "application/json"}},
    ]
    async with httpx.AsyncClient(base_url=address, timeout=30) as http:
        http.headers["authorization"] = f"Bearer {KEY}"
        return [(await http.post("/v1/completions", **each)).status_code for each in asked]  # type: ignore[arg-type]


async def ask_over_the_bus(settings: Settings) -> None:
    """In records that are no requests, then as prompts that fail and that are answered."""
    value, canary = json.dumps(BODY).encode(), CANARY.encode()
    names = ("deadline", "ttl", "endpoint", "reply-to", "reply-partition", "session")
    records = [(value, [(name, canary)]) for name in names]
    records += [(canary, []), (json.dumps({"prompt": CANARY}).encode(), [("tenant", canary)])]
    topic = settings.topics.named(settings.topics.requests)
    async with AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap_servers) as producer:
        for body, headers in records:
            await producer.send_and_wait(topic, body, headers=headers)
    async with Client(settings=settings, timeout_s=30) as client:
        with pytest.raises(RequestFailed):
            await client.complete(**{**BODY, "prompt": f"{BROKEN} {CANARY}"})
        await client.complete(**BODY, tenant=CANARY)


@pytest.mark.parametrize("form", ["json", pytest.param("console", marks=pytest.mark.long)])
async def test_no_prompt_header_tenant_or_key_is_in_a_worker_s_logs(bootstrap: str, tmp_path: Path, form: str) -> None:
    settings = settings_for(bootstrap)
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    told = {"log_level": "debug", "log_format": form, "http_port": 0, "api_keys_file": keys}
    options = options_of(settings, **told, max_attempts=2, retry_backoff_s=0.01)
    async with started(*options) as worker:
        said = []
        async with asyncio.timeout(PATIENCE_S):
            while "worker.ready" not in (line := (await worker.process.stderr.readline()).decode()):
                said.append(line)
        (address,) = set(re.findall(r"http://[\d.:]+", "".join(line for line in said if "http.open" in line)))
        assert await ask_over_http(address) == [200, 400, 400, 400, 401, 500, 400]
        await ask_over_the_bus(settings)
        # A client may write to the model's own topic: it is answered before the others.
        async with asyncio.timeout(PATIENCE_S):
            while sum("request.refused" in line for line in said) < REFUSED:
                said.append((await worker.process.stderr.readline()).decode())
        worker.process.terminate()
        said.append((await worker.process.stderr.read()).decode())
        assert await worker.process.wait() == 0
    text = "".join(said)
    assert text.count("request.retry") == 2
    assert [line for line in text.splitlines() if CANARY in line] == []
    await delete_topics(settings)
