"""Error responses to requests of the ledger protocol."""

from bindery_core.wire import messages as m
from bindery_core.wire import v2, v3
from bindery_core.wire.detection import Codec
from bindery_core.wire.messages import (
    AddRequest,
    BatchReadRequest,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    Status,
)


def failed(request: Request, status: int) -> Response:
    """Return the response to `request` with `status`, and the ids of the request."""
    match request:
        case AddRequest():
            return m.AddResponse(request.txn_id, status, request.ledger_id, request.entry_id)
        case ReadRequest():
            return ReadResponse(request.txn_id, status, request.ledger_id, request.entry_id)
        case BatchReadRequest():
            return m.BatchReadResponse(request.txn_id, status, request.ledger_id, request.entry_id, request.request_id)
        case m.WriteLacRequest():
            return m.WriteLacResponse(request.txn_id, status, request.ledger_id)
        case m.ReadLacRequest():
            return m.ReadLacResponse(request.txn_id, status, request.ledger_id)
        case m.ForceLedgerRequest():
            return m.ForceLedgerResponse(request.txn_id, status, request.ledger_id)
        case m.ListEntriesRequest():
            return m.ListEntriesResponse(request.txn_id, status, request.ledger_id)
        case m.BookieInfoRequest():
            return m.BookieInfoResponse(request.txn_id, status)
        case m.StartTlsRequest():
            return m.StartTlsResponse(request.txn_id, status)
        case m.AuthRequest():
            return m.AuthResponse(request.txn_id, status)
        case m.OtherRequest():
            return m.ErrorResponse(request.txn_id, request.operation, status)


def refuse_other(request: m.OtherRequest, codec: Codec = v3) -> Response:
    """Return the response to a request that this bookie does not implement.

    For another protocol version (v3: 1 and 2; v2: above 2) the status is BAD_VERSION in the operation's own response,
    otherwise BAD_REQUEST in a response without an operation's own part.
    """
    txn_id, ledger_id, status = request.txn_id, request.ledger_id, int(Status.BAD_VERSION)
    if request.version != v3.VERSION or codec.VERSION == v2.VERSION:
        match request.operation:
            case m.Operation.ADD_ENTRY:
                return m.AddResponse(txn_id, status, ledger_id, request.entry_id)
            case m.Operation.READ_ENTRY:
                return ReadResponse(txn_id, status, ledger_id, request.entry_id)
            case m.Operation.BATCH_READ_ENTRY if codec.VERSION == v2.VERSION:
                return m.BatchReadResponse(txn_id, status, ledger_id, request.entry_id, request.request_id)
            case m.Operation.WRITE_LAC:
                return m.WriteLacResponse(txn_id, status, ledger_id)
            case m.Operation.READ_LAC:
                return m.ReadLacResponse(txn_id, status, ledger_id)
            case m.Operation.FORCE_LEDGER:
                return m.ForceLedgerResponse(txn_id, status, ledger_id)
            case m.Operation.GET_LIST_OF_ENTRIES_OF_LEDGER:
                return m.ListEntriesResponse(txn_id, status, ledger_id)
            case m.Operation.GET_BOOKIE_INFO:
                return m.BookieInfoResponse(txn_id, status)
    return m.ErrorResponse(txn_id, request.operation, Status.BAD_REQUEST)
