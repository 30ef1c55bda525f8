"""A short run of the bench of the durable door."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from deploy.local.broker import LocalBroker

pytestmark = [pytest.mark.broker, pytest.mark.long]

SIZES = ("--lines=600", "--kills=1", "--responses=60", "--calls=200", "--keys=20", "--step-s=0.05")


@pytest.mark.timeout(900)
async def test_what_was_asked_durably_is_there_once_after_kills_of_workers_and_broker(tmp_path: Path) -> None:
    if reason := LocalBroker.missing():
        pytest.skip(f"needs a broker that may be killed: {reason}")
    file = tmp_path / "figures.json"
    only = ["--only", "batch", "background", "idempotent", "usage"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.door", *SIZES, "--json", str(file), *only),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await process.wait()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # it ends its workers and its broker
            await process.wait()
    told = json.loads(file.read_text())
    assert told["missed"] == ["batch: kills >= 10"]
    figures = told["figures"]
    assert (figures["kills"], figures["background"], figures["idempotent_results"]) == (1, 60, 20)
    assert figures["usage_tokens"] > 600
