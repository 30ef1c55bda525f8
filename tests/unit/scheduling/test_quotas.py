"""What tenants may have of a pool: rates to the token, concurrency that the workers share, and bounded accounts."""

import heapq
import itertools
import random
from pathlib import Path

import pytest

from schemas.status import TenantShare
from service.errors import ConfigError
from service.quotas_file import WatchedQuotas, read_quotas
from service.scheduling.quotas import BURST_S, Quotas


def quotas(folder: Path, text: str) -> Quotas:
    (folder / "quotas.yaml").write_text(text)
    return Quotas(WatchedQuotas(folder / "quotas.yaml"))


def had(workers: list[Quotas], *, latency_s: float, minutes: float, wants_per_s: float) -> int:
    """The tokens that a tenant has had of a pool that it asks for so many requests; all workers hear of each result."""
    random.seed(5)
    tokens, now, end, asked = 0, 0.0, minutes * 60, 0
    ends: list[tuple[float, int, Quotas, float, int]] = []
    numbers, waiting = itertools.count(), dict.fromkeys(range(len(workers)), 0)
    while now < end:
        now += 0.05
        while asked < now * wants_per_s:
            waiting[asked % len(workers)] += 1
            asked += 1
        while ends and ends[0][0] <= now:
            _, _, worker, charge, cost = heapq.heappop(ends)
            worker.end("blue", charge)
            tokens += cost
            for one in workers:
                one.spent("blue", cost, now)
        for number, worker in enumerate(workers):
            while waiting[number] and worker.wait_s("blue", now) == 0:
                waiting[number] -= 1
                charge = worker.begin("blue", 1000, now)
                heapq.heappush(ends, (now + latency_s, next(numbers), worker, charge, random.randint(20, 180)))
    return tokens


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("latency_s", [0.2, 2.0, 20.0])
def test_a_tenant_at_ten_times_its_rate_gets_its_rate(tmp_path, workers, latency_s):
    pool = [quotas(tmp_path, "tenants: {blue: {tokens_per_minute: 60000}}") for _ in range(workers)]
    tokens = had(pool, latency_s=latency_s, minutes=20, wants_per_s=100)
    assert tokens == pytest.approx(20 * 60_000, rel=0.05)


def test_a_tenant_below_its_rate_never_waits(tmp_path):
    pool = [quotas(tmp_path, "tenants: {blue: {tokens_per_minute: 60000}}")]
    tokens = had(pool, latency_s=20, minutes=10, wants_per_s=5)
    assert tokens == pytest.approx(5 * 580 * 100, rel=0.05)


@pytest.mark.parametrize("refused", [0, 1, 100])
def test_what_is_refused_makes_nothing_cheaper(tmp_path, refused):
    made = quotas(tmp_path, "default: {tokens_per_minute: 600}")
    for _ in range(refused):
        made.spent("blue", 0, 0.0)
    begun = 0
    while begun < 1000 and made.wait_s("blue", 1.0) == 0:
        made.begin("blue", 500, 1.0)
        begun += 1
    assert begun == 1


def test_what_may_cost_nothing_is_charged_nonetheless(tmp_path):
    made = quotas(tmp_path, "default: {tokens_per_minute: 600}")
    charges = []
    while len(charges) < 1000 and made.wait_s("blue", 0.0) == 0:
        charges.append(made.begin("blue", 0, 0.0))
    assert charges == [1.0] * 60


def test_others_and_tenants_without_a_quota_are_not_limited(tmp_path):
    made = quotas(tmp_path, "default: {concurrent: 1}\ntenants: {blue: {}}")
    assert [made.limited(tenant) for tenant in ("blue", "red", "")] == [False, True, True]
    made.begin("red", 1, 0.0)
    assert made.wait_s("red", 0.0) == float("inf")
    assert made.wait_s("", 0.0) == 0.0


