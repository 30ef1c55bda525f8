"""KV memory follows need: what idle models don't use is lent to the one that runs, and comes back when it is needed.

Core and worker are in this process, so that vLLM's pools, the ledger and the process's own pages can be asked.
"""

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from schemas.contexts import KvKept, Tier
from service.engine.models.checkpoint import checkpoint_bytes
from service.platforms.base import kv_tensors, storages
from service.scheduling.lending import returned
from service.scheduling.memory import Budgets
from tests.engine.test_faults import failing, platform
from tests.engine.test_parking import Answers, Counted, preemptions, prompt
from tests.support.engines import core_here
from tests.support.one_allocation import ONE_ALLOCATION

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), ONE_ALLOCATION]
KIB = 1 << 10
PAGE = 4096
FLOOR = 1280 * KIB
"""In float32. Twenty blocks of llama's, ten of qwen's, thirteen of lynx's; a request has four at its end."""
ALIASES = ("llama", "qwen", "lynx")
LENGTHS = tuple(range(360, 369))
"""Nine requests: of llama's they are nearly two shares, of qwen's more than there is."""
FEW = LENGTHS[:2]
ANSWER = 50
MORE = [("bfloat16", False), ("bfloat16", True), ("float32", False)]
KINDS = [("float32", True), *(pytest.param(each, marks=pytest.mark.long) for each in MORE)]


def expected_bytes(path: Path) -> int:
    """What a model is taken for where KV memory is lent: with buffers that no checkpoint has."""
    size = checkpoint_bytes(str(path), None)
    return size + size // 32 + (1 << 20)


@contextmanager
def opened(models: dict[str, Path], dtype: str, *, caching: bool, lend: bool = True) -> Iterator[Any]:
    from vllm.engine.arg_utils import EngineArgs

    from service.engine import MultiModelLLM

    common = {"max_model_len": 512, "max_num_seqs": 16, "enforce_eager": True, "enable_prefix_caching": caching}
    floor = FLOOR if dtype == "float32" else FLOOR // 2
    size = expected_bytes if lend else lambda path: checkpoint_bytes(str(path), None)
    device = sum(size(models[alias]) + floor for alias in ALIASES)
    with core_here():
        llm = MultiModelLLM.from_engine_args(
            {alias: EngineArgs(model=str(models[alias]), dtype=dtype, **common) for alias in ALIASES},
            device_memory_bytes=device,
            lend_kv=lend,
        )
        try:
            for alias in ALIASES:
                llm.switch(alias)
            yield llm
        finally:
            llm.shutdown()


@dataclass
class Kind:
    """An engine that lends, and what its models say to LENGTHS where each has its own share only."""

    llm: Any
    dtype: str
    caching: bool
    expected: dict[str, dict[str, tuple[int, ...]]]

    def same(self, alias: str, answers: Answers, *, preempted: bool = False) -> None:
        """What is prefilled again is computed in another way, which in bfloat16 need not come to the same."""
        said = answers.whole()
        expected = {name: self.expected[alias][name] for name in said}
        if preempted and self.dtype == "bfloat16":
            said, expected = ({name: len(each) for name, each in of.items()} for of in (said, expected))
        assert said == expected


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{'cached' if kind[1] else 'uncached'}")
def started(models: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Kind]:
    dtype, caching = request.param
    with opened(models, dtype, caching=caching, lend=False) as llm:
        assert not lending(llm)._members
        expected = {}
        for alias in ALIASES:
            llm.switch(alias)
            expected[alias] = dict(Answers(llm, alias, LENGTHS, ANSWER).whole())
    with opened(models, dtype, caching=caching) as llm:
        yield Kind(llm, dtype, caching, expected)


@pytest.fixture
def kind(started: Kind) -> Kind:
    """All loaded, nobody has a request, and no prefix is known."""
    llm = started.llm
    for answers in Answers.begun:
        llm.abort_request(list(answers.running), model=answers._alias)
    Answers.begun.clear()
    for alias in ALIASES:
        llm.switch(alias)
        llm.reset_prefix_cache(model=alias)
    assert not llm.has_unfinished_requests()
    llm.switch("llama")
    return started


