"""The hand-written codec of adds and reads writes the bytes of the generated code, and decodes only usual frames."""

import pytest
from bindery_core.errors import BadRequest
from bindery_core.wire import messages as m
from bindery_core.wire import v3_fast, v3_generated

KEY = bytes(range(20))
MANY = (0, 1, 127, 128, 16383, 16384, 2**21 - 1, 2**21, 2**40)
"""Numbers around the sizes of varints."""


def outcome(data: bytes) -> object:
    try:
        return v3_generated.decode_request(data)
    except BadRequest:
        return BadRequest


def message(request: m.Request) -> bytes:
    return v3_generated.encode_request(request)[4:]


def answer(response: m.Response) -> bytes:
    return v3_generated.encode_response(response)[4:]


ADDS = [
    *(m.AddRequest(number, 7, 9, KEY, b"body") for number in MANY),
    *(m.AddRequest(1, number, 9, KEY, b"body") for number in MANY),
    *(m.AddRequest(1, 7, number, KEY, b"body") for number in MANY),
    *(m.AddRequest(1, 7, 9, KEY, bytes(size)) for size in (0, 1, 56, 127, 128, 20_000)),
    m.AddRequest(1, 2**63 - 1, 2**63 - 1, KEY, b"body"),
    m.AddRequest(1, 7, 9, b"", b"body"),
    m.AddRequest(1, 7, 9, bytes(127), b"body"),
    m.AddRequest(1, 7, 9, KEY, b"body", recovery=True, priority=100),
    m.AddRequest(300, 7, 9, KEY, b"body", priority=127),
    m.AddRequest(2**40, 7, 9, KEY, b"body", recovery=True),
]
READS = [
    *(m.ReadRequest(number, 7, 9) for number in MANY),
    *(m.ReadRequest(1, number, 9) for number in MANY),
    *(m.ReadRequest(1, 7, number) for number in (*MANY, -1)),
    m.ReadRequest(2**40, 7, 9, priority=100),
]
OTHER_SHAPES = [
    m.AddRequest(1, 7, 9, bytes(128), b"body"),
    m.AddRequest(1, 7, 9, KEY, b"body", write_flags=1),
    m.AddRequest(1, 7, 9, KEY, b"body", recovery=True, write_flags=1),
    m.AddRequest(1, 7, 9, KEY, b"body", priority=128),
    m.AddRequest(1, -1, 9, KEY, b"body"),
    m.AddRequest(1, 7, -1, KEY, b"body"),
    m.ReadRequest(1, 7, 9, flag=1, master_key=KEY),
    m.ReadRequest(1, 7, 9, master_key=KEY),
    m.ReadRequest(1, 7, 9, flag=2, previous_lac=-1, timeout_ms=3000),
    m.ReadRequest(1, 7, 9, timeout_ms=200),
    m.ReadRequest(1, 7, 9, priority=2**32 - 1),
]


@pytest.mark.parametrize("request_", [*ADDS, *READS, *OTHER_SHAPES])
def test_a_request_is_encoded_to_the_bytes_of_the_generated_code(request_: m.AddRequest | m.ReadRequest) -> None:
    if isinstance(request_, m.AddRequest):
        parts = v3_fast.add_request_parts(request_)
        assert b"".join(parts) == v3_generated.encode_request(request_)
        assert any(part is request_.body for part in parts), "the body is not copied"
    else:
        assert v3_fast.encode_read_request(request_) == v3_generated.encode_request(request_)


@pytest.mark.parametrize("request_", [*ADDS, *READS])
def test_a_usual_request_is_decoded(request_: m.AddRequest | m.ReadRequest) -> None:
    assert v3_fast.decode_request(message(request_)) == request_


@pytest.mark.parametrize("request_", OTHER_SHAPES)
def test_a_request_of_another_shape_is_left_to_the_generated_code(request_: m.Request) -> None:
    assert v3_fast.decode_request(message(request_)) is None


@pytest.mark.parametrize(
    "request_", [m.ReadLacRequest(1, 7), m.WriteLacRequest(1, 7, 1, KEY, b"x"), m.ForceLedgerRequest(1, 7)], ids=str
)
def test_another_operation_is_left_to_the_generated_code(request_: m.Request) -> None:
    assert v3_fast.decode_request(message(request_)) is None


