"""Batches as no client library writes them, through what consumers read with: nothing raises, nothing is skipped."""

import gzip
import struct
import tracemalloc

import cramjam
import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, Fetcher, MemoryRecords, PartitionRecords
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.base import Record
from service.kafka.batches import MOST_HEADERS
from service.kafka.inflate import NotInflated, inflate
from service.kafka.records import Batches, Decoding, TolerantRecords
from tests.support.batches import CODECS, Raw, batch, body_of, bomb, content_of, of, varint
from tests.support.records import as_record

TP = TopicPartition("requests", 0)
MOST = 1 << 20
GOOD = [Raw(b"one", b"k", [(b"h", b"v"), (b"n", None)]), Raw(None), Raw(b"three" * 20)]
CODEC_NAMES = sorted(CODECS)


@pytest.fixture
def decoding() -> Decoding:
    return Decoding(MOST, kept=1000)


def read(decoding: Decoding, *batches: bytes, position: int = 0, aborted: list[tuple[int, int]] | None = None):
    """What is read from a log of these batches, from ``position``, as often as it takes; and where reading is then."""
    found: list[Record] = []
    ends = [struct.unpack_from(">q", raw)[0] for raw in batches[1:]]
    for _ in range(50):
        fetched = b"".join(raw for raw, end in zip(batches, [*ends, 1 << 62], strict=True) if end > position)
        records = TolerantRecords(decoding, TP, Batches(fetched), aborted, position, None, None, True, READ_COMMITTED)
        brought = list(records)
        if not brought and records.next_fetch_offset == position and not decoding._tries:
            break
        found += brought
        position = records.next_fetch_offset
        if Batches(batches[-1]).has_next() and position >= _end(batches[-1]):
            break
    return found, position


def _end(raw: bytes) -> int:
    """As a broker knows it, whatever the batch says."""
    (base,), (count,) = struct.unpack_from(">q", raw), struct.unpack_from(">i", raw, 57)
    return base + count if raw[16] == 2 else 3


def told(decoding: Decoding) -> list[tuple[int, int, str]]:
    return [(one.first, one.last, one.reason) for one in decoding.unreadable]


def test_what_nobody_takes_is_counted_and_not_kept():
    """Of a worker's consumers only that of requests is asked what it stepped over."""
    nobodys = Decoding(MOST)
    bad = Raw(b"x", b"k", [(b"\xff", b"v")])
    for n in range(20):
        read(nobodys, of(bad, base=n), position=n)
    assert nobodys.count == 20
    assert not nobodys.unreadable


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_batches_that_are_fine_give_what_aiokafka_gives(decoding, codec):
    fetched = [of(*GOOD, codec=codec), of(*GOOD, codec=codec, base=3)]
    theirs = PartitionRecords(TP, MemoryRecords(b"".join(fetched)), [], 0, None, None, True, READ_COMMITTED)
    found, position = read(decoding, *fetched)
    assert found == [as_record(message) for message in theirs]
    assert ([record.offset for record in found], position) == ([0, 1, 2, 3, 4, 5], 6)
    assert not decoding.unreadable


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_header_name_that_is_not_utf_8_damages_its_own_record_only(decoding, codec):
    bad = Raw(b"two", b"k2", [(b"ce_id", b"r2"), (b"\xff\xfe", b"x"), (b"later", None)])
    found, position = read(decoding, of(GOOD[0], bad, GOOD[2], codec=codec), of(*GOOD, base=3))
    assert ([record.offset for record in found], position) == ([0, 1, 2, 3, 4, 5], 6)
    assert [record.offset for record in found if record.damage] == [1]
    assert (found[1].key, found[1].value) == (b"k2", b"two")
    assert list(found[1].headers) == [("ce_id", b"r2"), ("\\xff\\xfe", b"x"), ("later", None)]
    assert told(decoding) == [(1, 1, "the name of a header is not UTF-8")]