class Sessions:
    """Prompts of one model that come in parts, as vLLM's streaming input has them; each has its blocks in between."""

    def __init__(self, llm: Any, alias: str, lengths: tuple[int, ...]) -> None:
        self._llm, self._alias, self._lengths = llm, alias, lengths
        self._client = llm.context(alias).engine_core
        self.part(0)

    def part(self, number: int) -> None:
        """A part of each, answered in full."""
        from vllm import SamplingParams

        for length in self._lengths:
            asked = prompt(length if number == 0 else 5)
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            request = self._llm.context(self._alias).input_processor.process_inputs(
                f"session-{length}", asked, params, supported_tasks=("generate",), resumable=True
            )
            self._client.add_request(request)
        while self.scheduler.has_unfinished_requests():
            self._client.get_output()

    @property
    def scheduler(self) -> Any:
        key = ALIASES.index(self._alias)
        return self._client.engine_core.gearshift_contexts.of(key).core.scheduler

    def tokens(self) -> dict[int, list[int]]:
        """All that each has come to."""
        found = self.scheduler.requests
        return {length: list(found[f"session-{length}"].all_token_ids) for length in self._lengths}

    def end(self) -> None:
        self._client.abort_requests([f"session-{length}" for length in self._lengths])


def lending(llm: Any) -> Any:
    return vars(llm.context("llama").engine_core.engine_core)["gearshift_contexts"]._lending


def share(llm: Any, alias: str) -> Any:
    return lending(llm).ledger[ALIASES.index(alias)]


def check(llm: Any) -> None:
    """Nothing is ever used that was not granted, in the pools and in the process's own pages."""
    of = lending(llm)
    ledger, present = of.ledger, 0
    assert ledger.granted <= ledger.total
    contexts = vars(llm.context("llama").engine_core.engine_core)["gearshift_contexts"]
    seated = contexts._workers(workers_contexts)[0].by_key
    for key, member in of._members.items():
        blocks, allowed = member.pool._pool.blocks, set(member.pool.ids)
        free = {block.block_id for block in member.pool._pool.free_block_queue.get_all_free_blocks()}
        used = {block.block_id for block in blocks if block.ref_cnt > 0}
        assert len(allowed) == ledger[key].granted
        assert free | used | {0} == allowed
        assert not free & used
        present += sum(map(pages_present, storages(kv_tensors(seated[key].worker))))
    # What two blocks share of a page counts for both of them.
    assert present * PAGE <= ledger.total + 2 * PAGE * sum(map(len, (m.pool.ids for m in of._members.values())))


def workers_contexts(wrapper: Any) -> Any:
    return vars(wrapper)["gearshift"]


def pages_present(storage: Any) -> int:
    """How many of a storage's pages the system has given."""
    first, last = storage.data_ptr() // PAGE, -(-(storage.data_ptr() + storage.nbytes()) // PAGE)
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(8 * first)
        entries = array("Q", pagemap.read(8 * (last - first)))
    return sum(entry >> 63 for entry in entries)


def test_a_peak_of_two_shares_runs_at_once_and_says_what_it_says_within_one(kind: Kind) -> None:
    llm = kind.llm
    assert [share(llm, alias).floor for alias in ALIASES] == [20, 10, 13]
    before = preemptions(llm, "llama")
    answers = Answers(llm, "llama", LENGTHS, ANSWER)
    answers.until(40)
    scheduler = llm.context("llama").engine_core.engine_core.scheduler
    assert len(scheduler.running) == len(LENGTHS)
    assert share(llm, "llama").borrowed >= 4 * len(LENGTHS) - 20
    check(llm)
    kind.same("llama", answers)
    assert preemptions(llm, "llama") == before
    report = llm.switch("qwen")
    assert report.tier_left is report.tier_found is Tier.RESIDENT
    assert report.kv_borrowed_mb * KIB * KIB == llm.info("llama").kv_borrowed_bytes > 0
    assert report.kv_wait_s > 0
    assert report.kv_preempted == 0


