"""Error responses have the kind, the status and the ids of their request."""

import pytest
from bindery_bookie.server.refusals import failed, refuse_other
from bindery_core.wire import messages as m
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import Operation, Request, Response, Status

VERSION = int(Status.BAD_VERSION)


@pytest.mark.parametrize(
    ("request_", "response"),
    [
        (m.AddRequest(1, 2, 3, b"k", b"body"), m.AddResponse(1, -9, 2, 3)),
        (m.ReadRequest(1, 2, 3), m.ReadResponse(1, -9, 2, 3)),
        (m.BatchReadRequest(1, 2, 3, 4), m.BatchReadResponse(1, -9, 2, 3, 4)),
        (m.WriteLacRequest(1, 2, 3, b"k", b"p"), m.WriteLacResponse(1, -9, 2)),
        (m.ReadLacRequest(1, 2), m.ReadLacResponse(1, -9, 2)),
        (m.ForceLedgerRequest(1, 2), m.ForceLedgerResponse(1, -9, 2)),
        (m.ListEntriesRequest(1, 2), m.ListEntriesResponse(1, -9, 2)),
        (m.BookieInfoRequest(1, 3), m.BookieInfoResponse(1, -9)),
        (m.StartTlsRequest(1), m.StartTlsResponse(1, -9)),
        (m.AuthRequest(1, "plugin"), m.AuthResponse(1, -9)),
        (m.OtherRequest(1, 12, 3, 2), m.ErrorResponse(1, 12, -9)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_failed_request_is_answered_in_its_own_kind(request_: Request, response: Response) -> None:
    assert failed(request_, -9) == response


OWN_RESPONSES = [
    (Operation.ADD_ENTRY, m.AddResponse(1, VERSION, 5, 6)),
    (Operation.READ_ENTRY, m.ReadResponse(1, VERSION, 5, 6)),
    (Operation.WRITE_LAC, m.WriteLacResponse(1, VERSION, 5)),
    (Operation.READ_LAC, m.ReadLacResponse(1, VERSION, 5)),
    (Operation.FORCE_LEDGER, m.ForceLedgerResponse(1, VERSION, 5)),
    (Operation.GET_LIST_OF_ENTRIES_OF_LEDGER, m.ListEntriesResponse(1, VERSION, 5)),
    (Operation.GET_BOOKIE_INFO, m.BookieInfoResponse(1, VERSION)),
]


@pytest.mark.parametrize(("operation", "response"), OWN_RESPONSES)
def test_another_version_is_refused_in_the_operations_own_response(operation: int, response: Response) -> None:
    request = m.OtherRequest(1, operation, 2, 5, 6, 7)
    assert refuse_other(request) == response
    assert refuse_other(request, v2) == response


@pytest.mark.parametrize(("operation", "response"), OWN_RESPONSES)
def test_in_v2_every_version_is_another(operation: int, response: Response) -> None:
    assert refuse_other(m.OtherRequest(1, operation, v3.VERSION, 5, 6, 7), v2) == response


def test_a_batch_read_has_a_response_in_v2_only() -> None:
    request = m.OtherRequest(1, Operation.BATCH_READ_ENTRY, 9, 5, 6, 7)
    assert refuse_other(request, v2) == m.BatchReadResponse(1, VERSION, 5, 6, 7)
    assert refuse_other(request, v3) == m.ErrorResponse(1, Operation.BATCH_READ_ENTRY, Status.BAD_REQUEST)


@pytest.mark.parametrize("operation", [Operation.ADD_ENTRY, Operation.READ_ENTRY, 4])
def test_a_request_of_this_version_that_is_not_served_is_a_bad_request(operation: int) -> None:
    request = m.OtherRequest(1, operation, v3.VERSION, 5, 6)
    assert refuse_other(request) == m.ErrorResponse(1, operation, Status.BAD_REQUEST)


def test_an_unknown_operation_of_another_version_is_a_bad_request() -> None:
    assert refuse_other(m.OtherRequest(1, 99, 2)) == m.ErrorResponse(1, 99, Status.BAD_REQUEST)