@pytest.mark.delicate
@pytest.mark.parametrize("header", [(b"h", b""), (b"traceparent", None)])
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_record_with_more_headers_than_are_read_is_told_and_its_neighbours_are_read(decoding, codec, header):
    crowded = Raw(b"two", b"k2", [header] * 50_000)
    fetched = [of(GOOD[0], crowded, GOOD[2], codec=codec), of(*GOOD, base=3)]
    tracemalloc.start()
    found, position = read(decoding, *fetched)
    assert tracemalloc.get_traced_memory()[1] < 4 * sum(map(len, fetched)) + (4 << 20), "no object for each of them"
    tracemalloc.stop()
    assert ([record.offset for record in found], position) == ([*range(6)], 6)
    assert told(decoding) == [(1, 1, f"it has 50000 headers, and {MOST_HEADERS} are read at most")]
    assert (found[1].key, found[1].value, found[1].headers) == (b"k2", b"two", ())


def test_as_many_headers_as_are_read_are_read(decoding):
    many = Raw(b"two", b"k2", [(b"header", b"x" * 10)] * MOST_HEADERS)
    found, _ = read(decoding, of(GOOD[0], many))
    assert [len(record.headers) for record in found] == [len(GOOD[0].headers), MOST_HEADERS]
    assert not decoding.unreadable


@pytest.mark.delicate
@pytest.mark.parametrize("codec", sorted(CODECS.keys() - {"none"}))
def test_a_bomb_is_refused_while_it_is_inflated_and_what_lies_beside_it_is_read(decoding, codec):
    fetched = [of(*GOOD), bomb(40 * MOST, codec, base=3), of(*GOOD, base=4)]
    tracemalloc.start()
    found, position = read(decoding, *fetched)
    assert tracemalloc.get_traced_memory()[1] < 20 * MOST
    tracemalloc.stop()
    assert ([record.offset for record in found], position) == ([*range(7)], 7)
    assert told(decoding) == [(3, 3, f"the batch inflates to more than {MOST} bytes")]
    assert (found[3].damage, found[3].value) == (f"the batch inflates to more than {MOST} bytes", None)


@pytest.mark.parametrize("bad", ["bomb", "name"])
def test_what_is_damaged_has_the_brokers_time_where_its_topic_does(decoding, bad):
    log_append_time = 1 << 3
    content = content_of([Raw(b"one", None, [(b"\xff", b"")])])
    compressed = b"no gzip" if bad == "bomb" else None
    raw = batch(content, 1, codec=1, attributes=log_append_time, compressed=compressed, at=4e9)
    (found,), _ = read(decoding, raw)
    assert (bool(found.damage), found.timestamp) == (True, 4e9), "ahead of our clock, and believed"


def test_a_row_of_bombs_is_taken_one_fetch_at_a_time(decoding):
    """Each takes a moment to refuse; in between the loop has others to serve, heartbeats among them."""
    fetched = b"".join(bomb(40 * MOST, "zstd", base=base) for base in range(3))
    records = TolerantRecords(decoding, TP, Batches(fetched), [], 0, None, None, True, READ_COMMITTED)
    assert [record.offset for record in records] == [0]
    assert records.next_fetch_offset == 1


@pytest.mark.parametrize("codec", sorted(CODECS.keys() - {"none"}))
def test_what_inflates_to_just_below_the_bound_is_read(decoding, codec):
    fetched = bomb(MOST - 100, codec)
    assert len(fetched) < MOST / 10
    (found,), _ = read(decoding, fetched)
    assert (found.damage, len(found.value)) == (None, MOST - 100)


@pytest.mark.parametrize("reason", ["codec", "content", "cut"])
def test_a_batch_that_can_not_be_inflated_is_handed_over_offset_by_offset(decoding, reason):
    packed = {"codec": b"abc", "content": b"not gzip at all", "cut": bytes(cramjam.gzip.compress(b"x" * 100))[:-9]}
    raw = batch(b"", 3, codec=7 if reason == "codec" else 1, compressed=packed[reason])
    found, position = read(decoding, raw, of(*GOOD, base=3))
    assert ([record.offset for record in found], position) == ([*range(6)], 6)
    assert [bool(record.damage) for record in found] == [True] * 3 + [False] * 3
    assert [(first, last) for first, last, _ in told(decoding)] == [(0, 2)]


