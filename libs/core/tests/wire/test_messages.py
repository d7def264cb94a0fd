"""Numbers of the protocol's enums, and what a message contains if a field is not given."""

from bindery_core.wire import messages as m


def test_statuses_have_the_numbers_of_the_protocol() -> None:
    assert {status.name: int(status) for status in m.Status} == {
        "OK": 0,
        "NO_LEDGER": 402,
        "NO_ENTRY": 403,
        "BAD_REQUEST": 404,
        "IO_ERROR": 501,
        "UNAUTHORIZED": 502,
        "BAD_VERSION": 503,
        "FENCED": 504,
        "READ_ONLY": 505,
        "TOO_MANY_REQUESTS": 506,
        "UNKNOWN_LEDGER_STATE": 507,
    }


def test_operations_have_the_numbers_of_the_protocol() -> None:
    assert [(operation.name, int(operation)) for operation in m.Operation] == [
        ("READ_ENTRY", 1),
        ("ADD_ENTRY", 2),
        ("RANGE_READ_ENTRY", 3),
        ("RANGE_ADD_ENTRY", 4),
        ("AUTH", 5),
        ("WRITE_LAC", 6),
        ("READ_LAC", 7),
        ("GET_BOOKIE_INFO", 8),
        ("START_TLS", 9),
        ("FORCE_LEDGER", 10),
        ("GET_LIST_OF_ENTRIES_OF_LEDGER", 11),
        ("BATCH_READ_ENTRY", 12),
    ]


def test_flags_and_priority_have_the_numbers_of_the_protocol() -> None:
    assert [int(flag) for flag in (m.ReadFlag.NONE, m.ReadFlag.FENCE_LEDGER, m.ReadFlag.ENTRY_PIGGYBACK)] == [0, 1, 2]
    assert [int(flag) for flag in (m.WriteFlag.NONE, m.WriteFlag.DEFERRED_SYNC)] == [0, 1]
    assert m.HIGH_PRIORITY == 100


def test_requests_are_plain_unless_a_field_is_given() -> None:
    assert m.AddRequest(1, 2, 3, b"key", b"body") == m.AddRequest(
        txn_id=1,
        ledger_id=2,
        entry_id=3,
        master_key=b"key",
        body=b"body",
        recovery=False,
        write_flags=0,
        priority=0,
    )
    assert m.ReadRequest(1, 2, 3) == m.ReadRequest(1, 2, 3, 0, None, None, None, 0)
    assert m.BatchReadRequest(1, 2, 3, 4) == m.BatchReadRequest(1, 2, 3, 4, 0, 0, 0, None, 0)
    assert m.WriteLacRequest(1, 2, 3, b"key", b"lac").priority == 0
    assert m.ReadLacRequest(1, 2).priority == 0
    assert m.BookieInfoRequest(1).requested == 0
    assert m.AuthRequest(1, "plugin").payload == b""
    assert m.OtherRequest(1, 9, 3) == m.OtherRequest(1, 9, 3, ledger_id=0, entry_id=0, request_id=0)


def test_responses_carry_nothing_that_is_not_given() -> None:
    assert m.ReadResponse(1, 0, 2, 3) == m.ReadResponse(1, 0, 2, 3, None, None, None)
    assert m.BatchReadResponse(1, 0, 2, 3, 4).bodies == ()
    assert m.ReadLacResponse(1, 0, 2) == m.ReadLacResponse(1, 0, 2, lac_body=None, last_entry_body=None)
    assert m.BookieInfoResponse(1, 0) == m.BookieInfoResponse(1, 0, total_disk_capacity=None, free_disk_space=None)
    assert m.ListEntriesResponse(1, 0, 2).availability is None
    assert m.AuthResponse(1, 0) == m.AuthResponse(1, 0, plugin="", payload=b"")


def test_a_request_and_its_response_have_the_same_operation() -> None:
    pairs = [
        (m.ReadRequest, m.ReadResponse, 1),
        (m.AddRequest, m.AddResponse, 2),
        (m.AuthRequest, m.AuthResponse, 5),
        (m.WriteLacRequest, m.WriteLacResponse, 6),
        (m.ReadLacRequest, m.ReadLacResponse, 7),
        (m.BookieInfoRequest, m.BookieInfoResponse, 8),
        (m.StartTlsRequest, m.StartTlsResponse, 9),
        (m.ForceLedgerRequest, m.ForceLedgerResponse, 10),
        (m.ListEntriesRequest, m.ListEntriesResponse, 11),
        (m.BatchReadRequest, m.BatchReadResponse, 12),
    ]
    expected = {kind: number for request, response, number in pairs for kind in (request, response)}
    assert expected == m.OPERATION_OF
