"""``python -m tests.bench.card [--json FILE] [--only PART ...] [--shape small|0.6b|8b] [--folder FOLDER]``.

Needs no network, no broker and no installed package of ours: vLLM and a checkout are enough. Each figure is printed,
and written to FILE, as soon as it is there; a part that fails is told with its error, and the others go on. The
checkpoints are made in FOLDER the first time (8b: 33 GB).

To a machine with a card and without a network go this checkout and vLLM with what it needs, as wheels; there, with
both in PYTHONPATH, HF_HUB_OFFLINE=1 and VLLM_ENABLE_V1_MULTIPROCESSING=1:

    python -m tests.bench.card --json figures.json --shape 8b --folder /tmp/card
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import uvloop

_began = time.perf_counter()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.bench.card import memory, parts, stock  # noqa: E402
from tests.bench.card.models import SHAPES, on_cpu  # noqa: E402
from tests.bench.card.run import Card, Figures  # noqa: E402

_GROUP, _PLUGIN = "vllm.general_plugins", "service.engine.processes.plugin:register"
ROOT = Path(__file__).parents[3]
ALONE = ("sleep", "crowd", "memory")
"""Parts that don't need the engine that the others share."""
BARS: dict[str, Callable[[float], bool]] = {
    "resident_p50_ms": lambda ms: ms <= 2,
    "equal": lambda same: same == 1,
    "crowd_equal": lambda same: same == 1,
    "memory_growth": lambda share: share <= 0.01,
}


@contextmanager
def plugin_known() -> Iterator[None]:
    """vLLM finds our plugin in every process, also where this checkout was not installed."""
    if any(point.value == _PLUGIN for point in entry_points(group=_GROUP)):
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "gearshift-0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: gearshift\nVersion: 0\n")
        (described / "entry_points.txt").write_text(f"[{_GROUP}]\ngearshift = {_PLUGIN}\n")
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, str(ROOT), os.environ.get("PYTHONPATH"))))
        yield


async def crowd(card: Card) -> None:
    """On a device on which the largest model fits, and no second one of its size."""
    files = [sum(file.stat().st_size for file in path.glob("*.safetensors")) for path in card.paths.values()]
    resident = max(files) + card.shape.kv_bytes
    device = resident + min(files) // 2 + (sum(files) - max(files) if on_cpu() else 0)
    async with card.engine(device_memory_bytes=device) as engine:
        await parts.crowd(card, engine)


async def measure(card: Card, chosen: list[str]) -> list[str]:
    """Every part that was chosen. Answers with those that failed."""
    failed: list[str] = []

    async def guarded(name: str, work: Callable[[], Awaitable[None]]) -> None:
        print(f"-- {name}", flush=True)
        began = time.perf_counter()
        try:
            await work()
        except Exception:
            failed.append(name)
            traceback.print_exc()
        print(f"   {name} took {time.perf_counter() - began:.1f} s", flush=True)

    async def with_engine() -> None:
        async with card.engine() as engine:
            for name, part in parts.PARTS.items():
                if name in chosen:
                    await guarded(name, lambda part=part: part(card, engine))

    if set(chosen) & set(parts.PARTS):
        await guarded("engine", with_engine)
    for name, part in zip(ALONE, (stock.measure, crowd, memory.measure), strict=True):
        if name in chosen:
            await guarded(name, lambda part=part: part(card))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.card")
    everything = [*parts.PARTS, *ALONE]
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=everything, default=everything)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are, or are made")
    parser.add_argument("--cycles", type=int, default=200, help="of parking, dropping and loading each model")
    parser.add_argument("--backend", choices=("uni", "mp"), help="distributed_executor_backend of all models")
    given = parser.parse_args()
    import torch
    import vllm

    figures = Figures(given.json, vllm=vllm.__version__, torch=torch.__version__, shape=given.shape)
    figures.note(import_s=time.perf_counter() - _began)
    if given.folder is None:
        from deploy.local.setup import home

        given.folder = home() / "card"
    with plugin_known():
        card = Card(given.folder, given.shape, figures, cycles=given.cycles, backend=given.backend)
        began = time.perf_counter()
        print(f"checkpoints: {', '.join(map(str, card.paths.values()))}", flush=True)
        figures.note(checkpoints_s=time.perf_counter() - began)
        failed = uvloop.run(measure(card, given.only))
    for name, holds in BARS.items():
        if name in figures.known:
            print(f"{'yes' if holds(figures.known[name]) else 'NO ':4} {name} {figures.known[name]}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