def test_a_wrong_checksum_is_fetched_again_before_it_is_stepped_over(decoding):
    raw = bytearray(of(*GOOD))
    raw[-1] ^= 1
    for _ in range(2):
        records = TolerantRecords(decoding, TP, Batches(bytes(raw)), [], 0, None, None, True, READ_COMMITTED)
        assert list(records) == []
        assert records.next_fetch_offset == 0
    found, position = read(decoding, of(*GOOD))
    assert ([record.damage for record in found], position) == ([None] * 3, 3), "it was the way, not the disk"
    found, position = read(decoding, bytes(raw), of(*GOOD, base=3))
    assert ([record.offset for record in found], position) == ([*range(6)], 6)
    assert told(decoding) == [(0, 2, "its checksum is wrong")]


def test_a_batch_that_claims_billions_of_offsets_is_not_handed_over_one_by_one(decoding):
    raw = batch(b"", 1 << 19, codec=7, compressed=b"x")
    found, position = read(decoding, raw)
    assert len(found) == 1000
    assert (position, [(first, last) for first, last, _ in told(decoding)]) == (1 << 19, [(0, (1 << 19) - 1)])


def test_reading_begins_within_a_batch_that_is_damaged(decoding):
    bad = Raw(b"bad", None, [(b"\xff", b"")])
    found, position = read(decoding, of(GOOD[0], bad, GOOD[2], bad), position=2)
    assert ([record.offset for record in found], position) == ([2, 3], 4)
    assert [bool(record.damage) for record in found] == [False, True]


STRUCTURES = {
    "no headers' count": lambda body: body[:-1],
    "more headers than there are": lambda body: body[:-1] + varint(5),
    "fewer than no headers": lambda body: body[:-1] + varint(-2),
    "a value that ends elsewhere": lambda body: body[:4] + varint(9000) + body[5:],
    "bytes after its end": lambda body: body + b"\x00\x00",
    "a number without an end": lambda body: b"\x00" + b"\xff" * 20,
    "nothing": lambda _body: b"",
}


@pytest.mark.parametrize("how", sorted(STRUCTURES))
def test_a_record_that_is_not_well_formed_leaves_its_neighbours(decoding, how):
    bodies = [body_of(GOOD[0], 0), STRUCTURES[how](body_of(Raw(b"value"), 1)), body_of(GOOD[2], 2)]
    content = b"".join(varint(len(body)) + body for body in bodies)
    found, position = read(decoding, batch(content, 3), of(*GOOD, base=3))
    assert ([record.offset for record in found], position) == ([*range(6)], 6)
    assert [bool(record.damage) for record in found] == [False, True, *[False] * 4]


@pytest.mark.parametrize("delta", [-1, 0, 2, 3, 1000, 1 << 40])
def test_a_record_that_claims_an_offset_outside_of_its_batch_does_not_move_the_position(decoding, delta):
    bodies = [body_of(GOOD[0], 0), body_of(Raw(b"far"), delta), body_of(GOOD[2], 2)]
    content = b"".join(varint(len(body)) + body for body in bodies)
    found, position = read(decoding, batch(content, 3), of(*GOOD, base=3))
    assert ([record.offset for record in found], position) == ([*range(6)], 6)
    assert [bool(record.damage) for record in found] == [False, True, *[False] * 4]
    assert found[1].value == b"far"


@pytest.mark.parametrize("lengths", [varint(-5), varint(1 << 40), b"\xff" * 12, b""])
def test_records_that_can_not_be_told_apart_are_handed_over_as_damaged(decoding, lengths):
    body = body_of(GOOD[0], 0)
    found, position = read(decoding, batch(varint(len(body)) + body + lengths, 3), of(*GOOD, base=3))
    assert ([record.offset for record in found], position) == ([*range(6)], 6)
    assert [bool(record.damage) for record in found] == [False, True, True, *[False] * 3]


