"""The v3 codec equals BookKeeper's own bytes, and the generated code for frames of any kind."""

import random

import pytest
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack, pack_lac
from bindery_core.errors import BadRequest
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import bookkeeper_pb2 as pb
from bindery_core.wire import messages as m
from bindery_core.wire import v3, v3_fast, v3_generated
from bindery_core.wire.framing import FrameDecoder
from hypothesis import given, settings
from hypothesis import strategies as st

KEY = master_key(b"pw")
MAC = Digester(DigestType.MAC, b"pw")
ENTRY_L0 = pack(MAC, ledger_id=0, entry_id=0, lac=-1, length=5, payload=b"hello")
LAC_L0 = pack_lac(MAC, ledger_id=0, lac=1)
ENTRY_L1_E1 = bytes(0x36)
MINUS_ONE = "ffffffffffffffffff01"

# Each pair was recorded on the wire between BookKeeper 4.17.2's client and bookie.
GOLDEN_REQUESTS = {
    "add": (
        m.AddRequest(1, 0, 0, KEY, ENTRY_L0),
        "0a06080310021801 aa0655 0800 1000 1a14" + KEY.hex() + "2239" + ENTRY_L0.hex(),
    ),
    "write LAC": (
        m.WriteLacRequest(5, 0, 1, KEY, LAC_L0),
        "0a06080310061805 ba0640 0800 1001 1a14" + KEY.hex() + "2224" + LAC_L0.hex(),
    ),
    "read LAC": (m.ReadLacRequest(7, 0), "0a06080310071807 c20602 0800"),
    "read": (m.ReadRequest(10, 0, 0), "0a0608031001180a a20604 0800 1000"),
    "long poll": (
        m.ReadRequest(18, 1, -1, flag=m.ReadFlag.ENTRY_PIGGYBACK, previous_lac=0, timeout_ms=3000),
        "0a06080310011812 a20615 0801 10" + MINUS_ONE + "2000 28b817 a00602",
    ),
    "fencing read": (
        m.ReadRequest(19, 1, -1, flag=m.ReadFlag.FENCE_LEDGER, master_key=KEY),
        "0a06080310011813 a20626 0801 10" + MINUS_ONE + "1a14" + KEY.hex() + "a00601",
    ),
    "recovery read": (
        m.ReadRequest(20, 1, 3, flag=m.ReadFlag.FENCE_LEDGER, master_key=KEY, priority=m.HIGH_PRIORITY),
        "0a080803100118142064 a2061d 0801 1003 1a14" + KEY.hex() + "a00601",
    ),
    "recovery add": (
        m.AddRequest(21, 0, 0, KEY, ENTRY_L0, recovery=True, priority=m.HIGH_PRIORITY),
        "0a080803100218152064 aa0658 0800 1000 1a14" + KEY.hex() + "2239" + ENTRY_L0.hex() + "a00601",
    ),
}
GOLDEN_RESPONSES = {
    "add": (m.AddResponse(1, 0, 0, 0), "0a06080310021801 1000 aa0606 0800 1000 1800"),
    "write LAC": (m.WriteLacResponse(5, 0, 0), "0a06080310061805 1000 ba0604 0800 1000"),
    "read LAC without explicit LAC": (
        m.ReadLacResponse(7, 0, 0, last_entry_body=ENTRY_L0),
        "0a06080310071807 1000 c2063f 0800 1000 2239" + ENTRY_L0.hex(),
    ),
    "read": (
        m.ReadResponse(10, 0, 0, 0, ENTRY_L0, max_lac=-1),
        "0a0608031001180a 1000 a2064c 0800 1000 1800 2239" + ENTRY_L0.hex() + "28" + MINUS_ONE,
    ),
    "long poll": (
        m.ReadResponse(18, 0, 1, 1, ENTRY_L1_E1, max_lac=2),
        "0a06080310011812 1000 a20640 0800 1001 1801 2236" + ENTRY_L1_E1.hex() + "2802",
    ),
}


def framed(hex_text: str) -> bytes:
    message = bytes.fromhex(hex_text)
    return len(message).to_bytes(4, "big") + message


