"""The v2 codec: BookKeeper's own bytes, every truncation and every flipped bit."""

import contextlib

import pytest
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack
from bindery_core.errors import BadRequest
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire import v2
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import ReadFlag, Status
from hypothesis import given, settings
from hypothesis import strategies as st

KEY = master_key(b"pw")
CRC32C = Digester(DigestType.CRC32C, b"pw")
ENTRY = pack(CRC32C, ledger_id=8, entry_id=0, lac=-1, length=5, payload=b"hello")
BATCH = tuple(
    pack(CRC32C, ledger_id=9, entry_id=entry_id, lac=-1, length=18 * (entry_id + 1), payload=bytes(18))
    for entry_id in range(3)
)
L8 = "0000000000000008"
L9 = "0000000000000009"
ZERO = "0000000000000000"
FIVE = "0000000000000005"
LAST = "ffffffffffffffff"
AUTH_DISABLED = "0a12" + b"AuthDisabledPlugin".hex() + "1200"

# The first of each kind was recorded on the wire between BookKeeper 4.17.2's client and bookie.
GOLDEN_REQUESTS = {
    "add": (m.AddRequest(2, 8, 0, KEY, ENTRY), "02010000" + KEY.hex() + ENTRY.hex()),
    "recovery add": (
        m.AddRequest(2, 8, 0, KEY, ENTRY, recovery=True, priority=1), "02010006" + KEY.hex() + ENTRY.hex()
    ),
    "re-replication's add": (m.AddRequest(2, 8, 0, KEY, ENTRY, recovery=True), "02010002" + KEY.hex() + ENTRY.hex()),
    "read of the last entry": (m.ReadRequest(2, 8, -1), "02020000" + L8 + LAST),
    "fencing LAC read": (
        m.ReadRequest(2, 8, -1, flag=ReadFlag.FENCE_LEDGER, master_key=KEY), "02020001" + L8 + LAST + KEY.hex()
    ),
    "recovery read": (
        m.ReadRequest(2, 8, 0, flag=ReadFlag.FENCE_LEDGER, master_key=KEY, priority=1),
        "02020005" + L8 + ZERO + KEY.hex(),
    ),
    "batch read": (
        m.BatchReadRequest(2, 9, 0, request_id=5, count_max=3, size_max=1000),
        "02070000" + L9 + ZERO + FIVE + "00000003" + "00000000000003e8",
    ),
    "fencing batch read": (
        m.BatchReadRequest(2, 9, 0, 5, 3, 1000, ReadFlag.FENCE_LEDGER, KEY),
        "02070001" + L9 + ZERO + FIVE + "00000003" + "00000000000003e8" + KEY.hex(),
    ),
    "auth": (m.AuthRequest(2, "AuthDisabledPlugin", b""), "02030000" + AUTH_DISABLED),
}  # fmt: skip
GOLDEN_RESPONSES = {
    "add": (m.AddResponse(2, 0, 8, 0), "02010000 00000000" + L8 + ZERO),
    "fenced": (m.AddResponse(2, Status.FENCED, 8, 0), "02010000 00000068" + L8 + ZERO),
    "last entry": (m.ReadResponse(2, 0, 8, -1, ENTRY), "02020000 00000000" + L8 + LAST + ENTRY.hex()),
    "no entry": (m.ReadResponse(2, Status.NO_ENTRY, 8, 7), "02020000 00000002" + L8 + "0000000000000007"),
    "batch": (
        m.BatchReadResponse(2, 0, 9, 0, 5, BATCH),
        "02070000 00000000" + L9 + ZERO + FIVE + "".join("00000036" + body.hex() for body in BATCH),
    ),
    "no batch": (m.BatchReadResponse(2, Status.NO_LEDGER, 9, 0, 5), "02070000 00000001" + L9 + ZERO + FIVE),
    "version error": (m.ReadResponse(3, Status.BAD_VERSION, 8, 0), "03020000 00000067" + L8 + ZERO),
    "auth": (m.AuthResponse(2, 0, "AuthDisabledPlugin", b""), "02030000" + AUTH_DISABLED),
}


def framed(hex_text: str) -> bytes:
    message = bytes.fromhex(hex_text)
    return len(message).to_bytes(4, "big") + message


