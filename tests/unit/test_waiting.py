"""A test that runs out of time says where it hung."""

import pytest

pytest_plugins = ["pytester"]
HANGS = """
import asyncio

import pytest


async def somebody_who_never_comes() -> None:
    await asyncio.Event().wait()


@pytest.mark.timeout(2)
async def test_it() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(somebody_who_never_comes(), name="the one that is waited for")
"""


def test_what_each_task_waits_for_is_in_the_report(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import pytest_runtest_makereport  # noqa: F401")
    pytester.makepyfile(HANGS)
    found = pytester.runpytest_inprocess("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*what its tasks wait for*", "the one that is waited for: somebody_who_never_comes (*"])