def test_aborted_transactions_markers_and_transactional_batches_are_treated_as_before(decoding):
    transactional, control = 1 << 4, 1 << 5
    content = content_of(GOOD)
    abort = batch(
        content_of([Raw(b"\x00" * 6, b"\x00\x00\x00\x00")]), 1, base=3, attributes=transactional | control, producer=5
    )
    fetched = [batch(content, 3, base=0, attributes=transactional, producer=5), abort]
    fetched += [batch(content, 3, base=4, attributes=transactional, producer=5), batch(content, 3, base=7, producer=6)]
    found, position = read(decoding, *fetched, aborted=[(5, 0)])
    assert ([record.offset for record in found], position) == ([4, 5, 6, 7, 8, 9], 10)
    fetched = bomb(40 * MOST, "zstd")
    aborted = bytearray(batch(b"", 1, codec=4, attributes=transactional, producer=5, compressed=fetched[61:]))
    assert read(decoding, bytes(aborted), aborted=[(5, 0)]) == ([], 1)
    assert not decoding.unreadable, "what was taken back need not be read"


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy"])
def test_the_formats_of_older_brokers_are_read(decoding, magic, codec):
    def written(size: int) -> bytes:
        builder = LegacyRecordBatchBuilder(magic=magic, compression_type=CODECS[codec], batch_size=1 << 30)
        for offset in range(3):
            builder.append(offset, 1000 if magic else None, b"k", bytes(size))
        return bytes(builder.build())

    found, position = read(decoding, written(10))
    assert ([(record.key, record.value) for record in found], position) == ([(b"k", bytes(10))] * 3, 3)
    if codec != "none":
        found, position = read(decoding, written(2 * MOST))
        assert [bool(record.damage) for record in found][-1]
        assert position == 3


LAST_DELTA_AT, COUNT_AT = 23, 57
HEADS = {LAST_DELTA_AT: [0, 1, 255, (1 << 20) - 1, (1 << 31) - 1, -1, -1000], COUNT_AT: [0, 1, 2, 4, 100, 1 << 30, -1]}


def signed(raw: bytes, *changes: tuple[int, int]) -> bytes:
    """A batch in whose head its producer has changed numbers of four bytes, with a checksum that fits."""
    changed = bytearray(raw)
    for at, value in changes:
        struct.pack_into(">i", changed, at, value)
    struct.pack_into(">I", changed, 17, calc_crc32c(bytes(changed[21:])))
    return bytes(changed)


@pytest.mark.parametrize("codec", ["none", "gzip"])
@pytest.mark.parametrize("change", [(at, value) for at, values in HEADS.items() for value in values])
def test_a_batch_that_lies_about_its_end_or_its_records_is_read_and_those_behind_it_too(decoding, codec, change):
    found, position = read(decoding, signed(of(*GOOD, codec=codec), change), of(*GOOD, base=3))
    assert ([record.offset for record in found], position) == ([*range(6)], 6)
    assert [record.value for record in found] == [one.value for one in GOOD] * 2


@pytest.mark.parametrize("delta", [-1, -1000, 1 << 20])
def test_the_last_batch_that_says_no_end_is_read_record_by_record(decoding, delta):
    """The broker gives it again for each of its offsets; reading goes on, and comes to no offset twice."""
    found, position = read(decoding, signed(of(*GOOD), (LAST_DELTA_AT, delta)))
    assert ([record.offset for record in found], position) == ([0, 1, 2], 3)


def test_a_record_far_off_in_a_batch_that_says_it_is_long_does_not_pass_what_others_wrote(decoding):
    bodies = [body_of(GOOD[0], 0), body_of(Raw(b"far"), 92), b"\x00"]
    raw = batch(b"".join(varint(len(body)) + body for body in bodies), 3)
    found, position = read(decoding, signed(raw, (LAST_DELTA_AT, 255)), of(*GOOD, base=3))
    assert ([record.offset for record in found], position) == ([*range(6)], 6)
    assert [bool(record.damage) for record in found] == [False, True, True, *[False] * 3]


@pytest.mark.parametrize("count", [1, 3])
def test_records_that_have_no_offset_are_told(decoding, count):
    lies = signed(of(*GOOD), (LAST_DELTA_AT, 0), (COUNT_AT, count))
    found, position = read(decoding, lies, of(*GOOD, base=1))
    assert ([record.offset for record in found], position) == ([0, 1, 2, 3], 4)
    assert [record.value for record in found] == [GOOD[0].value, *(one.value for one in GOOD)]
    ((first, last, reason),) = told(decoding)
    assert (first, last) == (0, 0)
    assert reason.startswith("it goes on behind its last offset")