@pytest.mark.parametrize(("request_", "golden"), GOLDEN_REQUESTS.values(), ids=GOLDEN_REQUESTS)
def test_requests_equal_the_bytes_of_bookkeepers_client(request_: m.Request, golden: str) -> None:
    assert v3.encode_request(request_) == v3_generated.encode_request(request_) == framed(golden)
    assert v3.decode_request(framed(golden)[4:]) == request_
    assert v3_generated.decode_request(framed(golden)[4:]) == request_


@pytest.mark.parametrize(("response", "golden"), GOLDEN_RESPONSES.values(), ids=GOLDEN_RESPONSES)
def test_responses_equal_the_bytes_of_bookkeepers_bookie(response: m.Response, golden: str) -> None:
    assert v3.encode_response(response) == v3_generated.encode_response(response) == framed(golden)
    assert v3.decode_response(framed(golden)[4:]) == response
    assert v3_generated.decode_response(framed(golden)[4:]) == response


i64 = st.one_of(st.integers(-1, 300), st.integers(-(2**63), 2**63 - 1))
u64 = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
priorities = st.sampled_from([0, 1, 100, 128, 2**32 - 1])
bodies = st.one_of(st.binary(max_size=40), st.integers(100, 20000).map(bytes))
keys = st.one_of(st.just(KEY), st.binary(max_size=200))
statuses = st.sampled_from(list(m.Status)).map(int)


