"""What members say of themselves through the group protocol, and what the leader makes of it."""

import math
import struct
import zlib

import pytest
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from schemas.contexts import ContextInfo, Tier
from service.consumer.assignor import Placement, _unpack
from service.ports import Holdings
from service.settings import TopicSettings
from tests.support import group

TOPICS = {"requests": 4, "requests.llama": 6, "requests.qwen": 6}


def member(*contexts: ContextInfo, device_bytes: int | None = None) -> Placement:
    return Placement(
        alias_of=TopicSettings().alias_of,
        holdings=lambda: Holdings(contexts=contexts, device_bytes=device_bytes),
        loads=lambda: {"requests.llama": 100.0},
    )


def said(placement: Placement) -> ConsumerProtocolMemberMetadata:
    return group.said(placement, TOPICS)


def resident(alias: str) -> ContextInfo:
    return ContextInfo(alias=alias, tier=Tier.RESIDENT, weights_bytes=1 << 30, kv_bytes=1 << 20)


def given(assignments: dict[str, ConsumerProtocolMemberAssignment], who: str) -> dict[str, list[int]]:
    return {topic: list(numbers) for topic, numbers in assignments[who].assignment}


def test_the_leader_gives_each_the_topics_of_the_model_it_has():
    llama, qwen = member(resident("llama")), member(resident("qwen"))
    assignments = llama.assign(group.cluster(TOPICS), {"a": said(llama), "b": said(qwen)})
    assert given(assignments, "a")["requests.llama"] == [0, 1, 2, 3, 4, 5]
    assert given(assignments, "b")["requests.qwen"] == [0, 1, 2, 3, 4, 5]
    assert len(given(assignments, "a")["requests"]) == len(given(assignments, "b")["requests"]) == 2


def test_who_serves_one_model_only_says_so_and_gets_that_one_s_alone():
    llama, qwen = member(resident("llama"), resident("qwen")), member(resident("llama"))
    llama.serves = frozenset({"llama"})
    assignments = qwen.assign(group.cluster(TOPICS), {"a": said(llama), "b": said(qwen)})
    assert "requests.qwen" not in given(assignments, "a")
    assert given(assignments, "b")["requests.qwen"] == [0, 1, 2, 3, 4, 5]


def test_who_does_not_have_a_model_reads_its_topic_only_where_nobody_has_it():
    llama, both, none = member(resident("llama")), member(resident("llama"), resident("qwen")), member()
    llama.strays, none.strays = frozenset({"requests.qwen"}), frozenset({"requests.qwen"})
    assignments = both.assign(group.cluster(TOPICS), {"a": said(llama), "b": said(both), "c": said(none)})
    assert given(assignments, "b")["requests.qwen"] == [0, 1, 2, 3, 4, 5]
    alone = llama.assign(group.cluster(TOPICS), {"a": said(llama), "c": said(none)})
    assert sorted(given(alone, "a")["requests.qwen"] + given(alone, "c")["requests.qwen"]) == [0, 1, 2, 3, 4, 5]


def test_what_was_given_is_claimed_at_the_next_join():
    first = member()
    (assignment,) = first.assign(group.cluster(TOPICS), {"a": said(first)}).values()
    first.on_assignment(ConsumerProtocolMemberAssignment.decode(assignment.encode()))
    first.generation = 7
    others = {"b": said(member()), "c": said(member())}
    again = given(first.assign(group.cluster(TOPICS), {"a": said(first), **others}), "a")
    before = {topic: list(numbers) for topic, numbers in assignment.assignment}
    assert again
    assert all(set(numbers) <= set(before[topic]) for topic, numbers in again.items())


WORDS = {
    "none": None,
    "empty": b"",
    "junk": b"junk",
    "torn": b"x\x9cjunk",
    "of another protocol": struct.pack(">I", 1) * 99,
    "deep": zlib.compress(b"[" * 100_000),
    "endless": zlib.compress(b" " * (8 << 20)),
    "infinite": zlib.compress(b'{"loads": {"requests.llama": [1e999, 6]}}'),
    "endless in sum": zlib.compress(b'{"loads": {"requests.llama": [1.7e308, 6]}}'),
    "negative": zlib.compress(b'{"resident": {"llama": -1}}'),
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_member_that_can_t_be_understood_gets_its_share_all_the_same(words):
    one = member()
    stranger = ConsumerProtocolMemberMetadata(0, list(TOPICS), words)
    assignments = one.assign(group.cluster(TOPICS), {"a": said(one), "b": stranger})
    owned = [len(numbers) for who in "ab" for numbers in given(assignments, who).values()]
    assert sum(owned) == sum(TOPICS.values())
    assert given(assignments, "b")["requests"]


@pytest.mark.parametrize(
    ("load", "heard"), [(math.inf, 1e6), (math.nan, 0.0), (1.7e308, 1e6), (-1.0, 0.0), (2.5, 2.5), (1e6, 1e6)]
)
def test_a_load_that_no_device_could_have_is_said_as_one_that_can_be_heard(load: float, heard: float):
    one = Placement(alias_of=TopicSettings().alias_of, holdings=Holdings, loads=lambda: {"requests.llama": load})
    one.on_assignment(ConsumerProtocolMemberAssignment(0, [("requests.llama", [0, 1])], b""))
    assert _unpack("one", said(one).user_data).loads == {"requests.llama": (heard, 2)}


def test_what_a_member_says_stays_small():
    contexts = [resident(f"a-model-with-a-long-name-{number}") for number in range(100)]
    assert len(member(*contexts).metadata(list(TOPICS)).user_data) < 1500
