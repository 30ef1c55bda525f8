"""What the whole session shares: a real broker and small models. Both are made at first use only."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from deploy.local.apache_kafka import NoBroker
from deploy.local.broker import Broker, find_broker
from deploy.local.models import ensure_models
from deploy.local.setup import home
from tests.support import waiting
from tests.support.judge import Counts

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads that wait for each other at every operation wait for the machine, where others are at work: with two, an
# engine in this process took ten times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What fails in a specification says which values it compared, as it does in a test's own file.
pytest.register_assert_rewrite(*(f"tests.support.{what}_spec" for what in ("bus", "context", "engine", "log")))
# A shell's background jobs ignore interrupts, and so would all that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Machines are shared: how long an example takes there says nothing about the code.
hypothesis.settings.register_profile("shared", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("shared")
# A command that runs in this process has an output of its own, where nothing of a worker's beside it belongs.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Counts())


gc.disable()  # until all is imported that the tests import


def pytest_collection_finish() -> None:
    """No search for garbage looks through what was imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of a test that ran out of time, what each of its tasks waited for."""
    report = yield
    if call.excinfo is not None and "from pytest-timeout" in str(call.excinfo.value):
        report.sections.append(("what its tasks wait for", waiting.told()))
    return report


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """The session's broker: ``.bootstrap``. For tests that restart or kill one there is ``own_broker``."""
    try:
        found = find_broker()
    except NoBroker as reason:
        pytest.exit(str(reason), returncode=2)
    with found:
        yield found


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    """Checkpoints by alias: ``llama``, ``qwen``, ``lynx``."""
    return ensure_models(home() / "models")