@pytest.mark.parametrize(("request_", "golden"), GOLDEN_REQUESTS.values(), ids=GOLDEN_REQUESTS)
def test_requests_equal_the_bytes_of_bookkeepers_client(request_: m.Request, golden: str) -> None:
    assert v2.encode_request(request_) == framed(golden)
    assert v2.decode_request(framed(golden)[4:]) == request_


@pytest.mark.parametrize(("response", "golden"), GOLDEN_RESPONSES.values(), ids=GOLDEN_RESPONSES)
def test_responses_equal_the_bytes_of_bookkeepers_bookie(response: m.Response, golden: str) -> None:
    assert v2.encode_response(response) == framed(golden)
    assert v2.decode_response(framed(golden)[4:]) == response


def test_the_bytes_of_a_batch_are_those_of_its_members_joined() -> None:
    requests = [request for request, _ in GOLDEN_REQUESTS.values()]
    responses = [response for response, _ in GOLDEN_RESPONSES.values()]
    assert v2.encode_requests(requests) == b"".join(map(v2.encode_request, requests))
    assert v2.encode_responses(responses) == b"".join(map(v2.encode_response, responses))
    assert v2.decode_requests(FrameDecoder().feed(v2.encode_requests(requests))) == requests
    assert v2.decode_responses(FrameDecoder().feed(v2.encode_responses(responses))) == responses


def test_each_add_of_a_group_gets_its_own_response() -> None:
    adds = [m.AddRequest(version, 8, entry_id, KEY, b"") for entry_id, version in enumerate((2, 1, 0))]
    statuses = [Status.OK, Status.READ_ONLY, Status.UNKNOWN_LEDGER_STATE]
    expected = [m.AddResponse(add.txn_id, status, 8, add.entry_id) for add, status in zip(adds, statuses, strict=True)]
    assert v2.encode_add_responses(adds, statuses) == v2.encode_responses(expected)


def test_the_entry_ids_of_a_v2_add_are_those_of_its_body() -> None:
    assert v2.decode_request(bytes.fromhex("02010000") + KEY + ENTRY) == m.AddRequest(2, 8, 0, KEY, ENTRY)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_older_versions_are_served_and_repeated(version: int) -> None:
    def word(opcode: int) -> str:
        return f"{version:02x}{opcode:02x}0000" if version else f"000000{opcode:02x}"

    add = v2.decode_request(bytes.fromhex(word(1)) + KEY + ENTRY)
    assert add == m.AddRequest(version, 8, 0, KEY, ENTRY)
    read = v2.decode_request(bytes.fromhex(word(2) + L8 + ZERO))
    assert read == m.ReadRequest(version, 8, 0)
    batch = v2.decode_request(bytes.fromhex(word(7) + L9 + ZERO + FIVE + "00000003" + "00000000000003e8"))
    assert batch == m.BatchReadRequest(version, 9, 0, 5, 3, 1000)
    assert v2.encode_response(m.AddResponse(version, 0, 8, 0))[4:8].hex() == word(1)
    assert v2.encode_response(m.ReadResponse(version, 0, 8, 0, b""))[4:8].hex() == word(2)
    assert v2.encode_response(m.BatchReadResponse(version, 0, 8, 0, 5))[4:8].hex() == word(7)


def test_the_oldest_version_has_no_flags() -> None:
    """With version 0 the word is the opcode; the bits of flags in other versions are ignored."""
    assert v2.decode_request(bytes.fromhex("00000502" + L8 + ZERO)) == m.ReadRequest(0, 8, 0)


def test_before_version_2_a_fencing_read_has_no_master_key() -> None:
    found = v2.decode_request(bytes.fromhex("01020001" + L8 + ZERO))
    assert found == m.ReadRequest(1, 8, 0, flag=ReadFlag.FENCE_LEDGER, master_key=None)