def test_frozen_in_the_middle_of_its_answers_it_keeps_them_while_the_others_get_what_they_need(kind: Kind) -> None:
    llm = kind.llm
    counted = Counted(llm, "llama")
    answers = Answers(llm, "llama", LENGTHS, ANSWER)
    for said in (8, 22, 40):
        answers.until(said)
        for alias in ("qwen", "lynx"):
            llm.switch(alias)
            kind.same(alias, Answers(llm, alias, FEW, ANSWER))
            check(llm)
        assert llm.switch("llama").kv_preempted == 0
    kind.same("llama", answers)
    assert counted.preempted == 0


def test_each_model_has_its_floor_back_from_requests_that_borrowed_it(kind: Kind) -> None:
    llm = kind.llm
    began = time.monotonic()
    begun = {}
    for alias, lengths in (("llama", LENGTHS), ("qwen", LENGTHS[:2]), ("lynx", LENGTHS[:3])):
        llm.switch(alias)
        begun[alias] = Answers(llm, alias, lengths, ANSWER)
        begun[alias].until(40)
        check(llm)
    assert share(llm, "lynx").granted >= share(llm, "lynx").floor - 1
    assert share(llm, "llama").granted >= share(llm, "llama").floor
    waiting = llm.context("llama").engine_core.engine_core.gearshift_contexts.of(0).core.scheduler.waiting
    assert 0 < len(waiting) < len(LENGTHS) - 4
    report = llm.switch("llama")
    assert report.kv_preempted == len(waiting)
    assert 0 < report.kv_wait_s < time.monotonic() - began
    assert llm.info("lynx").kv_preempted == report.kv_preempted
    for alias, answers in begun.items():
        kind.same(alias, answers, preempted=alias == "llama")
        check(llm)


def test_sessions_between_two_parts_give_back_what_they_borrowed_and_go_on_all_the_same(kind: Kind) -> None:
    llm = kind.llm
    undisturbed = Sessions(llm, "llama", LENGTHS)
    undisturbed.part(1)
    expected = undisturbed.tokens()
    undisturbed.end()
    llm.reset_prefix_cache(model="llama")
    sessions = Sessions(llm, "llama", LENGTHS)
    assert share(llm, "llama").borrowed > 0
    begun = {}
    for alias, lengths in (("qwen", LENGTHS[:2]), ("lynx", LENGTHS[:3])):
        llm.switch(alias)
        begun[alias] = Answers(llm, alias, lengths, ANSWER)
        begun[alias].until(40)
        check(llm)
    assert share(llm, "lynx").granted >= share(llm, "lynx").floor - 1
    assert llm.switch("llama").kv_preempted > 0
    for alias, answers in begun.items():
        kind.same(alias, answers)
    llm.switch("llama")
    sessions.part(1)
    if kind.dtype == "float32":
        assert sessions.tokens() == expected
    for take in returned(lending(llm).ledger, [lending(llm)._idle(key) for key in range(len(ALIASES))]):
        lending(llm)._take(take)
    assert not any(share(llm, alias).borrowed for alias in ALIASES)
    check(llm)
    sessions.part(1)
    sessions.end()
    check(llm)


def test_what_the_prefix_cache_of_an_idle_model_had_is_lent_and_never_found_again(kind: Kind) -> None:
    llm = kind.llm
    llm.switch("qwen")
    for _ in range(2):
        kind.same("qwen", Answers(llm, "qwen", LENGTHS, ANSWER))
    assert share(llm, "qwen").borrowed > 0
    llm.switch("llama")
    kind.same("llama", Answers(llm, "llama", LENGTHS, ANSWER))
    check(llm)
    llm.switch("qwen")
    kind.same("qwen", Answers(llm, "qwen", LENGTHS, ANSWER))


