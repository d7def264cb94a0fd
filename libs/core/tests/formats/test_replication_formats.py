"""Content of the under-replication tree: it equals BookKeeper's bytes, and damaged content is Corrupt."""

import pytest
from bindery_core.errors import BadRequest, BadVersion, Corrupt
from bindery_core.formats import replication_formats as formats
from bindery_core.formats.replication_formats import MarkText
from hypothesis import example, given, settings
from hypothesis import strategies as st

MARK = b'replica: "10.0.0.1:3181"\nreplica: "bookie-2.bookies:3181"\nctime: 1700000000000\n'


def test_encoded_content_equals_the_bytes_of_bookkeeper() -> None:
    assert formats.encode_mark(["10.0.0.1:3181", "bookie-2.bookies:3181"], 1_700_000_000_000) == MARK
    assert formats.encode_mark([], None) == b""
    assert formats.encode_lock("host-1") == b'bookieId: "host-1"\n'
    assert formats.encode_vote("host-1:3181") == b'bookieId: "host-1:3181"\n'
    assert formats.encode_layout() == b'type: "BASIC"\nversion: 1\n'
    assert formats.encode_check_time(1_700_000_000_000).hex() == "0880d095ffbc31"


def test_the_texts_are_read_back() -> None:
    assert formats.decode_mark(MARK) == MarkText(("10.0.0.1:3181", "bookie-2.bookies:3181"), 1_700_000_000_000)
    assert formats.decode_mark(b"") == MarkText()
    assert formats.decode_lock(b'bookieId: "host-1"\n') == "host-1"
    assert formats.decode_vote(b'bookieId: "host-1:3181"\n') == "host-1:3181"
    assert formats.decode_lock(b"") == formats.decode_vote(b"") == ""
    assert formats.decode_check_time(bytes.fromhex("0880d095ffbc31")) == 1_700_000_000_000
    assert formats.decode_check_time(b"") is None
    formats.check_layout(b'type: "BASIC"\nversion: 1\n')


@pytest.mark.parametrize(
    "text",
    [
        b'ctime:7 replica:"a"replica:"b"',
        b"  replica : 'a'\r\n\treplica:\"b\" # remark\n ctime: 0x7",
        b'replica: ["a", "b"]; ctime: 7',
        b'replica: "a" replica: "b" ctime: 7 later_field: 5 later { deep: "x" }',
        b'replica: "\\141" replica: "b" ctime: 7',
    ],
)
def test_a_mark_is_read_in_any_order_with_any_white_space_and_unknown_fields(text: bytes) -> None:
    assert formats.decode_mark(text) == MarkText(("a", "b"), 7)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe",
        b"\x08\x01",
        b"replica: 5",
        b'replica: "a',
        b'replica: "\\xff"',
        b"ctime: 99999999999999999999",
        b"ctime: 1 ctime: 2",
        b"a{" * 20_000,
        b"a:<" * 20_000,
        b"{" * 60_000,
        b"replica: 'x'\n" * 10_000,
    ],
    ids=lambda text: repr(text[:16]),
)
def test_an_invalid_mark_is_corrupt(text: bytes) -> None:
    with pytest.raises(Corrupt, match="not a readable UnderreplicatedLedgerFormat"):
        formats.decode_mark(text)


@pytest.mark.parametrize(
    "text", [b"", b"junk", b'type: "BASIC"', b'type: "BASIC"\nversion: 2\n', b'type: "HIERARCHICAL"\nversion: 1\n']
)
def test_another_layout_is_refused(text: bytes) -> None:
    with pytest.raises(BadVersion):
        formats.check_layout(text)


@pytest.mark.parametrize("data", [b"\x08", b"\xff" * 12, b"x" * 1_000_000])
def test_an_invalid_time_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        formats.decode_check_time(data)


def test_a_text_over_the_size_limit_is_not_written() -> None:
    with pytest.raises(BadRequest):
        formats.encode_mark(["bookie-of-a-long-name:3181"] * 3_000, 1)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=5).map(tuple),
    st.none() | st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=100, deadline=None)
def test_marks_round_trip_as_ascii(replicas: tuple[str, ...], ctime_ms: int | None) -> None:
    data = formats.encode_mark(replicas, ctime_ms)
    assert data.isascii()
    assert formats.decode_mark(data) == MarkText(replicas, ctime_ms)


@given(st.binary(max_size=200) | st.text("replicactime:{}[]<>\"' \n\\0123", max_size=60).map(str.encode))
@example(b"replica: ''''")
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_are_decoded_or_refused_as_corrupt(data: bytes) -> None:
    for decode, kinds in (
        (formats.decode_mark, MarkText),
        (formats.decode_lock, str),
        (formats.decode_vote, str),
        (formats.decode_check_time, (int, type(None))),
    ):
        try:
            decoded = decode(data)
        except Corrupt:
            continue
        assert isinstance(decoded, kinds)
        assert decode(data) == decoded
