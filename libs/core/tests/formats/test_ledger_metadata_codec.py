"""Ledger metadata equals BookKeeper's bytes, and partly understood metadata is refused."""

import contextlib

import pytest
from bindery_core import varint
from bindery_core.errors import BadVersion, Corrupt
from bindery_core.formats import ledger_metadata_pb2 as pb
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.formats.ledger_metadata_codec import HEADER, decode, encode
from bindery_core.ids import BookieId, EntryId
from hypothesis import given, settings
from hypothesis import strategies as st


def ensemble(*hosts: int) -> tuple[BookieId, ...]:
    return tuple(BookieId(f"10.0.0.{host}:3181") for host in hosts)


OPEN = LedgerMetadata(
    ensemble_size=3,
    write_quorum=2,
    ack_quorum=2,
    segments=(Segment(EntryId(0), ensemble(1, 2, 3)), Segment(EntryId(7), ensemble(1, 4, 3))),
    digest_type=DigestType.CRC32C,
    password=bytes.fromhex("7080220a"),
    custom={"k": b"v"},
)
SINGLE = LedgerMetadata(
    ensemble_size=1,
    write_quorum=1,
    ack_quorum=1,
    segments=(Segment(EntryId(0), (BookieId("h:1"),)),),
    digest_type=DigestType.MAC,
    password=b"",
    c_token=77,
)


def segment_hex(first_entry_id: int, *hosts: int) -> str:
    return "322f" + "".join("0a0d" + f"10.0.0.{host}:3181".encode().hex() for host in hosts) + f"10{first_entry_id:02x}"


SEGMENTS = segment_hex(0, 1, 2, 3) + segment_hex(7, 1, 4, 3)
NO_LAST = "20ffffffffffffffffff01"
# From BookKeeper 4.17.2, without the 30 bytes of the header.
GOLDEN = {
    "open": (OPEN, f"8901 0802 1003 1800 {NO_LAST} 2801 {SEGMENTS} 3803 420470 80220a 4802 5a060a016b120176 6000"),
    "closed": (
        OPEN.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(9), length=100),
        f"8001 0802 1003 1864 2009 2803 {SEGMENTS} 3803 42047080220a 4802 5a060a016b120176 6000",
    ),
    "in recovery, with ctime": (
        OPEN.with_changes(state=LedgerState.IN_RECOVERY, ctime_ms=1234567),
        f"8d01 0802 1003 1800 {NO_LAST} 2802 {SEGMENTS} 3803 42047080220a 4802 5087ad4b 5a060a016b120176 6000",
    ),
    "single": (SINGLE, f"24 0801 1001 1800 {NO_LAST} 2801 3207 0a03683a31 1000 3802 4200 4801 604d"),
}


@pytest.mark.parametrize(("metadata", "golden"), GOLDEN.values(), ids=GOLDEN)
def test_encoded_metadata_equals_the_bytes_of_bookkeeper(metadata: LedgerMetadata, golden: str) -> None:
    data = bytes.fromhex("426f6f6b69654d65746164617461466f726d617456657273696f6e09330a" + golden)
    assert encode(metadata) == data
    # An unset cToken is written as 0, and read back as that.
    assert decode(data) == metadata.with_changes(c_token=metadata.c_token or 0)
    assert decode(data + b"trailing bytes are ignored") == decode(data)


@st.composite
def metadata_of_any_kind(draw: st.DrawFn) -> LedgerMetadata:
    ensemble_size = draw(st.integers(1, 5))
    write_quorum = draw(st.integers(1, ensemble_size))
    state = draw(st.sampled_from(LedgerState))
    firsts = [0, *sorted(draw(st.sets(st.integers(1, 2**62), max_size=4)))]
    bookies = st.lists(st.text(min_size=1, max_size=9), min_size=ensemble_size, max_size=ensemble_size)
    has_password = draw(st.booleans())
    return LedgerMetadata(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=draw(st.integers(1, write_quorum)),
        segments=tuple(Segment(EntryId(first), tuple(map(BookieId, draw(bookies)))) for first in firsts),
        state=state,
        last_entry_id=EntryId(draw(st.integers(-1, 2**62)) if state is LedgerState.CLOSED else -1),
        length=draw(st.integers(0, 2**62)) if state is LedgerState.CLOSED else 0,
        digest_type=draw(st.sampled_from(DigestType)) if has_password else None,
        password=draw(st.binary(max_size=20)) if has_password else None,
        ctime_ms=draw(st.none() | st.integers(0, 2**62)),
        custom=draw(st.dictionaries(st.text(max_size=9), st.binary(max_size=9), max_size=4)),
        c_token=draw(st.integers(0, 2**63 - 1)),
    )


@settings(max_examples=200, deadline=None)
@given(metadata_of_any_kind())
def test_metadata_round_trips(metadata: LedgerMetadata) -> None:
    assert decode(encode(metadata)) == metadata


