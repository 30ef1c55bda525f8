"""What one model does to a process is nothing to another one: found by comparing all that its modules hold.

A model of another kind is loaded beside a dense one, asked, left, dropped, and loaded again. What changed in the worker
or in the core meanwhile, and is still so when the dense model runs again, must be judged harmless by name: see
``tests/support/judged.py``. By default that is asked of a mixture of experts; the others are a long run.

Seen green: every kind on vLLM 0.32, moe on 0.26, where the others have not been looked at.
Their tokens are tests/engine/test_matrix.py's.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from service.engine.versions import held
from tests.support import detector
from tests.support.asked import async_args, said
from tests.support.judged import RUNNING
from tests.support.kinds import KINDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROCESSES = ("worker", "core")
CHOSEN = "moe"
"""By default: whose life is looked at."""
PARTNERS = [
    pytest.param(name, marks=() if name == CHOSEN else pytest.mark.long)
    for name, kind in KINDS.items()
    if kind.here and name != "dense"
]


@pytest.fixture(scope="module")
async def watched(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """An engine that was started in the dense model; the others are seeded in another way."""
    from service.engine import MultiModelEngine

    seen = {"distributed_executor_backend": "tests.support.watched.Watched"}
    # A kind costs a minute of a busy machine before it is ever loaded: vLLM inspects each architecture in a process.
    asked: list[Any] = [item for item in request.session.items if "watched" in getattr(item, "fixturenames", ())]
    wanted = {"dense": None} | {item.callspec.params["partner"]: None for item in asked}
    models = {name: async_args(name, **seen, seed=0 if name == "dense" else 7) for name in wanted}
    engine = MultiModelEngine(models, disable_log_stats=True, device_memory_bytes=1 << 40)
    async with engine:
        await engine.initialize("dense")
        for _ in range(2):  # what a first request does to a process is done
            await said(engine, "dense")
        yield engine


async def snapshots(engine: Any) -> dict[str, detector.Snapshot]:
    return dict(zip(PROCESSES, await engine.collective_rpc(detector.take), strict=True))


class Life:
    """What was seen in the processes around another model's life."""

    def __init__(self, engine: Any, partner: str) -> None:
        self._engine = engine
        self._partner = partner
        self.seen: dict[str, dict[str, detector.Snapshot]] = {}

    async def run(self) -> None:
        await self._dense("before")
        await self._dense("before, asked again")
        await self._other("first")
        await self._dense("beside it")
        await self._other("after a round trip")
        await self._dense("beside it, again")
        for label in ("without it", "without it, again"):
            await self._engine.drop(self._partner)
            await self._dense(label)
            if label == "without it":
                await self._ask_other()
                await self._engine.switch("dense")
        self.seen = dict(self.seen)

    async def _dense(self, label: str) -> None:
        await said(self._engine, "dense")
        self.seen[label] = await snapshots(self._engine)

    async def _ask_other(self) -> None:
        for _ in range(2):
            await said(self._engine, self._partner)

    async def _other(self, label: str) -> None:
        await self._ask_other()
        self.seen[label] = await snapshots(self._engine)

    def changed(self, process: str, before: str, after: str) -> dict[str, str]:
        """By name, one path with its values, of what changed between two moments but not between two requests."""
        noise = detector.changed(*(self.seen[label][process] for label in ("before", "before, asked again"))).keys()
        found = detector.changed(self.seen[before][process], self.seen[after][process])
        return {
            detector.name_of(path): f"{path}: {values[0]} -> {values[1]}"
            for path, values in sorted(found.items())
            if path not in noise
        }

    def unjudged(self, process: str) -> dict[str, str]:
        """What another model's life left to the dense one, and what a round trip did to the other one."""
        found: dict[str, str] = {}
        for before, after in (
            ("before, asked again", "beside it"),
            ("beside it", "beside it, again"),
            ("before, asked again", "without it"),
            ("without it", "without it, again"),
            ("first", "after a round trip"),
        ):
            changes = self.changed(process, before, after)
            found |= {
                f"{name} ({before} / {after})": said for name, said in changes.items() if name not in RUNNING[process]
            }
        return found


@pytest.mark.parametrize("partner", PARTNERS)
async def test_another_models_life_leaves_nothing_that_is_not_judged(watched: Any, partner: str) -> None:
    life = Life(watched, partner)
    await life.run()
    found = [f"{process}: {name}: {said}" for process in PROCESSES for name, said in life.unjudged(process).items()]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def without(module: str, name: str) -> Any:
    """Called in the workers: this entry is not held any more."""

    def take_out(_worker: Any) -> int:
        from service.engine.versions import held

        held.HELD = tuple(each for each in held.HELD if (each.module, each.name) != (module, name))
        return len(held.HELD)

    return take_out


def whole(_worker: Any) -> None:
    """Called in the workers: every entry is held again."""
    import importlib

    from service.engine.versions import held as ours

    held_again = importlib.util.module_from_spec(ours.__spec__)  # type: ignore[attr-defined]
    ours.__spec__.loader.exec_module(held_again)  # type: ignore[union-attr]
    names = {(each.module, each.name) for each in ours.HELD}
    ours.HELD = tuple(
        next((mine for mine in ours.HELD if (mine.module, mine.name) == (each.module, each.name)), each)
        for each in held_again.HELD
    )
    assert names < {(each.module, each.name) for each in ours.HELD}


SEEN_HERE = (
    ("torch", "random state", "moe"),
    ("vllm.ir.op", "IrOp.registry", "other"),
    ("vllm.model_executor.layers.mamba.ops.ssu_dispatch", "_mamba_ssu_backend", "hybrid"),
    ("vllm.model_executor.offloader.base", "_instance", "moe"),
    ("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT", "moe"),
    ("vllm.model_executor.layers.activation", "_ACTIVATION_REGISTRY", "vision"),
    ("vllm.model_executor.models.utils", "_model_to_pp_missing_layer_names", "hybrid"),
)
"""What is held that a CPU shows, and a kind of model that changes it."""
TAKEN_OUT = [pytest.param(*entry, id=entry[1], marks=pytest.mark.long) for entry in SEEN_HERE if KINDS[entry[2]].here]


@pytest.mark.parametrize(("module", "name", "partner"), TAKEN_OUT)
async def test_what_is_not_held_is_found(watched: Any, module: str, name: str, partner: str) -> None:
    await watched.switch("dense")
    (left,) = await watched.collective_rpc(without(module, name))
    assert left == len(held.HELD) - 1
    try:
        life = Life(watched, partner)
        await life.run()
    finally:
        await watched.switch("dense")
        await watched.collective_rpc(whole)
    assert any(name in found or (name == "random state" and "rng" in found) for found in life.unjudged("worker"))
