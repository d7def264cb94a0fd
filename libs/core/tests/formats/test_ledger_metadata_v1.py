"""The lines of ledger metadata of version 1."""

import pytest
from bindery_core.errors import BadVersion, Corrupt
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.formats.ledger_metadata_v1 import Fields, decode, encode
from bindery_core.ids import BookieId, EntryId

SEGMENTS = (
    Segment(EntryId(0), (BookieId("a:1"), BookieId("b:1"), BookieId("c:1"))),
    Segment(EntryId(7), (BookieId("a:1"), BookieId("d:1"), BookieId("c:1"))),
)
LINES = b"2\n3\n%d\n0\ta:1\tb:1\tc:1\n7\ta:1\td:1\tc:1\n"
OPEN = LedgerMetadata(
    ensemble_size=3, write_quorum=2, ack_quorum=2, segments=SEGMENTS, digest_type=None, password=None, format_version=1
)
CLOSED = OPEN.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(9), length=100)


def fields(state: LedgerState, length: int = 0, last_entry_id: int = -1) -> Fields:
    return Fields(2, 3, length, SEGMENTS, state, EntryId(last_entry_id))


@pytest.mark.parametrize(
    ("metadata", "lines", "expected"),
    [
        (OPEN, LINES % 0, fields(LedgerState.OPEN)),
        (
            OPEN.with_changes(state=LedgerState.IN_RECOVERY),
            LINES % 0 + b"-102\tCLOSED",
            fields(LedgerState.IN_RECOVERY),
        ),
        (CLOSED, LINES % 100 + b"9\tCLOSED", fields(LedgerState.CLOSED, 100, 9)),
        (OPEN.with_changes(state=LedgerState.CLOSED), LINES % 0 + b"-1\tCLOSED", fields(LedgerState.CLOSED)),
    ],
    ids=["open", "in recovery", "closed", "closed and empty"],
)
def test_each_state_has_its_lines(metadata: LedgerMetadata, lines: bytes, expected: Fields) -> None:
    assert encode(metadata) == lines
    assert decode(lines) == expected


def test_the_length_of_a_ledger_that_is_not_closed_is_ignored() -> None:
    assert decode(LINES % 500).length == 0
    assert decode(LINES % 500 + b"-102\tCLOSED").length == 0


def test_lines_may_end_with_a_carriage_return() -> None:
    assert decode((LINES % 100 + b"9\tCLOSED").replace(b"\n", b"\r\n") + b"\r") == fields(LedgerState.CLOSED, 100, 9)


def test_lines_after_the_state_are_ignored() -> None:
    assert decode(LINES % 100 + b"9\tCLOSED\njunk") == fields(LedgerState.CLOSED, 100, 9)


def test_empty_lines_between_segments_are_ignored() -> None:
    assert decode((LINES % 0).replace(b"\n7", b"\n\n7")) == fields(LedgerState.OPEN)


def test_a_ledger_of_one_segment_per_line_needs_three_lines_before_it() -> None:
    assert decode(b"1\n1\n0") == Fields(1, 1, 0, (), LedgerState.OPEN, EntryId(-1))
    with pytest.raises(Corrupt, match="cut off: lines=2"):
        decode(b"1\n1")


@pytest.mark.parametrize("number", ["x", "", "1.5", "--1", "+1", " 1", "²", "1" * 20])
def test_a_line_that_is_not_a_number_is_corrupt(number: str) -> None:
    with pytest.raises(Corrupt, match="not a number"):
        decode(f"{number}\n3\n0\n".encode())


def test_a_number_has_up_to_nineteen_digits() -> None:
    assert decode(b"1\n1\n" + b"9" * 19 + b"\n5\tCLOSED").length == 9_999_999_999_999_999_999


def test_the_text_of_a_bad_number_is_cut() -> None:
    with pytest.raises(Corrupt) as caught:
        decode(b"x" * 100 + b"\n3\n0\n")
    assert caught.value.facts == {"line": "x" * 40}


@pytest.mark.parametrize(("length", "last"), [(-1, 9), (0, -2), (0, -101)])
def test_a_closed_ledger_needs_its_end(length: int, last: int) -> None:
    with pytest.raises(Corrupt, match="its last entry is missing") as caught:
        decode(LINES % length + b"%d\tCLOSED" % last)
    assert caught.value.facts == {"last_entry_id": last, "length": length}


def test_bytes_that_are_not_text_are_corrupt() -> None:
    with pytest.raises(Corrupt, match="not text: size=3"):
        decode(b"1\n\xff")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"password": b""}, "password"),
        ({"digest_type": DigestType.CRC32}, "password"),
        ({"ack_quorum": 1}, "ack_quorum"),
        ({"custom": {"k": b"v"}}, "custom"),
        ({"ctime_ms": 0}, "ctime_ms"),
    ],
)
def test_metadata_that_the_lines_cannot_express_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(BadVersion) as caught:
        encode(OPEN.with_changes(**changes))
    assert caught.value.facts == {"field": field}