def opt(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(st.none(), strategy)


requests = st.one_of(
    st.builds(
        m.AddRequest, u64, i64, i64, keys, bodies, st.booleans(),
        st.one_of(st.just(0), st.just(1), st.integers(-(2**31), 2**31 - 1)), priorities,
    ),
    st.builds(m.ReadRequest, u64, i64, i64, st.integers(0, 2), opt(keys), opt(i64), opt(i64), priorities),
    st.builds(m.WriteLacRequest, u64, i64, i64, keys, st.binary(max_size=256), priorities),
    st.builds(m.ReadLacRequest, u64, i64, priorities),
    st.builds(m.BookieInfoRequest, u64, i64),
    st.builds(m.ForceLedgerRequest, u64, i64),
    st.builds(m.ListEntriesRequest, u64, i64),
    st.builds(m.StartTlsRequest, u64),
    st.builds(m.AuthRequest, u64, st.text(max_size=20), bodies),
)  # fmt: skip
responses = st.one_of(
    st.builds(m.AddResponse, u64, statuses, i64, i64),
    st.builds(m.ReadResponse, u64, statuses, i64, i64, opt(bodies), opt(i64), opt(i64)),
    st.builds(m.WriteLacResponse, u64, statuses, i64),
    st.builds(m.ReadLacResponse, u64, statuses, i64, opt(bodies), opt(bodies)),
    st.builds(m.BookieInfoResponse, u64, statuses, opt(i64), opt(i64)),
    st.builds(m.ForceLedgerResponse, u64, statuses, i64),
    st.builds(m.ListEntriesResponse, u64, statuses, i64, opt(bodies)),
    st.builds(m.StartTlsResponse, u64, statuses),
    st.builds(m.AuthResponse, u64, statuses, st.text(min_size=1, max_size=20), bodies),
    st.builds(m.ErrorResponse, u64, st.integers(1, 8), statuses.filter(bool)),
)


@settings(max_examples=300, deadline=None)
@given(requests)
def test_requests_round_trip_and_the_fast_path_equals_the_generated_code(request_: m.Request) -> None:
    frame = v3.encode_request(request_)
    assert frame == v3_generated.encode_request(request_)
    assert v3.decode_request(frame[4:]) == v3_generated.decode_request(frame[4:]) == request_


@settings(max_examples=300, deadline=None)
@given(responses)
def test_responses_round_trip_and_the_fast_path_equals_the_generated_code(response: m.Response) -> None:
    frame = v3.encode_response(response)
    assert frame == v3_generated.encode_response(response)
    decoded = v3_generated.decode_response(frame[4:])
    assert v3.decode_response(frame[4:]) == decoded
    if not isinstance(response, m.ErrorResponse) or response.operation not in (m.Operation.AUTH, m.Operation.START_TLS):
        assert decoded == response


def outcome(function, data: bytes):  # type: ignore[no-untyped-def]
    try:
        return function(data)
    except BadRequest:
        return BadRequest


@pytest.mark.parametrize("name", GOLDEN_REQUESTS)
def test_no_flip_or_truncation_changes_the_result_of_the_fast_request_decoder(name: str) -> None:
    """Both decoders agree on every flipped bit, every flipped byte and every truncation."""
    message = framed(GOLDEN_REQUESTS[name][1])[4:]
    damaged = [message[:cut] for cut in range(len(message))]
    for at in range(len(message)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged.append(message[:at] + bytes((message[at] ^ mask,)) + message[at + 1 :])
    fast_answers = 0
    for data in damaged:
        fast = v3_fast.decode_request(data)
        if fast is not None:
            fast_answers += 1
            assert outcome(v3_generated.decode_request, data) == fast
    if name in ("add", "read", "recovery add"):
        assert fast_answers > 0


@pytest.mark.parametrize("name", GOLDEN_RESPONSES)
def test_no_flip_or_truncation_changes_the_result_of_the_fast_response_decoder(name: str) -> None:
    message = framed(GOLDEN_RESPONSES[name][1])[4:]
    damaged = [message[:cut] for cut in range(len(message))]
    for at in range(len(message)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged.append(message[:at] + bytes((message[at] ^ mask,)) + message[at + 1 :])
    for data in damaged:
        fast = v3_fast.decode_response(data)
        if fast is not None:
            assert outcome(v3_generated.decode_response, data) == fast


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes_are_decoded_or_a_bad_request(data: bytes) -> None:
    for decode in (v3.decode_request, v3.decode_response):
        assert outcome(decode, data) is not None


def test_the_fast_path_decodes_adds_and_plain_reads() -> None:
    """The most frequent requests must be decoded by the fast path."""
    for request_ in (
        m.AddRequest(2**40, 2**50, 2**30, KEY, b"x" * 5000),
        m.AddRequest(1, 0, 0, KEY, ENTRY_L0, recovery=True, priority=100),
        m.ReadRequest(10, 3, 5),
        m.ReadRequest(10, 3, -1),
    ):
        assert v3_fast.decode_request(v3.encode_request(request_)[4:]) == request_
    for response in (m.AddResponse(2**40, 0, 2**50, 2**30), m.ReadResponse(10, 0, 3, 5, ENTRY_L0, 4)):
        assert v3_fast.decode_response(v3.encode_response(response)[4:]) == response


def a_row(
    ledger: int, entry: int, txn: int, count: int, step: int, body: int, recovery: bool, priority: int, reads: bool
) -> list[m.AddRequest | m.ReadRequest]:
    if reads:
        key = KEY if recovery else None
        return [
            m.ReadRequest(txn + n, ledger + n * step, entry + n, master_key=key, priority=priority)
            for n in range(count)
        ]
    return [
        m.AddRequest(txn + n, ledger + n * step, entry + n, KEY, bytes((n & 0xFF,)) * body, recovery, 0, priority)
        for n in range(count)
    ]


rows = st.builds(
    a_row,
    st.integers(0, 2**40), st.sampled_from((0, 100, 127, 2**14 - 3, 2**21 - 5, 2**40)),
    st.sampled_from((0, 120, 2**14 - 4, 2**32)), st.integers(1, 300), st.sampled_from((0, 0, 1)),
    st.sampled_from((0, 1, 100, 127, 128, 300)), st.sampled_from((False, False, True)),
    st.sampled_from((0, 0, 0, 100)), st.booleans(),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_series_of_adds_and_reads_are_decoded_like_the_generated_code(
    some: list[list[m.AddRequest | m.ReadRequest]], lots: random.Random
) -> None:
    """Long series, mixed series, other requests between them, damaged frames: the results are equal."""
    sent = [request for row in some for request in row]
    if lots.random() < 0.3:
        lots.shuffle(sent)
    messages = [v3.encode_request(request)[4:] for request in sent]
    for _ in range(lots.choice((0, 0, 1, 5))):
        at = lots.randrange(len(messages))
        damaged = bytearray(messages[at])
        damaged[lots.randrange(min(len(damaged), 60))] ^= lots.choice((1, 0x80, 0xFF))
        messages[at] = lots.choice((bytes(damaged), messages[at][:-1], v3.encode_request(m.ReadLacRequest(1, 2))[4:]))
    expected = []
    for message in messages:
        found = outcome(v3_generated.decode_request, message)
        if found is BadRequest:
            break
        expected.append(found)
    requests_, error = v3.decode_readable(messages)
    assert requests_ == expected
    assert (error is not None) == (len(expected) < len(messages))
    reader, piecemeal = v3.RequestReader(), list[m.Request]()
    is_readable = True
    while messages and is_readable:
        size = lots.choice((1, 1, 1, 2, 9))
        batch, unreadable = reader.decode_readable(messages[:size])
        piecemeal += batch
        is_readable = unreadable is None
        del messages[:size]
    assert piecemeal == expected
    assert is_readable == (error is None)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=2), st.randoms(use_true_random=False))
def test_responses_to_a_group_of_reads_equal_the_single_responses(
    some: list[list[m.AddRequest | m.ReadRequest]], lots: random.Random
) -> None:
    """Bodies of one size, of several sizes, and absent ones, with LACs and without."""
    sizes = lots.choice(((100,), (0, 1, 127, 128, 1000), (16_000, 20_000)))
    lacs = lots.choice(((7,), (None,), (-1, 2**40, None)))
    times = lots.choice(((None,), (None, 0, 2**41)))
    answers = [
        m.ReadResponse(one.txn_id, 0, one.ledger_id, one.entry_id, bytes(lots.choice(sizes)), lots.choice(lacs),
                       lots.choice(times))
        if lots.random() < 0.95
        else m.ReadResponse(one.txn_id, int(m.Status.NO_ENTRY), one.ledger_id, -1)
        for row in some
        for one in row
    ]  # fmt: skip
    assert v3.encode_read_responses(answers) == b"".join(map(v3_generated.encode_response, answers))


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=2), st.randoms(use_true_random=False))
def test_responses_to_a_group_of_adds_equal_the_single_responses(
    some: list[list[m.AddRequest | m.ReadRequest]], lots: random.Random
) -> None:
    adds = [one for row in some for one in row if type(one) is m.AddRequest]
    statuses_ = [lots.choice((0, 0, 0, 0, 0, 0, 0, 0, 0, int(m.Status.IO_ERROR))) for _ in adds]
    each = [
        v3_generated.encode_response(m.AddResponse(add.txn_id, status, add.ledger_id, add.entry_id))
        for add, status in zip(adds, statuses_, strict=True)
    ]
    assert v3.encode_add_responses(adds, statuses_) == b"".join(each)