def test_damaged_bytes_are_refused_or_decoded_to_consistent_metadata() -> None:
    """A znode has no checksum; the test checks that only our own errors are raised."""
    data = encode(GOLDEN["closed"][0])
    for at in range(len(data)):
        with pytest.raises(Corrupt):
            decode(data[:at])
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with contextlib.suppress(Corrupt, BadVersion):
                assert isinstance(decode(bytes(damaged)), LedgerMetadata)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_random_bodies_are_metadata_or_corrupt(body: bytes) -> None:
    with contextlib.suppress(Corrupt):
        assert isinstance(decode(HEADER + varint.encode(len(body)) + body), LedgerMetadata)


@pytest.mark.parametrize("version", [0, 4, 33])
def test_an_unsupported_version_is_reported(version: int) -> None:
    data = b"BookieMetadataFormatVersion\t%d\n" % version + encode(SINGLE)[30:]
    with pytest.raises(BadVersion, match=f"version={version}"):
        decode(data)
    with pytest.raises(BadVersion):
        encode(SINGLE.with_changes(format_version=version))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"BookieMetadataFormatVersion\t",
        b"BookieMetadataFormatVersion\t\n",
        b"BookieMetadataFormatVersion\tthree\n",
        b"BookieMetadataFormatVersion\t" + b"3" * 4000 + b"\n",
        b"BookieMetadataFormatVersion 3\n" + encode(SINGLE)[30:],
        encode(SINGLE)[30:],
    ],
)
def test_junk_and_over_long_headers_are_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt, match="header of the ledger metadata is missing"):
        decode(data)


def message_of(metadata: LedgerMetadata) -> pb.LedgerMetadataFormat:
    data = encode(metadata)
    _, at = varint.decode(data, 30)
    return pb.LedgerMetadataFormat.FromString(data[at:])


def data_of(message: pb.LedgerMetadataFormat) -> bytes:
    body = message.SerializeToString()
    return HEADER + varint.encode(len(body)) + body


def test_metadata_of_old_clients_is_read() -> None:
    message = message_of(SINGLE)
    for name in ("digestType", "password", "ackQuorumSize", "cToken", "lastEntryId"):
        message.ClearField(name)
    assert decode(data_of(message)) == SINGLE.with_changes(digest_type=None, password=None, c_token=None)


def test_the_end_of_a_ledger_that_is_not_closed_is_ignored() -> None:
    message = message_of(SINGLE)
    message.lastEntryId, message.length = 5, 500
    assert decode(data_of(message)) == SINGLE


def test_contradictory_metadata_is_corrupt() -> None:
    def refused(match: str, metadata: LedgerMetadata = OPEN, **changes: int) -> None:
        message = message_of(metadata)
        for name, value in changes.items():
            setattr(message, name, value)
        with pytest.raises(Corrupt, match=match):
            decode(data_of(message))

    refused("invalid quorums", quorumSize=4)
    refused("invalid quorums", ackQuorumSize=3)
    refused("invalid quorums", ackQuorumSize=0)
    refused("differs from the ensemble size", ensembleSize=4)
    refused("the ledger is closed, but its last entry is missing", state=pb.LedgerMetadataFormat.CLOSED, lastEntryId=-2)
    message = message_of(OPEN)
    message.segment[1].firstEntryId = 0
    with pytest.raises(Corrupt, match="do not ascend"):
        decode(data_of(message))
    message.segment[0].firstEntryId = 1
    with pytest.raises(Corrupt, match="do not ascend"):
        decode(data_of(message))
    del message.segment[:]
    with pytest.raises(Corrupt, match="contains no segments"):
        decode(data_of(message))


# --- the text formats of old clients ----------------------------------------------------------------------------------

V1_SEGMENTS = "0\t10.0.0.1:3181\t10.0.0.2:3181\t10.0.0.3:3181\n7\t10.0.0.1:3181\t10.0.0.4:3181\t10.0.0.3:3181\n"
OLDEST = OPEN.with_changes(digest_type=None, password=None, custom={}, format_version=1)
GOLDEN_V1 = {
    "open": (OLDEST, "2\n3\n0\n" + V1_SEGMENTS),
    "in recovery": (OLDEST.with_changes(state=LedgerState.IN_RECOVERY), f"2\n3\n0\n{V1_SEGMENTS}-102\tCLOSED"),
    "closed": (
        OLDEST.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(9), length=100),
        f"2\n3\n100\n{V1_SEGMENTS}9\tCLOSED",
    ),
    "closed and empty": (OLDEST.with_changes(state=LedgerState.CLOSED), f"2\n3\n0\n{V1_SEGMENTS}-1\tCLOSED"),
}
V1 = b"BookieMetadataFormatVersion\t1\n"
V2 = b"BookieMetadataFormatVersion\t2\n"

