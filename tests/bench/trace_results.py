"""A trace of production services as the results of a pool: ``python -m tests.bench.trace_results TRACE FOLDER``.

For ``gearshift plan``: writes ``results.jsonl``, with what the pool's topic would have had, and ``models.yaml`` with
the models of ``production.SIZES``, to which requests go as in ``python -m tests.bench.schedule --trace``. Nothing else
of the results is told: texts and waits are not in the trace, and a plan asks for neither.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from tests.bench.production import OBJECTIVE, SIZES, Record, drawn, read

_BEGAN = 1_700_000_000.0
"""Since the epoch: any moment will do."""


def results(records: Sequence[Record], aliases: Sequence[str], *, rate: float = 1.0, seed: int = 0) -> Iterator[str]:
    """A result on a line for each request, coming ``rate`` times as fast."""
    for offset, (record, alias) in enumerate(zip(records, drawn(records, aliases, seed), strict=True)):
        received = _BEGAN + record.at / rate
        yield json.dumps(
            {
                "id": f"{record.service}-{offset}",
                "origin": {"topic": "requests", "partition": 0, "offset": offset},
                "outcome": "completed",
                "status": 200,
                "model": alias,
                "body": {"usage": {"prompt_tokens": record.prompt, "completion_tokens": record.output}},
                "timing": {"received": received, "finished": received},
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=int, default=len(SIZES), help="so many of the sizes")
    parser.add_argument("--rate", type=float, default=1.0, help="requests come so many times as fast")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    aliases = list(SIZES)[: options.models]
    lines = results(read(options.trace), aliases, rate=options.rate)
    (options.folder / "results.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    models = {
        alias: {
            "model": f"trace/{alias}",
            **({"quantization": "fp8"} if SIZES[alias].byte_per_weight == 1 else {}),
            "objective": OBJECTIVE.model_dump(),
        }
        for alias in aliases
    }
    (options.folder / "models.yaml").write_text(yaml.safe_dump({"models": models}, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main()