@pytest.mark.parametrize(
    "request_",
    [
        m.AddRequest(1, 7, 9, KEY, b"body"),
        m.AddRequest(300, 300, 300, KEY, bytes(300), recovery=True, priority=100),
        m.ReadRequest(1, 7, 9),
        m.ReadRequest(300, 300, 300, priority=100),
    ],
)
def test_no_flip_or_truncation_changes_the_result_of_the_request_decoder(request_: m.Request) -> None:
    """Where the decoder accepts a damaged frame, the generated code decodes the same."""
    data = message(request_)
    damaged = [data[:cut] for cut in range(len(data))] + [data + b"\x00", data + b"\xa0\x06\x01"]
    for at in range(min(len(data), 70)):
        damaged += (data[:at] + bytes((data[at] ^ mask,)) + data[at + 1 :] for mask in (*range(1, 129), 255))
    accepted = 0
    for one in damaged:
        fast = v3_fast.decode_request(one)
        if fast is not None:
            accepted += 1
            assert outcome(one) == fast
    assert accepted > 100


def test_a_frame_with_a_repeated_or_unknown_field_is_left_to_the_generated_code() -> None:
    add, read = message(m.AddRequest(1, 7, 9, KEY, b"body")), message(m.ReadRequest(1, 7, 9))
    for data in (add, read):
        assert v3_fast.decode_request(data + b"\xf8\x3f\x01") is None
        assert v3_fast.decode_request(data + data) is None
        assert v3_fast.decode_request(b"") is None


# --- patterns ---------------------------------------------------------------------------------------------------------


def test_a_series_of_adds_has_a_pattern() -> None:
    """Nearly all of a batch must be decoded by its pattern."""
    adds = [m.AddRequest(300 + n, 7, 500 + n, KEY, b"x" * 100) for n in range(84)]
    first, *others = [v3_generated.encode_request(add)[4:] for add in adds]
    pattern = v3_fast.pattern_of(first, adds[0])
    assert pattern is not None
    assert [pattern.decode(message) for message in others[:11]] == adds[1:12]
    assert pattern.decode(v3_generated.encode_request(m.AddRequest(384, 7, 512, KEY, b"x" * 100))[4:]) is None


def test_a_series_of_reads_has_a_pattern() -> None:
    reads = [m.ReadRequest(300 + n, 7, 500 + n) for n in range(84)]
    first, *others = [v3_generated.encode_request(read)[4:] for read in reads]
    pattern = v3_fast.pattern_of(first, reads[0])
    assert pattern is not None
    assert [pattern.decode(message) for message in others[:11]] == reads[1:12]
    assert pattern.decode(v3_generated.encode_request(m.ReadRequest(384, 7, 512))[4:]) is None


@pytest.mark.parametrize(
    "unusual",
    [
        m.ReadRequest(300, 7, 500, priority=100),
        m.ReadRequest(300, 7, 500, flag=1, master_key=KEY),
        m.ReadRequest(300, 7, 500, previous_lac=3),
        m.ReadRequest(127, 7, 500),
        m.ReadRequest(300, 7, 127),
        m.ReadRequest(300, 7, -1),
    ],
)
def test_an_unusual_read_has_no_pattern(unusual: m.ReadRequest) -> None:
    assert v3_fast.pattern_of(v3_generated.encode_request(unusual)[4:], unusual) is None