@pytest.mark.parametrize("delta", [-1000, (1 << 31) - 1])
def test_a_marker_that_lies_about_its_end_takes_reading_neither_back_nor_far_ahead(decoding, delta):
    control = 1 << 5
    content = content_of([Raw(b"\x00" * 6, b"\x00\x00\x00\x00")])
    marker = signed(batch(content, 1, base=3, attributes=control, producer=5), (LAST_DELTA_AT, delta))
    found, position = read(decoding, of(*GOOD), marker)
    assert ([record.offset for record in found], position) == ([0, 1, 2], 4)


def test_a_batch_that_lies_before_the_position_is_told_and_not_read_for_ever(decoding):
    records = TolerantRecords(decoding, TP, Batches(of(*GOOD)), [], 7, None, None, True, READ_COMMITTED)
    assert [(record.offset, record.headers) for record in records] == [(7, ())]
    assert records.next_fetch_offset == 8
    assert told(decoding) == [(7, 7, "it says that it ends before where it is")]


changes = st.one_of(
    st.tuples(st.just("B"), st.integers(17, 200), st.integers(0, 255)),
    st.tuples(st.just(">i"), st.sampled_from(sorted(HEADS)), st.integers(-(1 << 31), (1 << 31) - 1)),
    st.tuples(st.just(">i"), st.sampled_from(sorted(HEADS)), st.integers(-4, 300)),
)


@given(changed=st.lists(changes, min_size=1, max_size=5), sign=st.booleans(), codec=st.sampled_from(CODEC_NAMES))
@settings(max_examples=400)
def test_whatever_is_changed_in_a_batch_reading_ends_behind_it(changed, sign, codec):
    raw = bytearray(of(*GOOD, codec=codec))
    for form, at, value in changed:
        struct.pack_into(form, raw, min(at, len(raw) - 1), value)
    if sign:  # a producer that means it
        raw = bytearray(signed(raw))

    found, position = read(Decoding(MOST), bytes(raw), of(*GOOD, base=3))
    offsets = [record.offset for record in found]
    assert offsets == sorted(set(offsets))
    assert [(one.offset, one.value) for one in found][-3:] == [(3 + n, one.value) for n, one in enumerate(GOOD)]
    assert not any(one.damage for one in found[-3:])
    assert position == 6


@given(data=st.binary(max_size=200), codec=st.integers(0, 8))
def test_inflating_any_bytes_gives_bytes_or_says_why_not(data, codec):
    try:
        found = inflate(codec, data, 1000)
    except NotInflated:
        return
    assert len(found) <= 1000


@pytest.mark.parametrize("block", [-4, -1, 0, 1 << 30])
def test_a_snappy_frame_that_goes_nowhere_ends(block):
    with pytest.raises(NotInflated):
        inflate(2, b"\x82SNAPPY\x00" + struct.pack(">iii", 1, 1, block) + b"abc", 1000)


def test_a_snappy_block_is_believed_to_be_as_large_as_it_says():
    with pytest.raises(NotInflated, match="more than 1000 bytes"):
        inflate(2, b"\xff\xff\xff\xff\x0f" + b"abc", 1000)


def test_the_hook_fits_aiokafka():
    names = Fetcher._proc_fetch_request.__code__.co_names
    assert {"MemoryRecords", "PartitionRecords"} <= set(names)
    assert Fetcher._proc_fetch_request.__defaults__ is None


def test_gzip_content_in_members_is_inflated_whole():
    parts = [bytes([n % 251]) * 10_000 for n in range(100)]
    packed = b"".join(map(gzip.compress, parts))
    assert inflate(1, packed, 1_000_000) == b"".join(parts)
    with pytest.raises(NotInflated, match="more than 999999 bytes"):
        inflate(1, packed, 999_999)
    with pytest.raises(NotInflated, match="too early"):
        inflate(1, packed[:-1], 1_000_000)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [b"", b"a"])
def test_gzip_content_in_more_members_than_anybody_writes_is_refused(content):
    """Each copied all that was behind it: 16 MiB of them took minutes of the loop, for every worker in turn."""
    with pytest.raises(NotInflated, match="more than 1000 members"):
        inflate(1, gzip.compress(content) * 800_000, 64 << 20)
