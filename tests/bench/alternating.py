"""Three models share the engine by turns of 100 ms, against each alone: paired runs, their medians."""

import asyncio
import statistics
import time
from typing import Any

from tests.bench.setting import ALIASES, Run

_TURN_S = 0.1


def steps_run(wrapper: Any) -> int:
    """Runs in a worker: how many engine steps its model has run since this was first asked."""
    worker = wrapper.worker
    if not hasattr(worker, "bench_steps"):
        worker.bench_steps, execute_model = 0, worker.execute_model

        def counted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            worker.bench_steps += scheduler_output.total_num_scheduled_tokens > 0
            return execute_model(scheduler_output, *args, **kwargs)

        worker.execute_model = counted
    return int(worker.bench_steps)


async def measure(run: Run) -> None:
    """Notes wall time and engine steps of the turns over those of the three alone, and the share without a step."""
    tokens = 128 if run.quick else 256
    ratios, idle, steps, identical = [], [], [], True
    await _steps(run)
    for _ in range(3 if run.quick else 5):
        alone, sum_s, before = {}, 0.0, await _steps(run)
        for alias in ALIASES:
            await run.engine.switch(alias)
            await run.engine.reset_prefix_cache(model=alias)
            started = time.perf_counter()
            alone[alias] = await run.many(alias, tokens)
            sum_s += time.perf_counter() - started
        for alias in ALIASES:
            await run.engine.reset_prefix_cache(model=alias)
        between = await _steps(run)
        started = time.perf_counter()
        together, stalled_ms = await _by_turns(run, tokens)
        wall_s = time.perf_counter() - started
        ratios.append(wall_s / sum_s)
        idle.append(stalled_ms / 1e3 / wall_s)
        steps.append((await _steps(run) - between) / (between - before))
        identical = identical and together == alone
    run.note(
        alternating_over_sum=statistics.median(ratios),
        alternating_idle_share=statistics.median(idle),
        alternating_steps_over_sum=statistics.median(steps),
        alternating_identical=float(identical),
    )


async def _steps(run: Run) -> int:
    """Engine steps of all models so far."""
    return sum([(await run.engine.collective_rpc(steps_run, model=alias))[0] for alias in ALIASES])


async def _by_turns(run: Run, tokens: int) -> tuple[dict[str, Any], float]:
    """Everyone's outputs, and the milliseconds in which switches kept the core from its steps."""
    work = {alias: asyncio.create_task(run.many(alias, tokens)) for alias in ALIASES}
    stalled_ms = 0.0
    while pending := [alias for alias in ALIASES if not work[alias].done()]:
        later = [alias for alias in pending if ALIASES.index(alias) > ALIASES.index(run.engine.active)]
        report = await run.engine.switch((later or pending)[0])
        stalled_ms += report.stall_ms
        await asyncio.wait((work[run.engine.active],), timeout=_TURN_S)
    return {alias: await task for alias, task in work.items()}, stalled_ms
