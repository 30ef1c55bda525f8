"""Every check there is, five at a time: while the tests of the bus wait for their broker, engines compute.

Run by ``test``. Each line that a check says has its name before it; a table of all of them is the end. The exit code
is 0 when every check passed, else that of the first one that did not. Nothing that was started outlives this process,
however that ends. Standard library only.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deploy.local.setup import ROOT, home

AT_ONCE = 5
END_WITHIN_S = 60.0
"""How long an interrupted check may take to end its engine and its broker."""
INTERRUPTED = 130
MODELS = f"python -m deploy.local.models {shlex.quote(str(home() / 'models'))}"


@dataclass(frozen=True)
class Check:
    """A command line for a shell in the checkout, that passes with 0. It begins when those it comes ``after`` ended."""

    name: str
    command: str
    after: tuple[str, ...] = ()
    kept: str = ""
    """The file of what it reached, where it counts for the coverage."""


OLDER = Check("set-up", "GEARSHIFT_VLLM=0.26 deploy/local/run true")
"""The environment of the other vLLM."""
OTHERS = "GEARSHIFT_VLLM=0.26 deploy/local/run pytest"
EAGER = "TORCHDYNAMO_DISABLE=1 VLLM_USE_AOT_COMPILE=0"
"""vLLM has torch compile some functions for a CPU, in each engine anew, which takes up to 14 seconds. What is about
that, and models that are compiled, are run without this, and on 0.26 where it does not compile them ahead."""

_COUNTED = re.compile(r"\d+ \w+(, \d+ \w+)* in \d+\.\d+s\b")


@dataclass
class Outcome:
    check: Check
    code: int = -1
    took_s: float = 0.0
    processors_s: float = 0.0
    """What it and all that it waited for had of the processors: more than what it took, where these were free."""
    last: str = ""
    """What pytest counted at its end, whatever libraries said behind that; of other checks the last line."""
    failures: list[str] = field(default_factory=list)
    """What pytest named at its end, and a floor that was not reached."""

    @property
    def passed(self) -> bool:
        return self.code == 0

    def hear(self, line: str) -> None:
        print(f"{self.check.name:>8} | {line}", flush=True)
        if line.startswith(("FAILED ", "ERROR ", "FAIL ")):
            self.failures.append(line)
        text = line.strip("= ")
        if text and (_COUNTED.match(text) or not _COUNTED.match(self.last)):
            self.last = text

    def lines(self) -> Iterator[str]:
        verdict = "ok" if self.passed else f"FAILED ({self.code})"
        took, spent = _minutes(self.took_s), _minutes(self.processors_s)
        yield f"{self.check.name:>8}   {verdict:<11} {took}, of processors {spent}   {self.last}"
        yield from (f"           {failure}" for failure in self.failures)


def _minutes(seconds: float) -> str:
    return "{:>3} min {:>2} s".format(*divmod(round(seconds), 60))


def some(name: str, tests: str, *after: str, variables: str = "", covered: bool = False) -> Check:
    """Some of the tests, as pytest's arguments. Where they are ``covered``, what they reach is kept.

    Having it kept takes ten seconds at the start, and of pure Python a tenth to a third more.
    """
    if not covered:
        return Check(name, f"{variables} pytest {tests} --durations=30".lstrip(), after)
    kept = f".coverage-{name.replace(' ', '-')}.json"
    run = f"{variables} slipcover --out {kept} -m pytest {tests} --durations=30".lstrip()
    return Check(name, f"rm -f {kept} && {run}", after, kept)


WAITING = ("tests/unit/worker", "tests/unit/http")
"""Of the units, those that mostly wait: a half of their time."""


def every() -> list[Check]:
    """In the order in which they begin, each as soon as there is room and all that it comes after has passed or failed.

    First what others come after, then what mostly waits, then what computes: begun last, the one before would leave
    processors idle.
    """
    units = " ".join(["tests/unit tests/soak", *(f"--ignore={folder}" for folder in WAITING)])
    own = "own and not compiled and not long"
    tests = [
        some("bus h-z", "tests/integration/test_[h-z]*.py tests/fuzz", "broker"),
        some("bus a-g", "tests/integration/test_[a-g]*.py", "broker", covered=True),
        some("worker", " ".join(WAITING), covered=True),
        some("engine", "tests/engine -m 'not own and not long'", "models", variables=EAGER, covered=True),
        some("engines", f"tests/engine -m '{own}'", "kinds", variables=EAGER, covered=True),
        some("compiled", "tests/engine -m 'compiled and not long'", "kinds"),
        some("chaos", "tests/chaos tests/upgrade", "broker"),
        # As on one card of Gaudi: a worker in the core's process. Workers that are processes of their own are above.
        Check("0.26", f"{EAGER} {OTHERS} tests/engine --one-process -m 'parity and not long'", ("models", "set-up")),
        some("units", units, "models", covered=True),
    ]
    counted = [check for check in tests if check.kept]
    # The floor of lines and branches, engine and platforms among them, in percent.
    floor = f"slipcover --merge {' '.join(check.kept for check in counted)} --out .coverage.json --fail-under 92"
    return [
        # vLLM's modules, and torch's, are compiled by one, not by each of several that begin together.
        Check("imports", "python -c 'import service.engine.processes.imports'"),
        Check("models", MODELS, ("imports",)),
        Check("broker", "python -m deploy.local.broker"),
        OLDER,
        Check("types", "mypy"),
        Check("style", "ruff check . && ruff format --check ."),
        Check("layers", "lint-imports"),
        Check("kinds", "python -m tests.support.kinds", ("models",)),
        *tests,
        Check("coverage", floor, tuple(check.name for check in counted)),
    ]


def the_long_ones() -> list[Check]:
    """What ``every`` leaves out: volume, every combination, and all on vLLM 0.26. An hour or two."""
    of_engines = "tests/engine tests/unit/engine"
    return [
        Check("engine", f"{MODELS} && exec pytest tests/engine -m long --durations=30"),
        OLDER,
        Check("rest", "python -m deploy.local.clients && exec pytest --ignore=tests/engine -m long --durations=30"),
        Check("0.26", f"{EAGER} {OTHERS} {of_engines} -m 'not compiled' --durations=30"),
        # As 0.26 has it.
        Check("compiled", f"{OTHERS} {of_engines} -m 'compiled or parity and not long' --durations=30"),
    ]


def ends_with_us() -> None:
    """In a child: interrupts are heard (a shell's background jobs ignore them), and come when we are gone."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(1, signal.SIGINT)  # Linux' PR_SET_PDEATHSIG


async def run(check: Check) -> Outcome:
    """Run it to its end. Where this is cancelled, it is interrupted as by a terminal, and waited for."""
    outcome, began = Outcome(check), time.monotonic()
    said, end = os.pipe()  # our own: asyncio's would have us wait for all that hold it, and not for the check alone
    process = subprocess.Popen(  # noqa: ASYNC220 - asyncio's own would not say what it had of the processors
        ["bash", "-c", check.command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=end,
        start_new_session=True,
        preexec_fn=ends_with_us,  # noqa: PLW1509 - one thread
    )
    os.close(end)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_relay(said, outcome))
        try:
            await _ended(process.pid)
        except asyncio.CancelledError:
            _signal_all(process.pid, signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_ended(process.pid), END_WITHIN_S)
            raise
        finally:
            _signal_all(process.pid, signal.SIGKILL)  # whatever it left behind
            _, status, used = os.wait4(process.pid, 0)  # noqa: ASYNC222 - it has ended
            outcome.code = process.returncode = os.waitstatus_to_exitcode(status)
            outcome.processors_s = used.ru_utime + used.ru_stime
    outcome.took_s = time.monotonic() - began
    return outcome


async def _ended(pid: int) -> None:
    """Wait until a child has ended. What it says of itself is there for ``os.wait4`` still."""
    loop, ended, watched = asyncio.get_running_loop(), asyncio.Event(), os.pidfd_open(pid)
    loop.add_reader(watched, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)


def _signal_all(group: int, number: signal.Signals) -> None:
    """To a process and those that it started, as a terminal does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


async def _relay(said: int, outcome: Outcome) -> None:
    """To the end of what is written to the pipe, which is closed then."""
    stream = asyncio.StreamReader(limit=1 << 24)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(said, "rb")
    )
    with contextlib.closing(transport):
        async for line in stream:
            outcome.hear(line.decode(errors="replace").rstrip())


async def run_all(checks: Sequence[Check], *, at_once: int = AT_ONCE) -> list[Outcome]:
    """Run so many at a time, each begun in its turn; the outcomes in the order of the checks."""
    outcomes: dict[str, Outcome] = {}
    left = list(checks)
    ended = asyncio.Condition()

    def ready() -> Check | None:
        return next((check for check in left if outcomes.keys() >= set(check.after)), None)

    async def lane() -> None:
        while left:
            async with ended:
                await ended.wait_for(lambda: not left or ready() is not None)
                check = ready()
                if check is None:
                    return
                left.remove(check)
            outcomes[check.name] = await run(check)
            async with ended:
                ended.notify_all()

    async with asyncio.TaskGroup() as lanes:
        for _ in range(at_once):
            lanes.create_task(lane())
    return [outcomes[check.name] for check in checks]


async def main(checks: Sequence[Check]) -> int:
    """Run the checks, and tell of each; the exit code."""
    us = asyncio.current_task()
    assert us is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, us.cancel)
    outcomes = await run_all(checks)
    print()
    for outcome in outcomes:
        print("\n".join(outcome.lines()))
    return next((outcome.code for outcome in outcomes if not outcome.passed), 0)


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(the_long_ones() if "--long" in sys.argv else every())))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(INTERRUPTED)
