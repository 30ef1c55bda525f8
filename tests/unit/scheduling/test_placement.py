"""Which worker reads which partition: rules that hold for any pool, and a few pools that can be checked by eye."""

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from service.scheduling.placement import Member, Partition, Topic, fair_share, place, weights
from tests.bench.placement import ASSIGNORS, live, summary

MODELS = ("ant", "bee", "cat", "dog", "elk")
GIB = 1 << 30
Placed = Mapping[str, tuple[Partition, ...]]


def topic_of(alias: str, partitions: int = 12, weight: float = 1.0) -> Topic:
    return Topic(f"requests.{alias}", partitions, alias, weight)


def owners(placed: Placed) -> dict[Partition, str]:
    return {partition: member for member, owned in placed.items() for partition in owned}


def moves(before: Placed, after: Placed) -> int:
    old = owners(before)
    return sum(old.get(partition, member) != member for partition, member in owners(after).items())


def aliases(owned: Sequence[Partition]) -> set[str]:
    return {topic.removeprefix("requests.") for topic, _ in owned if topic != "requests"}


def joined(id_: str, topics: Sequence[Topic], **said: object) -> Member:
    return Member(id=id_, topics=frozenset(topic.name for topic in topics), **said)  # type: ignore[arg-type]


def settled(members: Sequence[Member], placed: Placed, size: int = 1) -> list[Member]:
    """The members a while later: they own what they were given, and have loaded its models."""
    return [
        Member(
            id=member.id,
            topics=member.topics,
            resident=dict.fromkeys(aliases(placed[member.id]), size),
            memory=member.memory,
            owned=frozenset(placed[member.id]),
            generation=member.generation + 1,
        )
        for member in members
    ]


topics_drawn = st.builds(
    lambda shared, models: [Topic("requests", shared), *(topic_of(a, *said) for a, said in models.items())],
    st.integers(0, 20),
    st.dictionaries(
        st.sampled_from(MODELS), st.tuples(st.integers(0, 20), st.sampled_from([0.0, 0.01, 1.0, 7.5])), min_size=1
    ),
)


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Topic], list[Member]]:
    topics = draw(topics_drawn)
    names = st.frozensets(st.sampled_from([topic.name for topic in topics]), min_size=1)
    partitions = [(topic.name, number) for topic in topics for number in range(topic.partitions)]
    owned = st.frozensets(st.sampled_from(partitions)) if partitions else st.just(frozenset())
    held = st.dictionaries(st.sampled_from(MODELS), st.integers(0, 10))
    members = [
        Member(
            id=f"w{number}",
            topics=draw(names),
            resident=draw(held),
            parked=draw(held),
            memory=draw(st.none() | st.integers(0, 20)),
            serves=draw(st.none() | st.frozensets(st.sampled_from(MODELS), max_size=2)),
            owned=draw(owned),
            generation=draw(st.integers(-1, 3)),
        )
        for number in range(draw(st.integers(1, 7)))
    ]
    return topics, members


@given(pools())
@settings(max_examples=100, deadline=None)
def test_every_partition_has_exactly_one_owner_who_reads_its_topic(pool):
    topics, members = pool
    placed = place(topics, members)
    assert placed.keys() == {member.id for member in members}
    read = {name for member in members for name in member.topics}
    expected = {(topic.name, n) for topic in topics if topic.name in read for n in range(topic.partitions)}
    assert Counter(partition for owned in placed.values() for partition in owned) == Counter(expected)
    reads = {member.id: member.topics for member in members}
    assert all(topic in reads[member] for member, owned in placed.items() for topic, _ in owned)
    models = {topic.name: topic.alias for topic in topics if topic.alias is not None}
    for member in members:
        for name, _ in placed[member.id] if member.serves is not None else ():
            if (alias := models.get(name)) is not None and alias not in member.serves:
                serving = [one for one in members if one.serves is None or alias in one.serves]
                assert not [one for one in serving if name in one.topics]


