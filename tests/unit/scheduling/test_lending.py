"""The ledger of lent KV blocks, against pools that allocate, free, cache and preempt as vLLM's do."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service.scheduling.lending import Idle, Ledger, Loan, Overdrawn, Share, Take, loan, returned

SIZES = (3, 5, 8)
FLOORS = (7, 4, 6)
TOTAL = sum(size * floor for size, floor in zip(SIZES, FLOORS, strict=True))


def books(*granted: int) -> Ledger:
    """Models of one size whose floors are ten blocks each, of ten bytes."""
    ledger = Ledger(100 * len(granted))
    for key, blocks in enumerate(granted):
        ledger.join(key, Share(block=10, floor=10, most=10 * len(granted)))
        ledger.grant(key, blocks)
    return ledger


def test_what_nobody_uses_is_lent_before_anything_is_taken():
    assert loan(books(10, 4, 10), 0, 6, [Idle(1, 4, 0), Idle(2, 10, 0)]) == Loan(6)


def test_blocks_without_content_go_before_the_prefix_cache_of_the_least_recently_used():
    idle = [Idle(1, 2, 8, used=1.0), Idle(2, 3, 7, used=2.0)]
    assert loan(books(10, 10, 10), 0, 4, idle) == Loan(4, (Take(1, 2), Take(2, 2)))
    assert loan(books(10, 10, 10), 0, 7, idle) == Loan(7, (Take(1, 4), Take(2, 3)))


def test_above_its_floor_nobody_costs_a_request_of_another_one_its_blocks():
    assert loan(books(10, 15, 5), 0, 3, [Idle(1, 0, 0, held=15), Idle(2, 0, 0, held=5)]) == Loan(0)


def test_below_its_floor_a_model_gets_back_what_another_one_has_above_its_own():
    idle = [Idle(1, 0, 0, held=15), Idle(2, 0, 0, held=10)]
    assert loan(books(5, 15, 10), 0, 2, idle, least=2) == Loan(2, (Take(1, 0, held=2),))
    assert loan(books(5, 15, 10), 0, 30, idle, least=5) == Loan(5, (Take(1, 0, held=5),))
    assert loan(books(5, 15, 10), 0, 30, idle, least=6) == Loan(5, (Take(1, 0, held=5),))
    assert loan(books(5, 15, 10), 0, 30, idle) == Loan(1, (Take(1, 0, held=1),))
    assert loan(books(5, 15, 10), 0, 30, [Idle(1, 2, 0, held=13), idle[1]]) == Loan(2, (Take(1, 2),))


def test_nothing_is_taken_above_the_floor_that_would_not_do():
    idle = [Idle(1, 1, 3, held=6), Idle(2, 0, 0, held=10)]
    assert loan(books(10, 10, 10), 0, 9, idle, least=4) == Loan(4, (Take(1, 4),))
    assert loan(books(10, 10, 10), 0, 9, idle, least=5) == Loan(0)
    assert loan(books(8, 10, 10), 0, 9, idle, least=7) == Loan(2)


def test_nobody_is_taken_below_its_own_floor_for_that_of_another_one():
    idle = [Idle(1, 0, 0, held=14), Idle(2, 0, 0, held=14)]
    assert loan(books(2, 14, 14), 0, 8, idle, least=8) == Loan(8, (Take(1, 0, held=4), Take(2, 0, held=4)))


def test_blocks_of_another_size_are_counted_in_bytes():
    ledger = Ledger(100)
    ledger.join(0, Share(block=10, floor=5, most=10))
    ledger.join(1, Share(block=7, floor=7, most=14))
    ledger.grant(0, 5)
    ledger.grant(1, 7)
    assert ledger.unassigned == 1
    assert loan(ledger, 0, 2, [Idle(1, 7, 0)]) == Loan(2, (Take(1, 3),))
    assert loan(ledger, 0, 9, [Idle(1, 7, 0)]) == Loan(5, (Take(1, 7),))


def test_where_lending_ends_what_is_borrowed_comes_back_and_nobody_gets_more_than_its_floor():
    ledger = books(16, 9, 5)
    with pytest.raises(Overdrawn):
        ledger.close()
    assert returned(ledger, [Idle(0, 3, 2, held=11), Idle(1, 9, 0), Idle(2, 5, 0)]) == (Take(0, 5, held=1),)
    ledger.withdraw(0, 6)
    ledger.close()
    assert loan(ledger, 0, 3, [Idle(1, 9, 0), Idle(2, 5, 0)]) == Loan(0)
    assert loan(ledger, 2, 9, [Idle(0, 10, 0), Idle(1, 9, 0)]) == Loan(5)


def test_more_than_there_is_can_be_neither_granted_nor_withdrawn():
    ledger = books(5, 15)
    for blocks in (1, 16):
        with pytest.raises(Overdrawn):
            ledger.grant(0, blocks)
    with pytest.raises(Overdrawn):
        ledger.withdraw(0, 6)


@dataclass
class Pool:
    """A model's pool of blocks, by ids: what it may use is in one of three, and all others are withheld."""

    most: int
    free: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    requests: list[list[int]] = field(default_factory=list)
    withheld: list[int] = field(default_factory=list)
    used: float = 0.0

    @property
    def ids(self) -> list[int]:
        return [*self.free, *self.cached, *self.withheld, *(each for request in self.requests for each in request)]

    @property
    def may_use(self) -> int:
        return self.most - len(self.withheld)

    def idle(self, key: int) -> Idle:
        return Idle(key, len(self.free), len(self.cached), sum(map(len, self.requests)), self.used)

    def preempt(self, blocks: int) -> None:
        while blocks > 0 and self.requests:
            gone = self.requests.pop()
            blocks -= len(gone)
            self.free += gone

    def withhold(self, blocks: int) -> None:
        for _ in range(blocks):
            self.withheld.append((self.free or self.cached).pop(0))