@pytest.mark.parametrize("version", [3, 0x0A, 0x7F, 0x80, 0xFF])
def test_an_unsupported_version_is_reported_and_its_byte_is_repeated(version: int) -> None:
    add = v2.decode_request(bytes((version, 1, 0, 0)) + KEY + ENTRY)
    assert add == m.OtherRequest(version, m.Operation.ADD_ENTRY, version, 8, 0)
    read = v2.decode_request(bytes((version, 2, 0, 0)) + bytes.fromhex(L8 + LAST))
    assert read == m.OtherRequest(version, m.Operation.READ_ENTRY, version, 8, -1)
    batch = v2.decode_request(bytes((version, 7, 0, 0)) + bytes.fromhex(L9 + ZERO + FIVE) + bytes(12))
    assert batch == m.OtherRequest(version, m.Operation.BATCH_READ_ENTRY, version, 9, 0, 5)
    answer = v2.encode_response(m.ReadResponse(version, Status.BAD_VERSION, 8, 0))
    assert answer[4:8] == bytes((version, 2, 0, 0))


@pytest.mark.parametrize("opcode", [0, 4, 5, 6, 8, 9, 12, 255])
@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_other_opcodes_end_the_connection(version: int, opcode: int) -> None:
    word = bytes((version, opcode, 0, 0)) if version else bytes((0, 0, 0, opcode))
    with pytest.raises(BadRequest):
        v2.decode_request(word + bytes(100))


@pytest.mark.parametrize(("request_", "golden"), GOLDEN_REQUESTS.values(), ids=GOLDEN_REQUESTS)
def test_a_request_that_is_cut_off_ends_the_connection(request_: m.Request, golden: str) -> None:
    """Exception: an entry in an add may be cut off, because it has no length of its own."""
    message = bytes.fromhex(golden)
    fixed_size = 40 if isinstance(request_, m.AddRequest) else len(message)
    for size in range(fixed_size):
        with pytest.raises(BadRequest):
            v2.decode_request(message[:size])
    assert v2.decode_request(message[:fixed_size]) is not None


@pytest.mark.parametrize(("response", "golden"), GOLDEN_RESPONSES.values(), ids=GOLDEN_RESPONSES)
def test_a_response_that_is_cut_off_is_refused_unless_an_entry_may_end_there(response: m.Response, golden: str) -> None:
    message = bytes.fromhex(golden)
    whole = {24, *range(25, len(message))} if isinstance(response, m.ReadResponse) else set()
    if isinstance(response, m.BatchReadResponse):
        whole = {32 + n * 58 for n in range(len(response.bodies))}
    for size in range(len(message)):
        if size in whole:
            assert type(v2.decode_response(message[:size])) is type(response)
        else:
            with pytest.raises(BadRequest):
                v2.decode_response(message[:size])


@pytest.mark.parametrize("golden", [golden for _, golden in GOLDEN_REQUESTS.values()], ids=GOLDEN_REQUESTS)
def test_a_request_with_a_flipped_bit_is_decoded_or_a_bad_request(golden: str) -> None:
    message = bytes.fromhex(golden)
    for at in range(len(message)):
        for bit in range(8):
            damaged = bytearray(message)
            damaged[at] ^= 1 << bit
            with contextlib.suppress(BadRequest):
                assert isinstance(v2.decode_request(bytes(damaged)), m.Request)


@pytest.mark.parametrize("golden", [golden for _, golden in GOLDEN_RESPONSES.values()], ids=GOLDEN_RESPONSES)
def test_a_response_with_a_flipped_bit_is_decoded_or_a_bad_request(golden: str) -> None:
    message = bytes.fromhex(golden)
    for at in range(len(message)):
        for bit in range(8):
            damaged = bytearray(message)
            damaged[at] ^= 1 << bit
            with contextlib.suppress(BadRequest):
                assert isinstance(v2.decode_response(bytes(damaged)), m.Response)


def test_every_split_of_a_stream_gives_the_same_requests() -> None:
    requests = [request for request, _ in GOLDEN_REQUESTS.values()]
    stream = v2.encode_requests(requests)
    for at in range(len(stream)):
        decoder = FrameDecoder()
        assert v2.decode_requests(decoder.feed(stream[:at]) + decoder.feed(stream[at:])) == requests


def test_bytes_after_a_packet_and_unknown_flags_are_ignored() -> None:
    assert v2.decode_request(bytes.fromhex("0202fff8" + L8 + ZERO) + b"more") == m.ReadRequest(2, 8, 0)