@given(pools(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_the_order_in_which_members_and_topics_come_does_not_matter(pool, shuffle):
    topics, members = pool
    placed = place(topics, members)
    shuffle.shuffle(topics)
    shuffle.shuffle(members)
    assert place(topics, members) == placed


@given(topics_drawn, st.integers(1, 9), st.none() | st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_placement_comes_to_rest(topics, workers, memory):
    """Nearly always at once: of 30,000 random ones 32 moved a few partitions once more, and one of these twice."""
    members = [joined(f"w{number}", topics, memory=memory) for number in range(workers)]
    sizes = dict.fromkeys(MODELS, 1)
    placements = [place(topics, members, sizes)]
    for _ in range(4):
        placements.append(place(topics, settled(members, placements[-1]), sizes))
    assert moves(*placements[-2:]) == 0


def test_nothing_moves_where_nothing_has_changed():
    topics = [Topic("requests", 12), topic_of("ant", weight=7.5), topic_of("bee"), topic_of("cat", 20)]
    placed = place(topics, [joined(f"w{number}", topics) for number in range(7)])
    assert moves(placed, place(topics, settled([joined(f"w{n}", topics) for n in range(7)], placed))) == 0


def test_under_a_hold_a_worker_takes_no_other_model_s_partitions_however_little_it_has_to_do():
    ant, bee, cat = (topic_of(alias, 4, weight) for alias, weight in (("ant", 0.1), ("bee", 1.0), ("cat", 1.0)))
    topics = [Topic("requests", 4), ant, bee, cat]
    members = [
        joined(f"has-{alias}", topics, resident={"ant": 1, alias: 1}, serves=frozenset([alias]))
        for alias in ("ant", "bee", "cat")
    ]
    placed = place(topics, members)
    assert {member: aliases(owned) for member, owned in placed.items()} == {
        "has-ant": {"ant"},
        "has-bee": {"bee"},
        "has-cat": {"cat"},
    }
    assert {len([name for name, _ in owned if name == "requests"]) for owned in placed.values()} == {1, 2}


def test_what_nobody_serves_goes_where_its_model_is():
    topics = [topic_of("ant", 4), topic_of("bee", 4)]
    held = [({"bee": 10}, None), ({"ant": 10}, 12), ({"ant": 10}, 12)]
    members = [
        joined(f"w{number}", topics, resident=resident, memory=memory, serves=frozenset(["ant"]))
        for number, (resident, memory) in enumerate(held)
    ]
    assert {owner for (name, _), owner in owners(place(topics, members)).items() if name == "requests.bee"} == {"w0"}


def test_what_nobody_serves_stays_where_it_was():
    topics = [topic_of("ant", 4), topic_of("bee", 4)]
    owned = [frozenset((topic.name, number) for topic in topics for number in numbers) for numbers in ((0, 1), (2, 3))]
    members = [
        joined(f"w{number}", topics, owned=had, generation=1, serves=frozenset(["ant"]))
        for number, had in enumerate(owned)
    ]
    assert [set(each) for each in place(topics, members).values()] == owned


@given(topics_drawn, st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_the_shared_topic_is_spread_evenly(topics, workers):
    placed = place(topics, [joined(f"w{number}", topics) for number in range(workers)])
    shares = [sum(topic == "requests" for topic, _ in owned) for owned in placed.values()]
    assert max(shares) - min(shares) <= 1


@given(topics_drawn, st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_nobody_has_more_than_twice_a_fair_share_and_a_partition(topics, workers):
    placed = place(topics, [joined(f"w{number}", topics) for number in range(workers)])
    weight = {topic.name: topic.weight if topic.alias else 0.0 for topic in topics}
    loads = [sum(weight[topic] for topic, _ in owned) for owned in placed.values()]
    fair = fair_share([topic for topic in topics if topic.alias], workers)
    assert max(loads) <= 2 * fair + max(weight.values()) + 1e-9


def test_partitions_go_to_the_workers_that_have_the_model():
    topics = [Topic("requests", 6), topic_of("ant"), topic_of("bee"), topic_of("cat")]
    members = [joined(f"w-{alias}", topics, resident={alias: 1}) for alias in ("ant", "bee", "cat")]
    for member, owned in place(topics, members).items():
        assert aliases(owned) == {member.removeprefix("w-")}
        assert len(owned) == 12 + 2


def test_a_model_that_few_have_comes_before_one_that_all_have():
    topics = [topic_of("ant", 4), topic_of("bee", 4), topic_of("cat", 4)]
    owned = [frozenset({("requests.ant", n), ("requests.ant", 3 - n), ("requests.bee", n)}) for n in range(2)]
    members = [
        joined("w1", topics, resident={"ant": 1}),
        joined("w2", topics, resident={"ant": 1, "bee": 1}, owned=owned[0]),
        joined("w3", topics, resident={"ant": 1, "cat": 1}, owned=owned[1]),
    ]
    placed = place(topics, members)
    assert [len(owned) for owned in placed.values()] == [4, 4, 4]
    assert {w for w, owned in placed.items() if "bee" in aliases(owned)} == {"w2"}
    assert {w for w, owned in placed.items() if "cat" in aliases(owned)} == {"w3"}


def test_a_model_that_is_nowhere_goes_where_it_is_in_host_memory():
    topics = [topic_of("ant"), topic_of("bee")]
    members = [
        joined("w1", topics, resident={"ant": GIB}, memory=2 * GIB),
        joined("w2", topics, resident={"ant": GIB}, memory=2 * GIB),
        joined("w3", topics, parked={"bee": GIB}, memory=2 * GIB),
    ]
    placed = place(topics, members)
    assert [topic for topic, _ in placed["w3"]] == ["requests.bee"] * 8


def test_a_partition_leaves_a_worker_without_its_model_for_one_that_has_it_and_room():
    topics = [topic_of("ant", 4), topic_of("bee", 4)]
    owned = frozenset({("requests.ant", 0), ("requests.bee", 0)})
    members = [joined("w1", topics, resident={"bee": 1}, owned=owned), joined("w2", topics, resident={"ant": 1})]
    placed = place(topics, members)
    assert [aliases(placed[w]) for w in ("w1", "w2")] == [{"bee"}, {"ant"}]


def test_models_are_spread_so_that_each_worker_s_fit_its_device():
    topics = [topic_of(alias) for alias in MODELS[:4]]
    members = [joined(f"w{number}", topics, memory=10 * GIB) for number in range(4)]
    placed = place(topics, members, dict.fromkeys(MODELS, 8 * GIB))
    assert sorted(next(iter(aliases(owned))) for owned in placed.values()) == list(MODELS[:4])
    assert all(len(aliases(owned)) == 1 for owned in placed.values())


def test_a_worker_that_leaves_moves_what_it_had_and_hardly_more():
    topics = [Topic("requests", 12), *(topic_of(alias) for alias in MODELS)]
    members = [joined(f"w{number}", topics) for number in range(6)]
    before = place(topics, members)
    after = place(topics, settled(members, before)[1:])
    assert len(before["w0"]) <= moves(before, after) <= len(before["w0"]) + 1


def test_a_worker_that_joins_gets_a_share_and_nothing_else_moves():
    topics = [topic_of(alias) for alias in MODELS]
    members = [joined(f"w{number}", topics) for number in range(12)]
    before = place(topics, members)
    after = place(topics, [*settled(members, before), joined("new", topics)])
    fair = fair_share(topics, 13)
    assert 0.5 * fair <= len(after["new"]) <= 1.1 * fair + 1
    assert moves(before, after) == len(after["new"])


def test_of_two_who_claim_a_partition_the_later_owner_keeps_it():
    topics = [topic_of("ant", 1)]
    claim = frozenset({("requests.ant", 0)})
    old = joined("a", topics, resident={"ant": 1}, owned=claim, generation=4)
    new = joined("b", topics, resident={"ant": 1}, owned=claim, generation=5)
    assert place(topics, [old, new])["b"] == (("requests.ant", 0),)


def test_a_heavy_partition_takes_a_worker_of_its_own_and_the_rest_is_shared_by_the_others():
    topics = [topic_of("ant", 1, weight=100.0), topic_of("bee", 12), topic_of("cat", 12)]
    placed = place(topics, [joined(f"w{number}", topics) for number in range(5)])
    assert fair_share(topics, 5) == 6.0
    assert sorted(len(owned) for owned in placed.values()) == [1, 6, 6, 6, 6]


def test_weights_are_rates_per_partition_and_what_is_idle_still_counts_a_little():
    measured = [{"a": (30.0, 2), "b": (0.0, 4)}, {"a": (10.0, 2), "d": (20.0, 1)}]
    assert weights(measured, ["a", "b", "d"]) == {"a": 10.0, "b": 0.15, "d": 20.0}
    assert weights([], ["a", "b"]) == {"a": 1.0, "b": 1.0}


def test_what_nobody_measured_is_taken_to_be_as_the_others_are():
    """As while a pool is upgraded: what members of another version say is not understood."""
    measured = [{"a": (30.0, 2), "b": (0.0, 4), "d": (5.0, 1)}, {}]
    assert weights(measured, ["a", "b", "c", "d"])["c"] == 10.0


def test_a_small_pool_s_life_keeps_requests_where_their_models_are():
    """The bench's own simulation, small; ``python -m tests.bench.placement`` has the figures for 1,000 workers."""
    shares = {kind: summary(live(kind, 30, 8, 240, seed=0))["share"] for kind in ASSIGNORS}
    assert shares["gearshift"] >= 0.95
    assert shares["gearshift"] > max(shares["range"], shares["sticky"])
