"""The real engine behind the bus and without it, by turns: what of its rate is left from `requests` to `results`.

Direct is ``AsyncLLM.generate`` of the same engine in the same process. Both ways are given all requests at once, and
ask for the same tokens of the same prompts.
"""

import asyncio
import json
import statistics
import tempfile
import time
import uuid
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from deploy.local.models import ensure_models, write_models_file
from deploy.local.setup import home
from service.app import Parts, serve
from service.engine import VllmEngine
from service.engine.answering import arguments
from service.models_file import ModelsFile, load_models
from service.settings import Settings
from tests.support.pool import delete_topics, settings_for

_REQUESTS = 256
_TOKENS = 128


async def measure(bootstrap: str, *, pairs: int) -> dict[str, float]:
    """``real_engine_over_direct``: the median over paired runs, and the two rates in results per second."""
    settings = settings_for(bootstrap, log_level="warning")
    with tempfile.TemporaryDirectory() as folder:
        paths = ensure_models(home() / "models")
        file = write_models_file(Path(folder) / "models.yaml", paths, default="llama")
        keys = {"engine_keys": arguments.engine_arg_names(), "frontend_keys": arguments.frontend_arg_names()}
        models = load_models(file, settings.engine, **keys)
        try:
            return await _measure(settings, models, pairs)
        finally:
            await delete_topics(settings)


async def _measure(settings: Settings, models: ModelsFile, pairs: int) -> dict[str, float]:
    opened: asyncio.Future[VllmEngine] = asyncio.get_running_loop().create_future()

    async def open_engine(*_: object) -> VllmEngine:
        engine = await VllmEngine.open(models, settings.engine)
        opened.set_result(engine)
        return engine

    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        parts = Parts(read_models=lambda: models, open_engine=open_engine)
        tasks.create_task(serve(settings, parts, stop), name="worker")
        engine = await opened
        server = settings.kafka.bootstrap_servers
        results = AIOKafkaConsumer(
            settings.topics.named("results"), bootstrap_servers=server, isolation_level="read_committed"
        )
        async with AIOKafkaProducer(bootstrap_servers=server) as producer, results:
            await results.seek_to_end()
            await _over_the_bus(settings, producer, results)
            await _direct(engine)
            rates = [(await _over_the_bus(settings, producer, results), await _direct(engine)) for _ in range(pairs)]
        stop.set()
    return {
        "real_engine_over_direct": statistics.median(bus / direct for bus, direct in rates),
        "real_engine_rps": statistics.median(bus for bus, _ in rates),
        "direct_rps": statistics.median(direct for _, direct in rates),
    }


def _prompt(number: int) -> str:
    return f"Story number {number}: once"


async def _over_the_bus(settings: Settings, producer: AIOKafkaProducer, results: AIOKafkaConsumer) -> float:
    """Results per second, from the first request's send to the last result's sight."""
    topic = settings.topics.named("requests")
    more = {"model": "llama", "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    for number in range(_REQUESTS):
        body = json.dumps({"prompt": _prompt(number), **more})
        await producer.send(topic, body.encode(), key=uuid.uuid4().bytes)
    seen = 0
    while seen < _REQUESTS:
        for batch in (await results.getmany(timeout_ms=1000)).values():
            assert all(json.loads(record.value)["outcome"] == "completed" for record in batch)
            seen += len(batch)
    return _REQUESTS / (time.perf_counter() - began)


async def _direct(engine: VllmEngine) -> float:
    """Results per second of the engine's own client, always as many requests at once."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    asked = SamplingParams(max_tokens=_TOKENS, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    client = engine.multi.context("llama")

    async def generate(number: int) -> None:
        async for _ in client.generate(_prompt(number), asked, uuid.uuid4().hex):
            pass

    began = time.perf_counter()
    await asyncio.gather(*(generate(number) for number in range(_REQUESTS)))
    return _REQUESTS / (time.perf_counter() - began)
