"""How fast switching is, in one run: a restart, the published way, and this engine from each tier, idle and loaded.

``python -m tests.bench.switch [--json FILE] [--quick]``
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ROOT = Path(__file__).parents[2]
ALIASES = ("llama", "qwen", "lynx")
KV_BYTES = 64 << 20
LOAD = 64
PROMPT = "Tell me about your day."


def arguments(path: Path) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(
        model=str(path),
        max_model_len=1024,
        max_num_seqs=LOAD,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=KV_BYTES,
    )


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


class Bench:
    """One engine, measured."""

    def __init__(self, engine: Any, *, quick: bool) -> None:
        self.engine = engine
        self.quick = quick
        self.figures: dict[str, float] = {}
        self._number = 0

    def note(self, **figures: float) -> None:
        self.figures.update({name: round(value, 4) for name, value in figures.items()})
        print("  ".join(f"{name} {value:.3f}" for name, value in figures.items()), flush=True)

    async def say(self, model: str, tokens: int, extra: str = "") -> tuple[int, ...]:
        from vllm import SamplingParams

        self._number += 1
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        async for output in self.engine.generate(PROMPT + extra, params, f"bench-{self._number}", model=model):
            ids = tuple(output.outputs[0].token_ids)
        return ids

    async def many(self, model: str, tokens: int) -> list[tuple[int, ...]]:
        return list(await asyncio.gather(*(self.say(model, tokens, f" {n}") for n in range(LOAD))))

    async def first_loads(self) -> None:
        reports = [await self.engine.switch(alias) for alias in ALIASES[1:]]
        stalls = [report.stall_ms for report in reports]
        needed = [report.phases_ms["weights"] + report.phases_ms["build"] for report in reports]
        self.note(
            first_load_ms=statistics.median(stalls),
            first_load_over_needed=statistics.median(a / b for a, b in zip(stalls, needed, strict=True)),
        )
        for alias in ALIASES:
            await self.engine.switch(alias)
            await self.say(alias, 8)

    async def resident(self) -> None:
        trips, core = [], []
        for number in range(300 if self.quick else 1000):
            started = time.perf_counter()
            report = await self.engine.switch(ALIASES[number % 3])
            trips.append((time.perf_counter() - started) * 1e3)
            core.append(report.stall_ms)
        self.note(
            resident_p50_ms=statistics.median(trips),
            resident_p99_ms=percentile(trips, 0.99),
            resident_core_p50_ms=statistics.median(core),
        )

    async def loaded(self) -> None:
        """Switches while every model has 64 requests; how long a step takes meanwhile; when the next token comes."""
        work = [asyncio.create_task(self.many(alias, 400)) for alias in ALIASES]
        await asyncio.sleep(1)
        step_ms = await self._step_ms()
        trips, next_tokens = [], []
        for number in range(30 if self.quick else 100):
            alias = ALIASES[number % 3]
            started = time.perf_counter()
            report = await self.engine.switch(alias)
            if report.switched:
                trips.append((time.perf_counter() - started) * 1e3)
                next_tokens.append(await self._next_token_ms(alias))
        await self.engine.abort([state for front in ALIASES for state in self._running(front)], internal=True)
        await asyncio.gather(*work)
        self.note(
            step_ms=step_ms,
            resident_loaded_p50_ms=statistics.median(trips),
            resident_loaded_p99_ms=percentile(trips, 0.99),
            next_token_p50_ms=statistics.median(next_tokens),
        )

    def _running(self, alias: str) -> list[str]:
        return list(self.engine.context(alias).output_processor.request_states)

    def _generated(self, alias: str) -> int:
        states = self.engine.context(alias).output_processor.request_states.values()
        return sum(len(state.detokenizer.output_token_ids) for state in states)

    async def _next_token_ms(self, alias: str) -> float:
        started, before = time.perf_counter(), self._generated(alias)
        while self._generated(alias) == before:  # noqa: ASYNC110 - seen at the next turn of the loop
            await asyncio.sleep(0)
        return (time.perf_counter() - started) * 1e3

    async def _step_ms(self) -> float:
        alias = self.engine.active
        await self._next_token_ms(alias)
        return statistics.median([await self._next_token_ms(alias) for _ in range(20)])

    async def parked(self) -> None:
        """Back from parked, and what allocating and zeroing the same KV cache takes by itself."""
        took, woken = [], []
        for number in range(10 if self.quick else 40):
            target = ALIASES[number % 3]
            if self.engine.active == target:
                await self.engine.switch(ALIASES[(number + 1) % 3])
            await self.engine.park(target)
            report = await self.engine.switch(target)
            took.append(report.ms)
            woken.append(report.stall_ms)
        zeroing = [(await self.engine.collective_rpc(zero_kv_ms, args=(KV_BYTES,)))[0] for _ in range(10)]
        for alias in ALIASES:
            await self.engine.preload(alias)
        self.note(
            parked_p50_ms=statistics.median(took),
            kv_zero_ms=statistics.median(zeroing),
            parked_above_kv_ms=statistics.median(took) - statistics.median(zeroing),
        )

    async def alternating(self) -> None:
        """Three models share the engine by turns of 100 ms, against each alone; the median of paired runs."""
        tokens = 32 if self.quick else 64
        ratios, idle, identical = [], [], True
        for _ in range(3 if self.quick else 5):
            alone, sum_s = {}, 0.0
            for alias in ALIASES:
                await self.engine.switch(alias)
                await self.engine.reset_prefix_cache(model=alias)
                started = time.perf_counter()
                alone[alias] = await self.many(alias, tokens)
                sum_s += time.perf_counter() - started
            for alias in ALIASES:
                await self.engine.reset_prefix_cache(model=alias)
            started = time.perf_counter()
            together, stalled_ms = await self._by_turns(tokens)
            wall_s = time.perf_counter() - started
            ratios.append(wall_s / sum_s)
            idle.append(stalled_ms / 1e3 / wall_s)
            identical = identical and together == alone
        self.note(
            alternating_over_sum=statistics.median(ratios),
            alternating_idle_share=statistics.median(idle),
            alternating_identical=float(identical),
        )

    async def _by_turns(self, tokens: int) -> tuple[dict[str, Any], float]:
        work = {alias: asyncio.create_task(self.many(alias, tokens)) for alias in ALIASES}
        stalled_ms = 0.0
        while pending := [alias for alias in ALIASES if not work[alias].done()]:
            later = [alias for alias in pending if ALIASES.index(alias) > ALIASES.index(self.engine.active)]
            report = await self.engine.switch((later or pending)[0])
            stalled_ms += report.phases_ms.get("swap", 0.0)
            await asyncio.wait((work[self.engine.active],), timeout=0.1)
        return {alias: await task for alias, task in work.items()}, stalled_ms


def zero_kv_ms(_worker: Any, size: int) -> float:
    """Runs in a worker."""
    import time as clock

    import torch

    started = clock.perf_counter()
    torch.zeros(size, dtype=torch.int8)
    return (clock.perf_counter() - started) * 1e3


def published_way(paths: dict[str, Path], *, quick: bool) -> dict[str, float]:
    """The baseline in a process of its own, on vLLM without our plugin."""
    command = [sys.executable, "-m", "tests.bench.published_way", *(str(paths[alias]) for alias in ALIASES[:2])]
    if quick:
        command.append("--quick")
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the baseline failed:\n{done.stderr[-4000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


async def measure(paths: dict[str, Path], *, quick: bool) -> dict[str, float]:
    from service.engine.multi_model import MultiModelEngine

    engine = MultiModelEngine({alias: arguments(paths[alias]) for alias in ALIASES}, disable_log_stats=True)
    bench = Bench(engine, quick=quick)
    started = time.perf_counter()
    await engine.initialize(ALIASES[0])
    try:
        bench.note(restart_ms=(time.perf_counter() - started) * 1e3)
        await bench.first_loads()
        await bench.resident()
        await bench.loaded()
        await bench.parked()
        await bench.alternating()
    finally:
        engine.shutdown()
    return bench.figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    from deploy.local.models import ensure_models

    paths = ensure_models(Path(os.environ.get("GEARSHIFT_HOME", ROOT / ".gearshift")) / "models")
    figures = asyncio.run(measure(paths, quick=chosen.quick))
    baseline = published_way(paths, quick=chosen.quick)
    figures |= baseline
    figures["published_over_resident"] = baseline["published_way_p50_ms"] / figures["resident_p50_ms"]
    print("  ".join(f"{name} {figures[name]:.3f}" for name in (*baseline, "published_over_resident")))
    if chosen.json:
        chosen.json.write_text(json.dumps({"figures": figures}, indent=1))


if __name__ == "__main__":
    main()
