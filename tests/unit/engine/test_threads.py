"""On which CPUs the threads of a process run that were started by one that is bound to a single CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.engine.system import threads

CPUS = sorted(os.sched_getaffinity(0))
BETWEEN = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
PROCESS = """
import os, sys, threading
from pathlib import Path
from service.engine.system import threads
from service.engine.system.threads import aside, spread

first, second, bound, allowed = map(int, sys.argv[2:])
threads._NODES = Path(sys.argv[1])

def on(cpu, run):
    os.sched_setaffinity(0, {cpu})
    run()

if not allowed:
    os.sched_setaffinity(os.getppid(), {first})
os.sched_setaffinity(0, {first})
end = threading.Event()
if bound:
    threading.Thread(target=on, args=(second, end.wait)).start()
    while not any(os.sched_getaffinity(int(task)) == {second} for task in os.listdir("/proc/self/task")):
        pass

def work():
    further = spread()
    seen = [further, os.sched_getaffinity(0)]
    with aside(further):
        seen.append(os.sched_getaffinity(0))
    seen.append(os.sched_getaffinity(0))
    print([sorted(each) for each in seen])

thread = threading.Thread(target=work)
thread.start()
thread.join()
end.set()
"""


def nodes(folder: Path, *lists: str) -> Path:
    """As the kernel tells which CPUs are of which memory."""
    for node, listed in enumerate(lists):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}/cpulist").write_text(f"{listed}\n")
    return folder


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")
@pytest.mark.parametrize(
    ("bound", "allowed", "memory", "runs_on"),
    [
        pytest.param(False, True, [[0, 1]], [[1], [0], [1], [0]], id="a CPU that only the parent has"),
        pytest.param(True, True, [[0, 1]], [[], [0, 1], [0, 1], [0, 1]], id="every CPU has a thread"),
        pytest.param(False, False, [[0, 1]], [[], [0], [0], [0]], id="the parent has no other CPU"),
        pytest.param(False, True, [[0], [1]], [[], [0], [0], [0]], id="the other CPU is of another memory"),
        pytest.param(False, True, [], [[1], [0], [1], [0]], id="a kernel that knows no memories"),
    ],
)
def test_a_thread_runs_wherever_its_process_does_and_beside_it_where_the_parent_may(
    tmp_path: Path, bound: bool, allowed: bool, memory: list[list[int]], runs_on: list[list[int]]
) -> None:
    cpus = CPUS[:2]
    lists = [",".join(str(cpus[at]) for at in each) for each in memory]
    arguments = [str(int(each)) for each in (*cpus, bound, allowed)]
    command = [sys.executable, "-c", BETWEEN, sys.executable, "-c", PROCESS, nodes(tmp_path, *lists), *arguments]
    os.sched_setaffinity(0, cpus)
    try:
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    finally:
        os.sched_setaffinity(0, CPUS)
    assert told.strip() == str([[cpus[at] for at in each] for each in runs_on])


def test_cpus_of_another_memory_are_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(tmp_path, "0-1,4", "2-3,5", "")  # the last one has memory only
    monkeypatch.setattr(threads, "_NODES", tmp_path)
    assert threads._far({0}) == {2, 3, 5}
    assert threads._far({3, 5}) == {0, 1, 4}
    assert threads._far({1, 2}) == set()


def test_cpus_that_were_taken_away_meanwhile_leave_a_thread_where_it_is() -> None:
    with threads.aside({10_000}):
        assert sorted(os.sched_getaffinity(0)) == CPUS
    assert sorted(os.sched_getaffinity(0)) == CPUS


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", [0, 1, 2, 3, 8]), ("0 1 2", [0, 1, 2]), ("{4,6-7}", [4, 6, 7]), ("\n", []), ("11", [11])],
)
def test_lists_of_cpus_are_read_as_the_kernel_and_openmp_write_them(text: str, cpus: list[int]) -> None:
    assert threads.listed(text) == cpus