def request_bytes(*, version: int = 3, operation: int = 2, txn_id: int = 9) -> bytes:
    return bytes((0x0A, 6, 8, version, 0x10, operation, 0x18, txn_id))


@pytest.mark.parametrize("version", [1, 2])
def test_a_request_of_another_version_is_an_other_request_with_its_ids(version: int) -> None:
    message = request_bytes(version=version) + v3.encode_request(m.AddRequest(9, 7, 8, KEY, b"x"))[4 + 8 :]
    assert v3.decode_request(message) == m.OtherRequest(9, m.Operation.ADD_ENTRY, version, 7, 8)


@pytest.mark.parametrize("operation", [3, 4, 12])
def test_an_operation_that_is_not_served_is_an_other_request(operation: int) -> None:
    assert v3.decode_request(request_bytes(operation=operation)) == m.OtherRequest(9, operation, 3)


@pytest.mark.parametrize("operation", [1, 2, 5, 6, 7, 10, 11])
def test_an_operation_without_its_message_is_an_other_request(operation: int) -> None:
    assert v3.decode_request(request_bytes(operation=operation)) == m.OtherRequest(9, operation, 3)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        request_bytes(operation=13),
        request_bytes(operation=0),
        request_bytes(version=4),
        request_bytes()[:-2],
        b"\x02\x01\x00\x00" + bytes(40),
        request_bytes() + b"\xaa\x06\x02\x08\x00",
    ],
    ids=["empty", "operation 13", "operation 0", "version 4", "header cut", "a v2 add", "required fields missing"],
)
def test_an_unreadable_request_is_a_bad_request(message: bytes) -> None:
    with pytest.raises(BadRequest):
        v3.decode_request(message)


