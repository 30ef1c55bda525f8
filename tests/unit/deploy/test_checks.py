"""The checks of ``deploy/local/test``: several at a time, all of them told, and none left behind."""

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deploy.local.checks import WAITING, Check, Outcome, every, main, run_all, the_long_ones
from deploy.local.setup import ROOT
from tests.support.bus import until
from tests.support.waiting import PATIENCE_S


async def test_two_run_side_by_side_and_the_next_begins_when_one_ends(tmp_path: Path) -> None:
    meeting = f"touch {tmp_path}/here; until [[ -e {tmp_path}/third ]]; do sleep 0.05; done"
    checks = [Check("first", meeting), Check("second", "true"), Check("third", f"touch {tmp_path}/third")]
    assert [(one.check.name, one.code) for one in await run_all(checks, at_once=2)] == [
        ("first", 0),
        ("second", 0),
        ("third", 0),
    ]


async def test_one_begins_when_those_that_it_comes_after_have_ended_however_they_did(tmp_path: Path) -> None:
    checks = [
        Check("last", f"ls {tmp_path}/a {tmp_path}/b", ("a", "b")),
        Check("a", f"sleep 0.2; touch {tmp_path}/a"),
        Check("b", f"touch {tmp_path}/b; exit 1"),
    ]
    for at_once in (1, 4):
        assert [one.code for one in await run_all(checks, at_once=at_once)] == [0, 0, 1]
        (tmp_path / "a").unlink()


@pytest.mark.parametrize("checks", [every(), the_long_ones()])
def test_each_comes_after_checks_that_there_are_and_that_come_before_it(checks: list[Check]) -> None:
    for place, check in enumerate(checks):
        assert set(check.after) <= {before.name for before in checks[:place]}


async def test_one_that_fails_is_told_with_what_it_named_and_the_others_go_on(capsys) -> None:
    failed = "FAILED tests/some.py::test_it - it is broken"
    failing = f"echo '{failed}'; echo '=== 1 failed, 2 passed in 3.00s (0:00:03) ==='; echo spans are lost; exit 3"
    broken, sound = await run_all([Check("broken", failing), Check("sound", "echo all is well >&2")], at_once=1)
    assert (broken.code, broken.passed, sound.passed) == (3, False, True)
    first, second = broken.lines()
    spent = r"0 min +\d+ s, of processors +0 min +\d+ s"
    assert re.fullmatch(rf" *broken +FAILED \(3\) +{spent} +1 failed, 2 passed in 3\.00s \(0:00:03\)", first)
    assert second.strip() == failed
    (only,) = sound.lines()
    assert re.fullmatch(rf" *sound +ok +{spent} +all is well", only)
    assert "  broken | FAILED tests/some.py" in capsys.readouterr().out


async def test_what_a_check_leaves_behind_is_ended_with_it() -> None:
    (left,) = await run_all([Check("leaves", "sleep 600 & echo $!")])
    assert left.passed

    def gone() -> bool:
        try:
            return psutil.Process(int(left.last)).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    await until(gone)


def test_the_exit_code_is_that_of_the_first_one_that_failed() -> None:
    assert asyncio.run(main([Check("one", "true"), Check("two", "true")])) == 0
    failing = [Check("one", "true"), Check("two", "sleep 0.2; exit 3"), Check("three", "exit 4", ("two",))]
    assert asyncio.run(main(failing)) == 3


def test_a_time_is_told_in_minutes_and_seconds() -> None:
    (line,) = Outcome(Check("long", "true"), code=0, took_s=119.7, processors_s=61.2).lines()
    assert " ".join(line.split()) == "long ok 2 min 0 s, of processors 1 min 1 s"


async def test_what_it_had_of_the_processors_is_told_with_what_its_children_had() -> None:
    spin = "python3 -c 'import time\nwhile time.process_time() < 0.5: pass'"
    (one,) = await run_all([Check("spins", f"{spin} & {spin} & wait; echo done")])
    assert one.passed
    assert 0.9 < one.processors_s < 3
    assert one.last == "done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_check_outlives_the_command(number: signal.Signals) -> None:
    program = (
        "import asyncio\n"
        "from deploy.local.checks import Check, main\n"
        "waiting = 'echo $$; exec sleep 600'\n"
        "asyncio.run(main([Check('one', waiting), Check('two', waiting)]))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as command:
        assert command.stdout is not None
        checks = [psutil.Process(int(command.stdout.readline().split()[-1])) for _ in range(2)]
        command.send_signal(number)
    _, alive = psutil.wait_procs(checks, timeout=PATIENCE_S)
    assert alive == []


@pytest.mark.parametrize(
    ("checks", "marked"),
    [
        (every(), ["parity and not long"]),
        (the_long_ones(), ["not compiled", "compiled or parity and not long"]),
    ],
)
def test_both_versions_are_tested(checks: list[Check], marked: list[str]) -> None:
    older = [check.command for check in checks if "GEARSHIFT_VLLM=0.26 deploy/local/run pytest" in check.command]
    assert [re.findall("-m '(.*?)'", command) for command in older] == [[each] for each in marked]
    assert ["TORCHDYNAMO_DISABLE" in command for command in older] == ["or" not in each for each in marked]


def test_every_folder_of_tests_is_run_once() -> None:
    tests = [check for check in every() if "pytest" in check.command and "0.26" not in check.name]
    words = [word for check in tests for word in check.command.split()]
    whole = [word for word in words if word.startswith("tests/") and word not in WAITING]
    found = sorted(re.findall(r"tests/(\w+)", " ".join(whole)))
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert found == sorted([*folders, "engine", "engine", "integration"])  # which are run in parts:
    assert [words.count(folder) for folder in WAITING] == [1] * len(WAITING)
    assert [word for word in words if word.startswith("--ignore")] == [f"--ignore={folder}" for folder in WAITING]
    written = [word for word in words if word.startswith("tests/integration/")]
    files = sorted(path for word in written for path in ROOT.glob(word))
    assert files == sorted((ROOT / "tests" / "integration").glob("test_*.py"))
    marked = [re.findall("-m '(.*?) and not long'", check.command) for check in tests if "/engine" in check.command]
    assert sorted(marked) == [["compiled"], ["not own"], ["own and not compiled"]]