def test_nothing_is_taken_for_what_no_block_would_help(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """So vLLM puts off what goes on from a recurrent state of the same step: more blocks are needed than there are."""
    llm = kind.llm
    for alias, lengths in (("qwen", FEW), ("lynx", FEW), ("llama", LENGTHS[:6])):
        llm.switch(alias)
        kind.same(alias, Answers(llm, alias, lengths, ANSWER))
    assert share(llm, "llama").granted >= share(llm, "llama").floor
    manager = lending(llm)._members[0].pool._scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    needs, refused = manager.get_num_blocks_to_allocate, []

    def put_off(*args: Any, **kwargs: Any) -> int:
        if len(refused) < 3:
            refused.append(share(llm, "llama").granted)
            return int(manager.block_pool.num_gpu_blocks) + 1
        return int(needs(*args, **kwargs))

    monkeypatch.setattr(manager, "get_num_blocks_to_allocate", put_off)
    before = [share(llm, alias).granted for alias in ALIASES]
    answers = Answers(llm, "llama", FEW, ANSWER)
    answers.until(1)
    assert len(refused) == 3
    assert [share(llm, alias).granted for alias in ALIASES] == before
    kind.same("llama", answers)
    check(llm)


def test_requests_that_end_elsewhere_and_models_that_are_parked_or_dropped_lend_all_they_had(kind: Kind) -> None:
    llm = kind.llm
    before = preemptions(llm, "llama")
    answers = Answers(llm, "llama", LENGTHS, ANSWER)
    answers.until(10)
    llm.switch("qwen")
    gone = [f"llama-{length}" for length in LENGTHS[4:]]
    llm.abort_request(gone, model="llama")
    answers.running -= set(gone)
    for name in gone:
        del answers.said[name]
    info = llm.park("llama")
    assert (info.tier, info.kv_kept) == (Tier.PARKED, KvKept.IN_USE if kind.caching else KvKept.ALL)
    llm.drop("lynx")
    peak = Answers(llm, "qwen", LENGTHS, ANSWER)
    peak.until(40)
    assert share(llm, "qwen").granted >= 2 * share(llm, "qwen").floor
    assert preemptions(llm, "llama") == before
    check(llm)
    llm.switch("lynx")
    kind.same("lynx", Answers(llm, "lynx", LENGTHS[:3], ANSWER))
    check(llm)
    kind.same("llama", answers)
    kind.same("qwen", peak)
    check(llm)


@pytest.mark.long
def test_parked_with_more_than_its_floor_a_model_keeps_as_many_requests_as_that_has_room_for(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = kind.llm
    device = sum(llm.info(alias).weights_bytes + llm.info(alias).kv_bytes for alias in ALIASES)
    monkeypatch.setattr(llm._residency, "budgets", Budgets(device=device, shared=True))
    answers = Answers(llm, "llama", LENGTHS, ANSWER)
    answers.until(10)
    llm.switch("qwen")
    info = llm.park("llama")
    assert info.kv_kept is not KvKept.NONE
    assert info.kv_kept_bytes > 0
    waiting = llm.context("llama").engine_core.engine_core.gearshift_contexts.of(0).core.scheduler.waiting
    assert 0 < len(waiting) <= len(LENGTHS) - 4
    kind.same("qwen", Answers(llm, "qwen", FEW, ANSWER))
    kind.same("llama", answers, preempted=True)
    check(llm)


def test_where_pages_can_not_be_given_back_nobody_gets_them_and_each_goes_on_with_what_it_has(kind: Kind) -> None:
    llm = kind.llm
    llm.switch("qwen")
    kind.same("qwen", Answers(llm, "qwen", LENGTHS, ANSWER))
    llm.switch("llama")
    answers = Answers(llm, "llama", LENGTHS, ANSWER)
    with failing(platform(), "give_back", whole=False) as failed:
        for _ in range(5):
            answers.step()
        assert failed
        check(llm)
    kind.same("llama", answers)
    assert share(llm, "llama").borrowed > 0
    check(llm)
