"""What takes too long in the main thread is interrupted there."""

import signal
import subprocess
import threading
import time
from contextlib import suppress

import pytest

from service.engine.system.deadline import deadline


@pytest.mark.delicate
def test_waiting_in_a_system_call_is_interrupted() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"took longer than 0\.05 s"), deadline(0.05):
        subprocess.run(["sleep", "60"], check=False)
    assert time.monotonic() - began < 10


def test_who_retries_on_errors_is_interrupted_too() -> None:
    def try_for_ever() -> None:
        while True:
            with suppress(Exception):
                threading.Event().wait(60)

    with pytest.raises(TimeoutError), deadline(0.05):
        try_for_ever()


def test_what_ends_in_time_is_left_alone_and_so_is_everything_afterwards() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    for seconds in (60, None):
        with deadline(seconds):
            pass
    assert signal.getsignal(signal.SIGALRM) is handler


def test_an_error_of_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(LookupError), deadline(60):
        raise LookupError


def test_a_timer_that_was_running_goes_on_afterwards() -> None:
    went_off = threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: went_off.set())
    running = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with deadline(60):
            pass
        assert went_off.wait(10)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *running)


def test_another_thread_has_no_deadline() -> None:
    ended = []

    def work() -> None:
        with deadline(0.001):
            threading.Event().wait(0.01)
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]