@pytest.mark.parametrize(
    "request_", [m.AddRequest(2**20, 2**30, 2**15, KEY, b"x" * 100), m.ReadRequest(2**40, 2**40, 2**40)]
)
def test_no_flip_or_truncation_changes_the_result_of_a_pattern(request_: m.AddRequest | m.ReadRequest) -> None:
    message = v3_generated.encode_request(request_)[4:]
    pattern = v3_fast.pattern_of(message, request_)
    assert pattern is not None
    damaged = [message[:-1], message + b"x"]
    for at in range(len(message)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            damaged.append(message[:at] + bytes((message[at] ^ mask,)) + message[at + 1 :])
    answers = 0
    for data in damaged:
        found = pattern.decode(data)
        if found is not None:
            answers += 1
            assert outcome(data) == found
    assert answers > (100 if type(request_) is m.AddRequest else 12)


def test_a_pattern_keeps_its_ledger_and_key() -> None:
    first = m.AddRequest(2**20, 2**30, 2**15, KEY, b"x")
    pattern = v3_fast.pattern_of(message(first), first)
    assert isinstance(pattern, v3_fast.AddPattern)
    following = m.AddRequest(2**20 + 127, 2**30, 2**15 + 127, KEY, b"y")
    assert pattern.decode(message(following)) == following
    for other in (
        m.AddRequest(2**20, 2**30 + 1, 2**15, KEY, b"x"),
        m.AddRequest(2**20, 2**30, 2**15, KEY[::-1], b"x"),
        m.AddRequest(2**20, 2**30, 2**15, KEY, b"xx"),
        m.AddRequest(2**20 + 128, 2**30, 2**15, KEY, b"x"),
        m.AddRequest(2**20, 2**30, 2**15 + 128, KEY, b"x"),
    ):
        assert pattern.decode(message(other)) is None


def test_the_smallest_numbers_of_a_pattern() -> None:
    add, read = m.AddRequest(128, 7, 128, KEY, b"x"), m.ReadRequest(128, 7, 128)
    for first in (add, read):
        pattern = v3_fast.pattern_of(message(first), first)
        assert pattern is not None
        assert pattern.decode(message(first)) == first


@pytest.mark.parametrize(
    "unusual",
    [
        m.AddRequest(127, 7, 500, KEY, b"x"),
        m.AddRequest(300, 7, 127, KEY, b"x"),
        m.AddRequest(300, 7, 500, KEY, b"x", recovery=True),
        m.AddRequest(300, 7, 500, KEY, b"x", write_flags=1),
        m.AddRequest(300, 7, 500, KEY, b"x", priority=100),
    ],
)
def test_an_unusual_add_has_no_pattern(unusual: m.AddRequest) -> None:
    assert v3_fast.pattern_of(message(unusual), unusual) is None


def test_a_frame_that_was_encoded_in_another_way_has_no_pattern() -> None:
    """An unknown field at the end, which the generated code ignores."""
    add, read = m.AddRequest(300, 7, 500, KEY, b"x"), m.ReadRequest(300, 7, 500)
    assert v3_fast.pattern_of(message(add) + b"\xf8\x3f\x01", add) is None
    assert v3_fast.pattern_of(message(read) + b"\xf8\x3f\x01", read) is None


# --- responses --------------------------------------------------------------------------------------------------------

ADDED = [
    *(m.AddResponse(number, 0, 7, 9) for number in MANY),
    *(m.AddResponse(1, 0, number, 9) for number in MANY),
    *(m.AddResponse(1, 0, 7, number) for number in MANY),
    m.AddResponse(2**63, 0, -1, -1),
]
READ = [
    *(m.ReadResponse(number, 0, 7, 9, b"body", 8) for number in MANY),
    *(m.ReadResponse(1, 0, number, 9, b"body", 8) for number in MANY),
    *(m.ReadResponse(1, 0, 7, number, b"body", 8) for number in (*MANY, -1)),
    *(m.ReadResponse(1, 0, 7, 9, b"body", lac) for lac in (*MANY, -1, None)),
    *(m.ReadResponse(1, 0, 7, 9, bytes(size), 8) for size in (0, 1, 127, 128, 20_000)),
    m.ReadResponse(2**40, 0, 2**50, 2**30, b"", None),
]
OTHER_RESPONSES = [
    m.AddResponse(1, int(m.Status.FENCED), 7, 9),
    m.AddResponse(2**40, int(m.Status.IO_ERROR), 2**50, -1),
    m.ReadResponse(1, int(m.Status.NO_ENTRY), 7, 9),
    m.ReadResponse(2**40, int(m.Status.NO_ENTRY), 7, -1, None, 5),
    m.ReadResponse(1, 0, 7, 9, None, 5),
    m.ReadResponse(1, 0, 7, 9, b"body", 5, 1_700_000_000_000),
    m.ReadResponse(1, 0, 7, 9, b"body", None, 0),
]


@pytest.mark.parametrize("response", [*ADDED, *READ, *OTHER_RESPONSES])
def test_a_response_is_encoded_to_the_bytes_of_the_generated_code(response: m.AddResponse | m.ReadResponse) -> None:
    if isinstance(response, m.AddResponse):
        assert v3_fast.encode_add_response(response) == v3_generated.encode_response(response)
    else:
        assert b"".join(v3_fast.read_response_parts(response)) == v3_generated.encode_response(response)


@pytest.mark.parametrize("response", [*ADDED, *READ])
def test_a_usual_response_is_decoded(response: m.Response) -> None:
    assert v3_fast.decode_response(answer(response)) == response


@pytest.mark.parametrize(
    "response", [*OTHER_RESPONSES, m.WriteLacResponse(1, 0, 7), m.ReadLacResponse(1, 0, 7)], ids=str
)
def test_another_response_is_left_to_the_generated_code(response: m.Response) -> None:
    assert v3_fast.decode_response(answer(response)) is None


@pytest.mark.parametrize(
    "response", [m.AddResponse(1, 0, 7, 9), m.ReadResponse(1, 0, 7, 9, b"body", 8), m.ReadResponse(300, 0, 7, 9, b"x")]
)
def test_no_flip_or_truncation_changes_the_result_of_the_response_decoder(response: m.Response) -> None:
    data = answer(response)
    damaged = [data[:cut] for cut in range(len(data))] + [data + b"\x00", data + b"\x28\x01"]
    for at in range(len(data)):
        damaged += (data[:at] + bytes((data[at] ^ mask,)) + data[at + 1 :] for mask in (*range(1, 129), 255))
    accepted = 0
    for one in damaged:
        fast = v3_fast.decode_response(one)
        if fast is not None:
            accepted += 1
            assert v3_generated.decode_response(one) == fast
    assert accepted > 100


def test_a_group_of_add_responses_is_the_responses_joined() -> None:
    """Ids of one and of several bytes, changes of ledger, size and upper bits, and errors between them."""
    adds = [
        m.AddRequest(txn, ledger_id, entry_id, KEY, b"")
        for ledger_id, txns, entries in (
            (7, range(120, 140), range(120, 140)),
            (8, range(250, 262), range(16376, 16388)),
            (300, range(16380, 16390), range(500, 510)),
            (300, range(16390, 16400), range(2**40, 2**40 + 10)),
            (7, range(300, 310), range(5, 15)),
            (9, (127, 200, 127, 128), (200, 127, 127, 128)),
        )
        for txn, entry_id in zip(txns, entries, strict=True)
    ]
    statuses = [0 if number % 7 else int(m.Status.FENCED) for number in range(len(adds))]
    each = [
        v3_generated.encode_response(m.AddResponse(add.txn_id, status, add.ledger_id, add.entry_id))
        for add, status in zip(adds, statuses, strict=True)
    ]
    assert v3_fast.encode_add_responses(adds, statuses) == b"".join(each)
    assert v3_fast.encode_add_responses(adds, [0] * len(adds)).count(b"\x0a") >= len(adds)
    for at in (0, 1, 30):
        assert v3_fast.encode_add_responses(adds[at : at + 1], statuses[at : at + 1]) == each[at]
    assert v3_fast.encode_add_responses([], []) == b""
    with pytest.raises(ValueError, match="shorter"):
        v3_fast.encode_add_responses(adds, statuses[:-1])


def test_a_group_of_read_responses_is_the_responses_joined() -> None:
    """Bodies of several sizes, absent bodies, changes of LAC, ledger and upper bits, times, and errors between them."""
    responses = [
        m.ReadResponse(txn, status, ledger_id, entry_id, body, lac, time)
        for txn, entry_id in ((100, 300), (128, 127), (128, 128), (300, 500), (301, 501), (383, 511), (384, 512))
        for ledger_id in (7, 300)
        for lac in (None, -1, 600)
        for body, status, time in (
            (b"", 0, None),
            (bytes(100), 0, None),
            (bytes(100), 0, 5),
            (bytes(300), 0, None),
            (bytes(16_380), 0, None),
            (None, 0, None),
            (None, int(m.Status.NO_ENTRY), None),
            (b"odd", int(m.Status.IO_ERROR), None),
        )
    ]
    each = [v3_generated.encode_response(response) for response in responses]
    assert v3_fast.encode_read_responses(responses) == b"".join(each)
    for at in (0, 1, 80):
        assert v3_fast.encode_read_responses(responses[at : at + 1]) == each[at]
    assert v3_fast.encode_read_responses([]) == b""
