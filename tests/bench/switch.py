"""How fast switching is, in one run: a restart, the published way, and this engine from each tier, idle and loaded.

``python -m tests.bench.switch [--quick] [--json FILE] [--only PART ...]``
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvloop

from service.app import seldom_collected
from tests.bench import alternating
from tests.bench.setting import ALIASES, KV_BYTES, Run, arguments, percentile, show

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ROOT = Path(__file__).parents[2]

Bound = Callable[[Mapping[str, float]], bool]
BARS: dict[str, Bound] = {
    "resident p50 < 1 ms": lambda at: at["resident_p50_ms"] < 1,
    "resident p99 < 3 ms": lambda at: at["resident_p99_ms"] < 3,
    "loaded <= the step under way + 3 ms": lambda at: (
        at["resident_loaded_p50_ms"] <= at["step_ms"] + 3 and at["resident_loaded_p99_ms"] <= at["step_p99_ms"] + 3
    ),
    "a resumed request's next token within one step more": lambda at: (
        at["resumed_token_p50_ms"] <= 2 * at["step_ms"] + 3
    ),
    "50 times faster than the published way": lambda at: at["published_over_resident"] >= 50,
    "parked < 20 ms above its KV cache": lambda at: at["parked_above_kv_ms"] < 20,
    "first load < 1.2 of vLLM's own building of the runner and loading of the weights": lambda at: (
        at["first_load_over_stock"] < 1.2
    ),
    "alternating <= 1.10 of the sum": lambda at: at["alternating_over_sum"] <= 1.10,
    "no step for <= 5 % of the time": lambda at: at["alternating_idle_share"] <= 0.05,
    "as many steps within 3 %": lambda at: abs(at["alternating_steps_over_sum"] - 1) <= 0.03,
    "outputs identical": lambda at: at["alternating_identical"] == 1,
}


async def first_loads(run: Run) -> None:
    """Each further model for the first time; ``first_load_ms`` is that of the model that the baseline loads too."""
    reports = [await run.engine.switch(alias) for alias in ALIASES[1:]]
    needed = [report.phases_ms["runner"] + report.phases_ms["weights"] for report in reports]
    run.note(
        first_load_ms=reports[0].stall_ms,
        first_load_over_own_parts=statistics.median(a.stall_ms / b for a, b in zip(reports, needed, strict=True)),
    )
    for report in reports:
        print("  ", report.to_model, "  ".join(f"{name} {ms:.1f}" for name, ms in report.phases_ms.items()))
    for alias in ALIASES:
        await run.engine.switch(alias)
        await run.say(alias, 8)


async def resident(run: Run) -> None:
    """Back to a resident model, nothing running: from the call to its report."""
    trips, core = [], []
    for number in range(300 if run.quick else 1000):
        started = time.perf_counter()
        report = await run.engine.switch(ALIASES[number % 3])
        trips.append((time.perf_counter() - started) * 1e3)
        core.append(report.stall_ms)
    run.note(
        resident_p50_ms=statistics.median(trips),
        resident_p99_ms=percentile(trips, 0.99),
        resident_core_p50_ms=statistics.median(core),
        resident_core_p99_ms=percentile(core, 0.99),
    )


async def loaded(run: Run) -> None:
    """Switches while every model has its requests; how long a step takes meanwhile.

    ``resumed_token_p50_ms`` is from asking for the switch to the next token of a request that was frozen.
    """
    work = [asyncio.create_task(run.many(alias, 400)) for alias in ALIASES]
    for alias in ALIASES:
        await run.engine.switch(alias)
        await _next_token_ms(run, alias)
    trips, resumed, steps, parked = [], [], [], []
    for number in range(99):
        alias = ALIASES[number % 3]
        started = time.perf_counter()
        await run.engine.switch(alias)
        trips.append((time.perf_counter() - started) * 1e3)
        resumed.append(trips[-1] + await _next_token_ms(run, alias))
        steps += [await _next_token_ms(run, alias) for _ in range(2)]
    for number in range(6 if run.quick else 12):
        target = ALIASES[number % 3]
        await run.engine.park(target)
        started = time.perf_counter()
        await run.engine.switch(target)
        parked.append((time.perf_counter() - started) * 1e3)
    await run.engine.abort([state for alias in ALIASES for state in _running(run, alias)], internal=True)
    await asyncio.gather(*work)
    run.note(
        step_ms=statistics.median(steps),
        step_p99_ms=percentile(steps, 0.99),
        resident_loaded_p50_ms=statistics.median(trips),
        resident_loaded_p99_ms=percentile(trips, 0.99),
        resumed_token_p50_ms=statistics.median(resumed),
        parked_loaded_p50_ms=statistics.median(parked),
    )


def _running(run: Run, alias: str) -> list[str]:
    return list(run.engine.context(alias).output_processor.request_states)


def _generated(run: Run, alias: str) -> int:
    states = run.engine.context(alias).output_processor.request_states.values()
    return sum(len(state.detokenizer.output_token_ids) for state in states)


async def _next_token_ms(run: Run, alias: str) -> float:
    started, before = time.perf_counter(), _generated(run, alias)
    while _generated(run, alias) == before:
        run.heard.clear()
        await run.heard.wait()
    return (time.perf_counter() - started) * 1e3


async def parked(run: Run) -> None:
    """Back from parked, and what allocating and zeroing the same KV cache takes by itself."""
    took = []
    for number in range(10 if run.quick else 40):
        target = ALIASES[number % 3]
        if run.engine.active == target:
            await run.engine.switch(ALIASES[(number + 1) % 3])
        await run.engine.park(target)
        started = time.perf_counter()
        await run.engine.switch(target)
        took.append((time.perf_counter() - started) * 1e3)
    zeroing = [(await run.engine.collective_rpc(zero_kv_ms, args=(KV_BYTES,)))[0] for _ in range(10)]
    for alias in ALIASES:
        await run.engine.preload(alias)
    run.note(
        parked_p50_ms=statistics.median(took),
        kv_zero_ms=statistics.median(zeroing),
        parked_above_kv_ms=statistics.median(took) - statistics.median(zeroing),
    )


def zero_kv_ms(_worker: Any, size: int) -> float:
    """Runs in a worker."""
    import time as clock

    import torch

    started = clock.perf_counter()
    torch.zeros(size, dtype=torch.int8)
    return (clock.perf_counter() - started) * 1e3


async def memory(run: Run) -> None:
    """What the processes hold with all three models resident, in MiB."""
    from service.platforms.cpu import resident_bytes

    pids = {"frontend": os.getpid(), "core": run.engine.core_pid, "worker": run.engine.worker_pids[0]}
    run.note(**{f"memory_{name}_mib": resident_bytes(pid) / (1 << 20) for name, pid in pids.items()})


PARTS = {
    "resident": resident,
    "loaded": loaded,
    "parked": parked,
    "alternating": alternating.measure,
    "memory": memory,
}


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


async def measure(paths: dict[str, Path], *, quick: bool, parts: list[str]) -> dict[str, float]:
    from service.engine import MultiModelEngine

    engine = MultiModelEngine({alias: arguments(paths[alias]) for alias in ALIASES}, disable_log_stats=True)
    run = Run(engine, quick=quick)
    started = time.perf_counter()
    await engine.initialize(ALIASES[0])
    try:
        run.note(restart_ms=(time.perf_counter() - started) * 1e3)
        await first_loads(run)
        with seldom_collected():  # as the application serves
            for part in parts:
                await PARTS[part](run)
    finally:
        started = time.perf_counter()
        engine.shutdown()
        run.note(stop_ms=(time.perf_counter() - started) * 1e3)
    return run.figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "published"], default=[*PARTS, "published"])
    chosen = parser.parse_args()
    from deploy.local.models import ensure_models
    from deploy.local.setup import home

    paths = ensure_models(home() / "models")
    parts = [part for part in PARTS if part in chosen.only]
    figures = uvloop.run(measure(paths, quick=chosen.quick, parts=parts))
    if "published" in chosen.only:
        baseline = published_way(paths, quick=chosen.quick)
        baseline["first_load_over_stock"] = figures["first_load_ms"] / baseline["stock_load_ms"]
        if "resident" in chosen.only:
            baseline["published_over_resident"] = baseline["published_way_p50_ms"] / figures["resident_p50_ms"]
        show(baseline)
        figures |= baseline
    if chosen.json:
        chosen.json.write_text(json.dumps({"figures": figures}, indent=1))
    if set(chosen.only) == {*PARTS, "published"}:
        for bar, holds in BARS.items():
            print(f"{'yes' if holds(figures) else 'NO ':4} {bar}")


if __name__ == "__main__":
    main()