def test_workers_share_what_may_be_under_way_and_each_keeps_its_part(tmp_path):
    made = quotas(tmp_path, "default: {concurrent: 8}")

    def may_begin() -> int:
        begun = 0
        while made.wait_s("blue", 0.0) == 0:
            made.begin("blue", 1, 0.0)
            begun += 1
        for _ in range(begun):
            made.end("blue", 0.0)
        return begun

    assert may_begin() == 8
    made.others({"blue": [TenantShare(under_way=3)], "red": [TenantShare(under_way=8)]})
    assert may_begin() == 5
    made.others({"blue": [TenantShare(under_way=8)]})
    assert may_begin() == 4  # as soon as the other one has so many fewer, it is 8 together
    made.others({"blue": [TenantShare(under_way=1)] * 20})
    assert may_begin() == 1  # one that nobody lets begin would wait for ever
    made.others({})
    assert may_begin() == 8  # what one that has gone had is nobody's


def test_bytes_are_the_pools(tmp_path):
    made = quotas(tmp_path, "default: {waiting_bytes: 100}")
    made.hold("blue", 40)
    assert not made.is_full("blue", 60)
    made.others({"blue": [TenantShare(bytes=30)]})
    assert made.is_full("blue", 31)
    assert not made.is_full("blue", 30)
    assert not made.is_full("red", 100)
    made.let_go("blue", 40)
    assert not made.is_full("blue", 70)


def test_a_debt_is_paid_off_at_the_rate(tmp_path):
    made = quotas(tmp_path, "default: {tokens_per_minute: 60}")
    made.spent("blue", 1000, 0.0)
    wait_s = made.wait_s("blue", 0.0)
    assert wait_s == pytest.approx(1000 - BURST_S, abs=2)
    assert made.wait_s("blue", wait_s - 2) > 0
    assert made.wait_s("blue", wait_s) == 0
    assert made.wait_s("red", 0.0) == 0


def test_a_clock_that_goes_back_gives_nothing_twice(tmp_path):
    made = quotas(tmp_path, "default: {tokens_per_minute: 60}")
    made.spent("blue", 100, 1000.0)
    before = made.wait_s("blue", 1010.0)
    made.wait_s("blue", 0.0)
    assert made.wait_s("blue", 1010.0) == before


def test_names_that_somebody_makes_up_are_forgotten_and_debts_are_not(tmp_path):
    made = quotas(tmp_path, "default: {tokens_per_minute: 60, concurrent: 9}")
    made.spent("blue", 100_000, 0.0)
    made.begin("red", 1, 0.0)
    for number in range(20_000):
        made.wait_s(f"made up {number}", 1.0)
    assert len(made._accounts) < 5000
    assert made.wait_s("blue", 1.0) > 1000
    assert set(made.shares(10)) == {"red"}


@pytest.mark.parametrize(
    "wrong",
    [
        "defualt: {}",
        "default: {tokens: 5}",
        "default: {tokens_per_minute: 0}",
        "default: {concurrent: '5'}",
        "tenants: [blue]",
        "{",
        "[]",
    ],
)
def test_a_file_that_says_what_can_t_be_is_refused_by_name(tmp_path, wrong):
    (tmp_path / "quotas.yaml").write_text(wrong)
    with pytest.raises(ConfigError, match="quotas_file"):
        read_quotas(tmp_path / "quotas.yaml")


BROKEN = [
    "default: {concurrent: oh}",
    "default: {concurrent: 0x_}",
    "default: {concurrent: 2024-99-99}",
    "default: {concurrent: !!bool maybe}",
    "default: {concurrent: !!timestamp noon}",
    f"default: {{concurrent: {'9' * 5000}}}",
    "default: " + "[" * 5000,
]
"""The last ones raise ValueError, KeyError, AttributeError and RecursionError in the library that reads YAML."""


def test_a_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(tmp_path):
    made = quotas(tmp_path, "default: {concurrent: 1}")
    for text in ("default: {concurrent: 25}", *BROKEN):
        (tmp_path / "quotas.yaml").write_text(text)
        made.limits.look()
        assert made.limits.now.of("blue").concurrent == 25


def test_the_example_for_operators_is_a_file_of_quotas(tmp_path):
    guide = (Path(__file__).parents[3] / "deploy" / "OPERATING.md").read_text()
    (tmp_path / "quotas.yaml").write_text(guide.split("## Quotas")[1].split("```yaml")[1].split("```")[0])
    found = read_quotas(tmp_path / "quotas.yaml")
    assert (found.of("blue").concurrent, found.of("nobody").concurrent, found.of("batch").concurrent) == (64, 16, None)
