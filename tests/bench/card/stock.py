"""vLLM's own sleep(1) and wake_up of a model, without our plugin: ``python -m tests.bench.card.stock MODEL SHAPE``.

Prints a line of JSON.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.card.models import SHAPES, arguments, on_cpu
from tests.bench.card.run import ALIASES, Card

ROOT = Path(__file__).parents[3]


async def measure(card: Card) -> None:
    """In a process of its own, on the model that ``parked`` measures. A CPU has no sleep of vLLM's."""
    if on_cpu():
        print("vLLM has no sleep on a CPU: nothing to compare with")
        return
    command = [sys.executable, "-m", "tests.bench.card.stock", str(card.paths[ALIASES[0]]), card.shape_name]
    plain = {**os.environ, "VLLM_PLUGINS": ""}
    done = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=False)  # noqa: ASYNC221
    if done.returncode:
        raise RuntimeError(f"vLLM's own sleep failed:\n{done.stderr[-4000:]}")
    card.note(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    path, shape = Path(sys.argv[1]), SHAPES[sys.argv[2]]
    llm = LLMEngine.from_engine_args(arguments(path, shape, eager=False, enable_sleep_mode=True))
    away, back = [], []
    for _ in range(5):
        started = time.perf_counter()
        llm.sleep(1)
        away.append(time.perf_counter() - started)
        started = time.perf_counter()
        llm.wake_up()
        back.append(time.perf_counter() - started)
    print(json.dumps({"stock_sleep_s": statistics.median(away), "stock_wake_up_s": statistics.median(back)}))


if __name__ == "__main__":
    main()
