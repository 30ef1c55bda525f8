"""A presence stays far below what a broker takes, however many models there are and whatever was learnt of them."""

import itertools
import json

from schemas.codec import encode_presence
from schemas.contexts import Tier
from schemas.status import QueueInfo
from service.scheduling.costs import Costs
from tests.support.fake_bus import FakeBus
from tests.support.fake_engine import FakeEngine

MODELS = 200
MOST_BYTES = 100_000


async def test_the_presence_of_two_hundred_models_that_have_all_been_switched_between_is_small(serve):
    aliases = tuple(f"llama-3.1-8b-{n:03}" for n in range(MODELS))
    async with serve(engine=FakeEngine(aliases), bus=FakeBus()) as serving:
        costs: Costs = serving.worker.scheduler.costs
        for n, (left, to) in enumerate(itertools.permutations(aliases, 2)):
            costs.switched(left, to, tuple(Tier)[n % 3], 0.123456789 + n / 7)
        for alias in aliases:
            costs.finished(alias, seconds=1 / 3, tokens=123)
            costs.worked(alias, seconds=1 / 3, tokens=77, full=True)
        presence = serving.worker.presence.now()
    sized = [
        info.model_copy(update={"weights_bytes": 16_000_000_000 + n, "kv_bytes": 4_000_000_000 + n})
        for n, info in enumerate(presence.contexts)
    ]
    busy = {alias: QueueInfo(waiting=1000, running=256, tokens=1_000_000, oldest_s=12.345678) for alias in aliases}
    read = {f"requests.{alias}": tuple(range(12)) for alias in aliases}
    record = encode_presence(
        "workers", presence.model_copy(update={"contexts": tuple(sized), "queues": busy, "partitions": read})
    )
    for part in ("contexts", "queues", "partitions", "costs"):
        print(part, len(json.dumps(json.loads(record.value)[part], separators=(",", ":"))))
    print(f"{len(record.value or b'')} bytes for {MODELS} models")
    assert len(record.value or b"") < MOST_BYTES


def test_what_a_successor_adopts_is_what_each_model_was_seen_to_cost() -> None:
    costs, successor = Costs(), Costs()
    costs.switched("a", "b", Tier.PARKED, 2.0)
    costs.switched("c", "b", Tier.PARKED, 2.0)
    successor.adopt(costs.export(), {"b"})
    assert successor.switch("x", "b", Tier.PARKED).mean == 2.0