def test_a_response_with_an_unknown_status_is_refused() -> None:
    with pytest.raises(BadRequest):
        v2.decode_response(bytes.fromhex("02010000 0000006c" + L8 + ZERO))


def test_responses_are_matched_by_opcode_and_ids() -> None:
    pairs = [
        (m.AddRequest(2, 8, 0, KEY, ENTRY), m.AddResponse(2, 104, 8, 0)),
        (m.ReadRequest(2, 8, -1), m.ReadResponse(2, 0, 8, -1, ENTRY)),
        (m.BatchReadRequest(2, 8, 0, 77), m.BatchReadResponse(2, 0, 8, 0, 77)),
        (m.AuthRequest(2, "p"), m.AuthResponse(2, 0, "p")),
    ]
    assert all(v2.key_of(request) == v2.key_of(response) for request, response in pairs)
    assert len({v2.key_of(request) for request, _ in pairs}) == len(pairs)


I64 = st.integers(-(2**63), 2**63 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
KEYS = st.binary(min_size=20, max_size=20)
FENCES = st.one_of(st.just((0, None)), KEYS.map(lambda key: (1, key)))
REQUESTS = st.one_of(
    st.builds(
        lambda key, ledger_id, entry_id, rest, recovery, priority: m.AddRequest(
            2, ledger_id, entry_id, key, ledger_id.to_bytes(8, "big", signed=True)
            + entry_id.to_bytes(8, "big", signed=True) + rest, recovery, 0, priority,
        ),
        KEYS, I64, I64, st.binary(max_size=50), st.booleans(), st.integers(0, 1),
    ),
    st.builds(
        lambda ledger_id, entry_id, fence, priority: m.ReadRequest(2, ledger_id, entry_id, *fence, priority=priority),
        I64, I64, FENCES, st.integers(0, 1),
    ),
    st.builds(
        lambda ids, count, size, fence, priority: m.BatchReadRequest(2, *ids, count, size, *fence, priority),
        st.tuples(I64, I64, I64), I32, I64, FENCES, st.integers(0, 1),
    ),
    st.builds(m.AuthRequest, st.just(2), st.text(max_size=9), st.binary(max_size=20)),
)  # fmt: skip
STATUSES = st.sampled_from([status for status in Status if status not in (Status.OK, Status.UNKNOWN_LEDGER_STATE)])
VERSIONS = st.integers(0, 2)
RESPONSES = st.one_of(
    st.builds(m.AddResponse, VERSIONS, st.one_of(st.just(0), STATUSES.map(int)), I64, I64),
    st.builds(m.ReadResponse, VERSIONS, st.just(0), I64, I64, st.binary(max_size=50)),
    st.builds(m.ReadResponse, VERSIONS, STATUSES.map(int), I64, I64),
    st.builds(
        m.BatchReadResponse,
        VERSIONS,
        st.just(0),
        I64,
        I64,
        I64,
        st.lists(st.binary(max_size=20), max_size=4).map(tuple),
    ),
    st.builds(m.BatchReadResponse, VERSIONS, STATUSES.map(int), I64, I64, I64),
    st.builds(m.AuthResponse, VERSIONS, st.just(0), st.text(max_size=9), st.binary(max_size=20)),
)


@settings(max_examples=300, deadline=None)
@given(REQUESTS)
def test_any_request_round_trips(request_: m.Request) -> None:
    assert v2.decode_request(v2.encode_request(request_)[4:]) == request_


@settings(max_examples=300, deadline=None)
@given(RESPONSES)
def test_any_response_round_trips(response: m.Response) -> None:
    assert v2.decode_response(v2.encode_response(response)[4:]) == response


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes_are_decoded_or_a_bad_request(message: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(v2.decode_request(message), m.Request)
    with contextlib.suppress(BadRequest):
        assert isinstance(v2.decode_response(message), m.Response)


def test_an_authentication_plugin_whose_name_is_not_utf_8_is_refused() -> None:
    with pytest.raises(BadRequest, match="not UTF-8"):
        v2.decode_request(bytes.fromhex("02030000") + b"\x0a\x02\xff\xfe\x12\x00")
