"""The guard between Kafka's Java and the process that started it: it stops Java when its standard input closes.

``python guard.py attached|detached FOLDER JAVA ...``. Standard library only.
"""

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

READY = b"Kafka Server started"
STOP_WITHIN_S = 15.0


def guard(watch: str, folder: Path, command: list[str]) -> int:
    """Run Java until it ends, we are told to end it, or whoever started us is gone; then its data goes too."""
    java = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - the guard has one thread
    )
    signal.signal(signal.SIGTERM, lambda *_: java.terminate())
    signal.signal(signal.SIGUSR1, lambda *_: java.kill())
    assert java.stdout is not None
    abandoned = False
    with (folder / "broker.log").open("ab") as log, selectors.DefaultSelector() as events:
        events.register(java.stdout, selectors.EVENT_READ)
        if watch == "attached":
            events.register(sys.stdin, selectors.EVENT_READ)
        while True:
            readable = {key.fileobj for key, _ in events.select()}
            if java.stdout in readable and not relay(java.stdout, log):
                break
            if sys.stdin in readable:
                abandoned = True
                events.unregister(sys.stdin)
                java.terminate()
                signal.signal(signal.SIGALRM, lambda *_: java.kill())
                signal.alarm(int(STOP_WITHIN_S))
    code = java.wait()
    if abandoned:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def relay(source: IO[bytes], log: IO[bytes]) -> bool:
    """Copy what Java said to the log, and report when it is up. False at the end."""
    data = os.read(source.fileno(), 65536)
    log.write(data)
    log.flush()
    if READY in data:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, b"ready\n")
    return bool(data)


def die_with_parent() -> None:
    """Have the kernel kill this process when the guard dies, even by SIGKILL (Linux' PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