def test_unknown_flags_and_fields_are_ignored() -> None:
    plain = m.ReadRequest(9, 1, 2)
    unknown_flag = v3.encode_request(m.ReadRequest(9, 1, 2, flag=1))[4:].replace(b"\xa0\x06\x01", b"\xa0\x06\x7f")
    assert v3.decode_request(unknown_flag) == plain
    with_context = pb.Request.FromString(v3.encode_request(plain)[4:])
    with_context.context.add(key="user", value="someone")
    assert v3.decode_request(with_context.SerializeToString()) == plain
    assert v3.decode_request(v3.encode_request(plain)[4:] + b"\xf8\x3f\x01") == plain


def test_the_outer_status_counts_unless_it_is_ok() -> None:
    frame = pb.Response.FromString(v3.encode_response(m.AddResponse(9, 0, 1, 2))[4:])
    frame.status = pb.FENCED
    assert v3.decode_response(frame.SerializeToString()) == m.AddResponse(9, m.Status.FENCED, 1, 2)
    frame.status = pb.OK
    frame.add.status = pb.READ_ONLY
    assert v3.decode_response(frame.SerializeToString()) == m.AddResponse(9, m.Status.READ_ONLY, 1, 2)


def test_an_ok_response_without_its_message_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="body of the response is missing"):
        v3.decode_response(request_bytes() + b"\x10\x00")


def test_the_bytes_of_a_group_of_add_responses_are_their_frames_joined() -> None:
    adds = [m.AddRequest(n, n * 1000, n * 7, KEY, b"") for n in range(200)]
    group_statuses = [0 if n % 3 else int(m.Status.FENCED) for n in range(200)]
    expected = v3.encode_responses(
        m.AddResponse(a.txn_id, s, a.ledger_id, a.entry_id) for a, s in zip(adds, group_statuses, strict=True)
    )
    assert v3.encode_add_responses(adds, group_statuses) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(requests, max_size=5), st.lists(responses, max_size=5))
def test_the_bytes_of_a_batch_are_the_frames_of_its_members_joined(
    some: list[m.Request], others: list[m.Response]
) -> None:
    assert v3.encode_requests(some) == b"".join(map(v3.encode_request, some))
    assert v3.encode_responses(others) == b"".join(map(v3.encode_response, others))
    messages = FrameDecoder().feed(v3.encode_requests(some))
    assert v3.decode_requests(messages) == some


def test_an_authentication_plugin_whose_name_is_not_utf_8_is_refused() -> None:
    good = v3.encode_request(m.AuthRequest(1, "ab", b"token"))
    assert b"\x0a\x02ab" in good
    with pytest.raises(BadRequest, match="not UTF-8"):
        v3.decode_request(good.replace(b"\x0a\x02ab", b"\x0a\x02\xff\xfe")[4:])
    answer = v3.encode_response(m.AuthResponse(1, 0, "ab", b"token"))
    with pytest.raises(BadRequest, match="not UTF-8"):
        v3.decode_response(answer.replace(b"\x0a\x02ab", b"\x0a\x02\xff\xfe")[4:])


@pytest.mark.parametrize(
    ("key_size", "is_read"), [(0, True), (20, True), (255, True), (256, False), (5_000_000, False)]
)
def test_a_master_key_that_no_client_sends_is_refused(key_size: int, is_read: bool) -> None:
    key = bytes(key_size)
    for request_ in (
        m.AddRequest(1, 2, 3, key, b"body"),
        m.AddRequest(1, 2, 3, key, b"body", priority=100),
        m.ReadRequest(1, 2, 3, flag=1, master_key=key),
        m.ReadRequest(1, 2, 3, master_key=key),
        m.WriteLacRequest(1, 2, 3, key, b"packet"),
    ):
        decoded = v3.decode_request(v3.encode_request(request_)[4:])
        if is_read:
            assert decoded == request_
        else:
            assert type(decoded) is m.OtherRequest
            assert (decoded.txn_id, decoded.ledger_id, decoded.version) == (1, 2, 3)


@pytest.mark.parametrize(("size", "is_read"), [(16, True), (256, True), (257, False), (5_000_000, False)])
def test_a_lac_packet_that_no_client_sends_is_refused(size: int, is_read: bool) -> None:
    request_ = m.WriteLacRequest(1, 2, 3, b"key", bytes(size))
    decoded = v3.decode_request(v3.encode_request(request_)[4:])
    assert decoded == request_ if is_read else type(decoded) is m.OtherRequest
