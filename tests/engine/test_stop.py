"""The engine's stop: every process ends by itself, at once, and nothing of it is left on the machine."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import zmq.asyncio

from service.engine.frontend.frontend import close_client

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, time
from pathlib import Path
from tests.bench.setting import ALIASES, arguments
from service.engine import MultiModelEngine

async def main(models):
    engine = MultiModelEngine({alias: arguments(models / alias) for alias in ALIASES})
    await engine.initialize("llama")
    await engine.switch("qwen")
    pids = (engine.core_pid, *engine.worker_pids)
    segments = {line.split()[5] for pid in pids for line in open(f"/proc/{pid}/maps") if "/dev/shm/" in line}
    started = time.perf_counter()
    engine.shutdown()
    took = time.perf_counter() - started
    running = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    print("stopped", took, len(segments), len(running), sum(Path(name).exists() for name in segments))

if __name__ == "__main__":
    import sys
    asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.delicate
@pytest.mark.long
def test_an_idle_engine_stops_within_seconds_and_leaves_nothing_behind(tmp_path: Path) -> None:
    from deploy.local.models import ensure_models
    from deploy.local.setup import home

    models = home() / "models"
    ensure_models(models)
    script = tmp_path / "stop.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(models)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    took, segments, running, left = done.stdout.splitlines()[-1].removeprefix("stopped ").split()
    assert int(segments) > 0
    assert (running, left) == ("0", "0")
    assert "leaked" not in done.stderr
    assert "killing" not in done.stderr
    assert not list(tmp_path.glob("gearshift-*"))
    assert float(took) < 2


def test_a_client_whose_loop_has_ended_is_closed_when_the_garbage_collector_takes_all_at_once() -> None:
    from vllm.v1.engine.core_client import BackgroundResources

    async def read(socket: zmq.asyncio.Socket) -> None:
        await socket.recv_multipart()

    async def with_a_task() -> None:
        resources.output_socket, resources.input_socket = context.socket(zmq.PULL), context.socket(zmq.ROUTER)
        resources.output_socket.bind("inproc://answers")
        resources.output_queue_task = asyncio.create_task(read(resources.output_socket))
        await asyncio.sleep(0)

    context = zmq.asyncio.Context()
    resources = BackgroundResources(ctx=context)
    asyncio.run(with_a_task())
    context._sockets.clear()  # weak references, which the collector clears before it calls __del__
    closing = Thread(target=close_client, args=(SimpleNamespace(shutdown=resources, resources=resources),), daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert context.closed
