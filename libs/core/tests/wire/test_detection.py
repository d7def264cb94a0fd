"""Detection of the protocol version of a connection, frame by frame."""

import pytest
from bindery_core.digest import master_key
from bindery_core.errors import BadRequest
from bindery_core.wire import bookkeeper_pb2 as pb
from bindery_core.wire import messages as m
from bindery_core.wire import v2, v3
from bindery_core.wire.detection import RequestDecoder
from hypothesis import given
from hypothesis import strategies as st

KEY = master_key(b"")
BODY = bytes(40)
V3 = [m.AddRequest(7, 0, 0, KEY, BODY), m.ReadRequest(8, 1, 2), m.ForceLedgerRequest(9, 1)]
V2 = [m.AddRequest(2, 0, 0, KEY, BODY), m.ReadRequest(2, 1, 2), m.BatchReadRequest(2, 1, 0, 3)]
V3_MESSAGES = [v3.encode_request(request)[4:] for request in V3]
V2_MESSAGES = [v2.encode_request(request)[4:] for request in V2]


def test_a_connection_begins_in_v3_and_may_stay_there() -> None:
    decoder = RequestDecoder()
    assert decoder.decode(V3_MESSAGES) == (V3, [])
    assert decoder.decode([]) == ([], [])
    assert not decoder.is_v2


def test_the_first_frame_that_is_not_v3_and_all_later_ones_are_v2() -> None:
    decoder = RequestDecoder()
    assert decoder.decode([*V3_MESSAGES, *V2_MESSAGES]) == (V3, V2)
    assert decoder.is_v2
    assert decoder.decode(V2_MESSAGES) == ([], V2)


def test_v3_after_v2_ends_the_connection() -> None:
    decoder = RequestDecoder()
    decoder.decode(V2_MESSAGES[:1])
    with pytest.raises(BadRequest):
        decoder.decode(V3_MESSAGES[:1])
    with pytest.raises(BadRequest):
        RequestDecoder().decode([V3_MESSAGES[0], V2_MESSAGES[0], V3_MESSAGES[1]])


@pytest.mark.parametrize("txn_id", [1, 200, 2**40])
def test_start_tls_after_v2_is_decoded_and_the_mode_stays(txn_id: int) -> None:
    start = m.StartTlsRequest(txn_id)
    message = v3.encode_request(start)[4:]
    decoder = RequestDecoder()
    assert decoder.decode([V2_MESSAGES[0], message]) == ([start], V2[:1])
    assert decoder.is_v2
    assert decoder.decode([message]) == ([start], [])
    assert decoder.decode([V2_MESSAGES[1], message, V2_MESSAGES[2]]) == ([start], V2[1:])
    assert decoder.decode(V2_MESSAGES) == ([], V2)
    with pytest.raises(BadRequest):
        decoder.decode([message, V3_MESSAGES[1]])
    with pytest.raises(BadRequest):
        decoder.decode([message[:-1]])


def test_a_v3_request_without_a_required_field_is_an_invalid_v2_packet() -> None:
    frame = pb.Request()
    frame.header.version = pb.VERSION_THREE
    frame.header.operation = pb.READ_ENTRY
    decoder = RequestDecoder()
    with pytest.raises(BadRequest):
        decoder.decode([frame.SerializePartialToString()])
    assert decoder.is_v2


def test_an_unknown_operation_or_version_is_an_invalid_v2_packet() -> None:
    for message in (b"\x0a\x06\x08\x03\x10\x63\x18\x01", b"\x0a\x06\x08\x09\x10\x01\x18\x01"):
        with pytest.raises(BadRequest):
            RequestDecoder().decode([message])


def test_a_v3_request_that_is_not_served_does_not_change_the_mode() -> None:
    decoder = RequestDecoder()
    (found,), rest = decoder.decode([b"\x0a\x06\x08\x03\x10\x0c\x18\x01"])
    assert found == m.OtherRequest(1, m.Operation.BATCH_READ_ENTRY, 3)
    assert rest == []
    assert not decoder.is_v2


@given(st.integers(0, 2), st.binary(max_size=80))
def test_no_v2_packet_is_ever_a_v3_request(version: int, rest: bytes) -> None:
    """The first byte of a v2 packet is a protobuf tag of field 0."""
    with pytest.raises(BadRequest):
        v3.decode_request(bytes((version,)) + rest)