SEGMENTS_TEXT = "".join(
    "segment {\n"
    + "".join(f'  ensembleMember: "10.0.0.{host}:3181"\n' for host in hosts)
    + f"  firstEntryId: {first}\n}}\n"
    for first, hosts in ((0, (1, 2, 3)), (7, (1, 4, 3)))
)
GOLDEN_V2 = {
    "open": (
        OPEN.with_changes(format_version=2),
        f"quorumSize: 2\nensembleSize: 3\nlength: 0\nlastEntryId: -1\nstate: OPEN\n{SEGMENTS_TEXT}"
        'digestType: CRC32C\npassword: "p\\200\\"\\n"\nackQuorumSize: 2\n'
        'customMetadata {\n  key: "k"\n  value: "v"\n}\n',
    ),
    "closed, with ctime": (
        OPEN.with_changes(
            format_version=2,
            state=LedgerState.CLOSED,
            last_entry_id=EntryId(9),
            length=100,
            ctime_ms=1234567,
            custom={},
        ),
        f"quorumSize: 2\nensembleSize: 3\nlength: 100\nlastEntryId: 9\nstate: CLOSED\n{SEGMENTS_TEXT}"
        'digestType: CRC32C\npassword: "p\\200\\"\\n"\nackQuorumSize: 2\nctime: 1234567\n',
    ),
}


@pytest.mark.parametrize(("metadata", "text"), GOLDEN_V1.values(), ids=GOLDEN_V1)
def test_metadata_of_version_1_is_read_and_written_unchanged(metadata: LedgerMetadata, text: str) -> None:
    assert decode(V1 + text.encode()) == metadata
    assert encode(metadata) == V1 + text.encode()


@pytest.mark.parametrize(("metadata", "text"), GOLDEN_V2.values(), ids=GOLDEN_V2)
def test_metadata_of_version_2_is_read_and_written_unchanged(metadata: LedgerMetadata, text: str) -> None:
    assert decode(V2 + text.encode()) == metadata
    assert encode(metadata) == V2 + text.encode()


def test_version_2_is_read_in_any_layout() -> None:
    text = (
        "quorumSize:1 ensembleSize:1, length:0; state:IN_RECOVERY # a comment\n"
        "segment < ensembleMember: 'h:1' firstEntryId: 0 > unknown { deeper: 1 } another: 'field'"
    )
    found = decode(V2 + text.encode())
    assert found == SINGLE.with_changes(
        state=LedgerState.IN_RECOVERY, digest_type=None, password=None, c_token=None, format_version=2
    )


def test_an_update_keeps_the_version() -> None:
    for metadata in (GOLDEN_V1["open"][0], GOLDEN_V2["open"][0], OPEN):
        closed = decode(encode(metadata)).with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(3), length=4)
        assert encode(closed).startswith(b"BookieMetadataFormatVersion\t%d\n" % metadata.format_version)
        assert decode(encode(closed)) == closed


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"password": b"", "digest_type": DigestType.CRC32}, "password"),
        ({"ack_quorum": 1}, "ack_quorum"),
        ({"custom": {"k": b"v"}}, "custom"),
        ({"ctime_ms": 1}, "ctime_ms"),
    ],
)
def test_fields_that_version_1_cannot_express_are_not_dropped(changes: dict[str, object], field: str) -> None:
    with pytest.raises(BadVersion, match=f"field={field}"):
        encode(OLDEST.with_changes(**changes))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # protobuf's own parser lets them pass, with a warning
@pytest.mark.parametrize("data", [V1 + GOLDEN_V1["closed"][1].encode(), V2 + GOLDEN_V2["open"][1].encode()])
def test_a_damaged_text_is_refused_or_decoded_to_consistent_metadata(data: bytes) -> None:
    for at in range(len(data)):
        with contextlib.suppress(Corrupt, BadVersion):
            assert isinstance(decode(data[:at]), LedgerMetadata)
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with contextlib.suppress(Corrupt, BadVersion):
                assert isinstance(decode(bytes(damaged)), LedgerMetadata)


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text("{}<>:\"' \n\t0129CLOSED-quorumSize", max_size=80).map(str.encode)))
def test_random_texts_are_metadata_or_corrupt(body: bytes) -> None:
    for header in (V1, V2):
        with contextlib.suppress(Corrupt):
            assert isinstance(decode(header + body), LedgerMetadata)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2\n3",
        "two\n3\n0\n" + V1_SEGMENTS,
        "2\n3\n0\n",
        "2\n3\n0\n0\tonly:1\n",
        "4\n3\n0\n" + V1_SEGMENTS,
        f"2\n3\n0\n{V1_SEGMENTS}-7\tCLOSED",
        f"2\n3\n-1\n{V1_SEGMENTS}7\tCLOSED",
        f"2\n3\n0\n{V1_SEGMENTS}9\n",
    ],
)
def test_invalid_lines_are_corrupt(text: str) -> None:
    with pytest.raises(Corrupt):
        decode(V1 + text.encode())
