"""What grows is told, and what is only busy is not."""

import asyncio
import os
import threading
from pathlib import Path

from tests.soak import growth as module
from tests.soak.growth import Growth, Sample, Watch, course, growth, kinds, sample
from tests.support.bus import until


def test_what_grows_in_the_second_half_is_told_and_what_grew_at_the_start_is_not() -> None:
    start = [Sample(1000 + 10 * n, n, 1) for n in range(100)]
    steady = [Sample(2000 + n % 3, 100, 4) for n in range(300)]
    assert growth(start + steady) == Growth(memory=0.0, descriptors=0, threads=0, connections=0, samples=400)
    leaking = [Sample(2000 + n, 100 + n // 100, 4 + n // 200) for n in range(400)]
    assert growth(leaking) == Growth(memory=0.0930, descriptors=2, threads=1, connections=0, samples=400)


def test_connections_may_come_and_go_and_not_become_more_and_more() -> None:
    swinging = [Sample(1000, 7, 1, 40 + n % 30) for n in range(400)]
    assert growth(swinging).connections == 0
    leaking = [Sample(1000, 7, 1, 40 + n % 30 + n // 5) for n in range(400)]
    assert growth(leaking).connections > 15


def test_its_course_is_told_by_parts_of_its_life() -> None:
    life = [Sample((n // 10) << 20, 5 + n // 20, 1, n // 30) for n in range(45)]
    assert course(life, 4) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert kinds(life, 4) == ["5 and 0", "5 and 0", "6 and 0", "6 and 1", "7 and 1"]
    assert course([], 4) == []


async def test_a_process_is_seen_with_what_it_holds(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    before = sample(os.getpid())
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    with (tmp_path / "file").open("w"):
        watch = Watch(lambda: {"me": os.getpid(), "nobody": 2**22 + 1})
        watching = asyncio.create_task(watch.run())
        await until(lambda: bool(watch.seen["me", os.getpid()]))
        watching.cancel()
    release.set()
    thread.join()
    now = watch.seen["me", os.getpid()][0]
    assert (now.threads, now.descriptors) == (before.threads + 1, before.descriptors + 1)
    assert now.memory > 1 << 20
    assert not watch.seen["nobody", 2**22 + 1]