class Lending(RuleBasedStateMachine):
    """Three models of blocks of different sizes take turns; the one that runs asks for blocks, others are idle."""

    @initialize()
    def begin(self):
        self.ledger = Ledger(TOTAL)
        self.pools: dict[int, Pool] = {}
        self.turn, self.clock = 0, 0.0

    @precondition(lambda self: len(self.pools) < len(SIZES))
    @rule(data=strategies.data())
    def load(self, data):
        key = data.draw(strategies.sampled_from(sorted(set(range(len(SIZES))) - set(self.pools))))
        most = TOTAL // SIZES[key]
        self.pools[key] = Pool(most, withheld=list(range(most)))
        self.ledger.join(key, Share(block=SIZES[key], floor=FLOORS[key], most=most))

    @precondition(lambda self: self.pools)
    @rule(data=strategies.data())
    def drop(self, data):
        key = data.draw(strategies.sampled_from(sorted(self.pools)))
        del self.pools[key]
        self.ledger.leave(key)

    @precondition(lambda self: self.pools)
    @rule(data=strategies.data())
    def switch(self, data):
        self.turn = data.draw(strategies.sampled_from(sorted(self.pools)))
        self.clock += 1
        self.pools[self.turn].used = self.clock

    @precondition(lambda self: self.turn in self.pools)
    @rule(blocks=strategies.integers(1, 30))
    def request(self, blocks):
        """As vLLM asks: out of what is free, and of the cache; and then by a loan."""
        pool = self.pools[self.turn]
        short = blocks - len(pool.free) - len(pool.cached)
        if short > 0:
            self.borrow(short)
        if len(pool.free) + len(pool.cached) >= blocks:
            pool.requests.append([(pool.free or pool.cached).pop(0) for _ in range(blocks)])

    @precondition(lambda self: self.turn in self.pools and self.pools[self.turn].requests)
    @rule(data=strategies.data())
    def end(self, data):
        pool = self.pools[self.turn]
        gone = pool.requests.pop(data.draw(strategies.integers(0, len(pool.requests) - 1)))
        cached = data.draw(strategies.integers(0, len(gone)))
        pool.cached += gone[:cached]
        pool.free += gone[cached:]

    @precondition(lambda self: self.turn in self.pools)
    @rule()
    def floor_is_had_back(self):
        """Whatever the others hold, and with their requests preempted if need be."""
        share = self.ledger[self.turn]
        if (due := share.floor - share.granted) > 0:
            assert self.borrow(due) >= due

    @precondition(lambda self: self.clock > 3 and self.ledger.lends)
    @rule()
    def end_lending(self):
        for take in returned(self.ledger, [pool.idle(key) for key, pool in self.pools.items()]):
            self.carry_out(take)
        self.ledger.close()

    @invariant()
    def a_closed_ledger_lends_nothing(self):
        if hasattr(self, "ledger") and not self.ledger.lends:
            assert all(self.ledger[key].granted <= FLOORS[key] for key in self.pools)

    def borrow(self, blocks: int) -> int:
        pool = self.pools[self.turn]
        floors = {key: sum(map(len, each.requests)) for key, each in self.pools.items()}
        idle = [each.idle(key) for key, each in self.pools.items() if key != self.turn]
        found = loan(self.ledger, self.turn, blocks + 3, idle, least=blocks)
        assert found.blocks <= blocks + 3
        if found.blocks < blocks:
            assert found.blocks == max(0, self.ledger[self.turn].floor - self.ledger[self.turn].granted)
        for take in found.takes:
            if take.held:
                assert floors[take.key] > self.ledger[take.key].floor - len(self.pools[take.key].cached)
                assert self.ledger[self.turn].granted < self.ledger[self.turn].floor
            self.carry_out(take)
        self.ledger.grant(self.turn, found.blocks)
        pool.free += pool.withheld[: found.blocks]
        del pool.withheld[: found.blocks]
        return found.blocks

    def carry_out(self, take: Take) -> None:
        pool, before = self.pools[take.key], self.ledger[take.key]
        pool.withhold(take.blocks)
        pool.preempt(take.held - len(pool.free) - len(pool.cached))
        pool.withhold(take.held)
        self.ledger.withdraw(take.key, take.blocks + take.held)
        if take.held:
            assert self.ledger[take.key].granted >= before.floor

    @invariant()
    def no_block_is_in_two_places(self):
        for key, pool in getattr(self, "pools", {}).items():
            assert sorted(pool.ids) == list(range(pool.most))
            assert pool.may_use == self.ledger[key].granted

    @invariant()
    def the_sum_is_never_exceeded(self):
        used = sum(SIZES[key] * pool.may_use for key, pool in getattr(self, "pools", {}).items())
        assert used <= TOTAL


Lending.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLending = Lending.TestCase
