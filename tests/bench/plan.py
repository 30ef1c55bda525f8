"""What a plan takes: ``python -m tests.bench.plan [--models N] [--requests N] [--json FILE]``.

A day of a pool is made up: popularity by Zipf(1), traffic that doubles and halves between day and night, answers as
long as people's. It is written as results, and the command plans for one to eight devices; counted are its seconds from
start to end, its processors' seconds, and the most memory that it and its two helpers had together, at most.
"""

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

_SIZES = ("8b", "8b", "14b")
_RATE = 11.6
"""Requests per second on average: a million a day."""
_PROCESSES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--most-requests", type=int, help="the command's own; as large as --requests: no slices")
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        aliases = [f"m{number:04}-{_SIZES[number % len(_SIZES)]}" for number in range(options.models)]
        entries = "".join(f"  {alias}: {{model: made/{alias}}}\n" for alias in aliases)
        (folder / "models.yaml").write_text(f"models:\n{entries}", encoding="utf-8")
        with (folder / "results.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(results(aliases, options.requests))
        command = [sys.executable, "-m", "service.cli", "plan", "--results", str(folder / "results.jsonl")]
        command += ["--models", str(folder / "models.yaml"), "--objective", "ttft_s=10,tpot_s=0.1"]
        command += ["--replay", "coarse", "--json", str(folder / "plan.json")]
        if options.most_requests:
            command += ["--most-requests", str(options.most_requests)]
        began = time.perf_counter()
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - began
        made = json.loads((folder / "plan.json").read_text(encoding="utf-8"))["plans"]["as it is"]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = {
        "models": options.models,
        "requests": made["requests_in_all"],
        "replayed": made["requests"],
        "seconds": round(seconds, 1),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "memory_mib_at_most": _PROCESSES * used.ru_maxrss >> 10,
        "shares": [row["share"] for row in made["levels"]],
    }
    print(json.dumps(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def results(aliases: list[str], requests: int) -> Iterator[str]:
    """Lines as the topic would have them, with answers of usual length."""
    dice = random.Random(1)
    weights = [1 / (1 + rank) for rank in range(len(aliases))]
    at, day = 0.0, requests / _RATE
    for offset in range(requests):
        at += dice.expovariate(_RATE * (1 + math.sin(2 * math.pi * at / day) / 3))
        prompt, said = int(dice.lognormvariate(6, 0.8)) + 1, int(dice.lognormvariate(5, 0.7)) + 1
        yield (
            json.dumps(
                {
                    "id": f"r{offset}",
                    "origin": {"topic": "requests", "partition": 0, "offset": offset},
                    "outcome": "completed",
                    "status": 200,
                    "model": dice.choices(aliases, weights)[0],
                    "body": {
                        "choices": [{"index": 0, "text": "word " * said}],
                        "usage": {"prompt_tokens": prompt, "completion_tokens": said},
                    },
                    "timing": {"received": 1.7e9 + at, "finished": 1.7e9 + at + 3},
                }
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
