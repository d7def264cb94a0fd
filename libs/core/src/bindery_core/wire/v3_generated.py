"""Protocol version 3 by protobuf's generated code: every kind of message, including unusual ones.

`v3` uses this module for messages that `v3_fast` does not decode; the tests compare the two. It is imported with the
first such message, because protobuf takes longer to import than the rest of the codecs.
"""

import struct

from google.protobuf.message import DecodeError

from bindery_core.errors import BadRequest
from bindery_core.wire import bookkeeper_pb2 as pb
from bindery_core.wire.auth_name import plugin_name
from bindery_core.wire.messages import (
    LAC_PACKET_SIZE_MAX,
    MASTER_KEY_SIZE_MAX,
    OPERATION_OF,
    AddRequest,
    AddResponse,
    AuthRequest,
    AuthResponse,
    BookieInfoRequest,
    BookieInfoResponse,
    ErrorResponse,
    ForceLedgerRequest,
    ForceLedgerResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    Operation,
    OtherRequest,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    StartTlsRequest,
    StartTlsResponse,
    WriteLacRequest,
    WriteLacResponse,
)

VERSION = 3
_LENGTH = struct.Struct(">i")


def encode_request(request: Request) -> bytes:
    """Return the frame of one request, length included."""
    frame = pb.Request()
    header = frame.header
    header.version = pb.VERSION_THREE
    header.txn_id = request.txn_id
    if not isinstance(request, OtherRequest):
        header.operation = _operation(OPERATION_OF[type(request)])
    match request:
        case AddRequest():
            if request.priority:
                header.priority = request.priority
            add = frame.add
            add.ledger_id = request.ledger_id
            add.entry_id = request.entry_id
            add.master_key = request.master_key
            add.body = request.body
            if request.write_flags:
                add.write_flags = request.write_flags
            if request.recovery:
                add.flag = pb.AddRequest.RECOVERY_ADD
        case ReadRequest():
            if request.priority:
                header.priority = request.priority
            read = frame.read
            read.ledger_id = request.ledger_id
            read.entry_id = request.entry_id
            if request.master_key is not None:
                read.master_key = request.master_key
            if request.previous_lac is not None:
                read.previous_lac = request.previous_lac
            if request.timeout_ms is not None:
                read.timeout_ms = request.timeout_ms
            if request.flag:
                read.flag = _flag(request.flag)
        case WriteLacRequest():
            if request.priority:
                header.priority = request.priority
            frame.write_lac.ledger_id = request.ledger_id
            frame.write_lac.lac = request.lac
            frame.write_lac.master_key = request.master_key
            frame.write_lac.body = request.body
        case ReadLacRequest():
            if request.priority:
                header.priority = request.priority
            frame.read_lac.ledger_id = request.ledger_id
        case BookieInfoRequest():
            frame.bookie_info.SetInParent()
            if request.requested:
                frame.bookie_info.requested = request.requested
        case ForceLedgerRequest():
            frame.force_ledger.ledger_id = request.ledger_id
        case ListEntriesRequest():
            frame.list_entries.ledger_id = request.ledger_id
        case StartTlsRequest():
            frame.start_tls.SetInParent()
        case AuthRequest():
            frame.auth.plugin = request.plugin
            frame.auth.payload = request.payload
        case OtherRequest():
            header.version = _version(request.version)
            header.operation = _operation(request.operation)
    return _framed(frame.SerializeToString())


def decode_request(message: bytes) -> Request:
    """Decode one request. Raises BadRequest if it is unreadable.

    A request with a larger master key or LAC packet than clients send is an OtherRequest, which a bookie refuses:
    bookies keep both for each ledger, and count neither.
    """
    try:
        frame = pb.Request.FromString(message)
    except DecodeError as error:
        raise BadRequest("not a request", size=len(message)) from error
    if not frame.IsInitialized():
        raise BadRequest("not a request: a required field is missing or unknown", size=len(message))
    header = frame.header
    txn_id = header.txn_id
    if header.version != pb.VERSION_THREE:
        return _other(frame)
    match header.operation:
        case pb.ADD_ENTRY if frame.HasField("add") and len(frame.add.master_key) <= MASTER_KEY_SIZE_MAX:
            add = frame.add
            return AddRequest(
                txn_id,
                add.ledger_id,
                add.entry_id,
                add.master_key,
                add.body,
                add.HasField("flag"),
                add.write_flags,
                header.priority,
            )
        case pb.READ_ENTRY if frame.HasField("read") and len(frame.read.master_key) <= MASTER_KEY_SIZE_MAX:
            read = frame.read
            return ReadRequest(
                txn_id,
                read.ledger_id,
                read.entry_id,
                flag=read.flag if read.HasField("flag") else 0,
                master_key=read.master_key if read.HasField("master_key") else None,
                previous_lac=read.previous_lac if read.HasField("previous_lac") else None,
                timeout_ms=read.timeout_ms if read.HasField("timeout_ms") else None,
                priority=header.priority,
            )
        case pb.WRITE_LAC if frame.HasField("write_lac") and _is_small(frame.write_lac):
            write = frame.write_lac
            return WriteLacRequest(
                txn_id, write.ledger_id, write.lac, write.master_key, write.body, priority=header.priority
            )
        case pb.READ_LAC if frame.HasField("read_lac"):
            return ReadLacRequest(txn_id, frame.read_lac.ledger_id, priority=header.priority)
        case pb.GET_BOOKIE_INFO:
            # Its only field is optional, so an absent sub-message means the same as an empty one.
            return BookieInfoRequest(txn_id, frame.bookie_info.requested)
        case pb.FORCE_LEDGER if frame.HasField("force_ledger"):
            return ForceLedgerRequest(txn_id, frame.force_ledger.ledger_id)
        case pb.GET_LIST_OF_ENTRIES_OF_LEDGER if frame.HasField("list_entries"):
            return ListEntriesRequest(txn_id, frame.list_entries.ledger_id)
        case pb.START_TLS:
            return StartTlsRequest(txn_id)
        case pb.AUTH if frame.HasField("auth"):
            return AuthRequest(txn_id, plugin_name(frame.auth.plugin), frame.auth.payload)
    return _other(frame)


def _is_small(write: pb.WriteLacRequest) -> bool:
    return len(write.master_key) <= MASTER_KEY_SIZE_MAX and len(write.body) <= LAC_PACKET_SIZE_MAX


def _other(frame: pb.Request) -> OtherRequest:
    header = frame.header
    ledger_id = entry_id = 0
    match header.operation:
        case pb.ADD_ENTRY:
            ledger_id, entry_id = frame.add.ledger_id, frame.add.entry_id
        case pb.READ_ENTRY:
            ledger_id, entry_id = frame.read.ledger_id, frame.read.entry_id
        case pb.WRITE_LAC:
            ledger_id = frame.write_lac.ledger_id
        case pb.READ_LAC:
            ledger_id = frame.read_lac.ledger_id
        case pb.FORCE_LEDGER:
            ledger_id = frame.force_ledger.ledger_id
        case pb.GET_LIST_OF_ENTRIES_OF_LEDGER:
            ledger_id = frame.list_entries.ledger_id
    return OtherRequest(header.txn_id, header.operation, header.version, ledger_id, entry_id)


def encode_response(response: Response) -> bytes:
    """Return the frame of one response, length included."""
    frame = pb.Response()
    header = frame.header
    header.version = pb.VERSION_THREE
    header.txn_id = response.txn_id
    status = _status(response.status)
    frame.status = status
    if not isinstance(response, ErrorResponse):
        header.operation = _operation(OPERATION_OF[type(response)])
    match response:
        case AddResponse():
            frame.add.status = status
            frame.add.ledger_id = response.ledger_id
            frame.add.entry_id = response.entry_id
        case ReadResponse():
            read = frame.read
            read.status = status
            read.ledger_id = response.ledger_id
            read.entry_id = response.entry_id
            if response.body is not None:
                read.body = response.body
            if response.max_lac is not None:
                read.max_lac = response.max_lac
            if response.lac_update_timestamp_ms is not None:
                read.lac_update_timestamp_ms = response.lac_update_timestamp_ms
        case WriteLacResponse():
            frame.write_lac.status = status
            frame.write_lac.ledger_id = response.ledger_id
        case ReadLacResponse():
            lac = frame.read_lac
            lac.status = status
            lac.ledger_id = response.ledger_id
            if response.lac_body is not None:
                lac.lac_body = response.lac_body
            if response.last_entry_body is not None:
                lac.last_entry_body = response.last_entry_body
        case BookieInfoResponse():
            info = frame.bookie_info
            info.status = status
            if response.total_disk_capacity is not None:
                info.total_disk_capacity = response.total_disk_capacity
            if response.free_disk_space is not None:
                info.free_disk_space = response.free_disk_space
        case ForceLedgerResponse():
            frame.force_ledger.status = status
            frame.force_ledger.ledger_id = response.ledger_id
        case ListEntriesResponse():
            frame.list_entries.status = status
            frame.list_entries.ledger_id = response.ledger_id
            if response.availability is not None:
                frame.list_entries.availability = response.availability
        case StartTlsResponse():
            if response.status == 0:
                frame.start_tls.SetInParent()
        case AuthResponse():
            if response.plugin:
                frame.auth.plugin = response.plugin
                frame.auth.payload = response.payload
        case ErrorResponse():
            header.operation = _operation(response.operation)
    return _framed(frame.SerializeToString())


def decode_response(message: bytes) -> Response:
    """Decode one response. Raises BadRequest if it is unreadable."""
    try:
        frame = pb.Response.FromString(message)
    except DecodeError as error:
        raise BadRequest("not a response", size=len(message)) from error
    if not frame.IsInitialized():
        raise BadRequest("not a response: a required field is missing or unknown", size=len(message))
    txn_id = frame.header.txn_id
    operation = frame.header.operation
    outer = frame.status
    match operation:
        case pb.ADD_ENTRY if frame.HasField("add"):
            add = frame.add
            return AddResponse(txn_id, outer or add.status, add.ledger_id, add.entry_id)
        case pb.READ_ENTRY if frame.HasField("read"):
            read = frame.read
            return ReadResponse(
                txn_id,
                outer or read.status,
                read.ledger_id,
                read.entry_id,
                read.body if read.HasField("body") else None,
                read.max_lac if read.HasField("max_lac") else None,
                read.lac_update_timestamp_ms if read.HasField("lac_update_timestamp_ms") else None,
            )
        case pb.WRITE_LAC if frame.HasField("write_lac"):
            return WriteLacResponse(txn_id, outer or frame.write_lac.status, frame.write_lac.ledger_id)
        case pb.READ_LAC if frame.HasField("read_lac"):
            lac = frame.read_lac
            return ReadLacResponse(
                txn_id,
                outer or lac.status,
                lac.ledger_id,
                lac.lac_body if lac.HasField("lac_body") else None,
                lac.last_entry_body if lac.HasField("last_entry_body") else None,
            )
        case pb.GET_BOOKIE_INFO if frame.HasField("bookie_info"):
            info = frame.bookie_info
            return BookieInfoResponse(
                txn_id,
                outer or info.status,
                info.total_disk_capacity if info.HasField("total_disk_capacity") else None,
                info.free_disk_space if info.HasField("free_disk_space") else None,
            )
        case pb.FORCE_LEDGER if frame.HasField("force_ledger"):
            return ForceLedgerResponse(txn_id, outer or frame.force_ledger.status, frame.force_ledger.ledger_id)
        case pb.GET_LIST_OF_ENTRIES_OF_LEDGER if frame.HasField("list_entries"):
            listed = frame.list_entries
            return ListEntriesResponse(
                txn_id,
                outer or listed.status,
                listed.ledger_id,
                listed.availability if listed.HasField("availability") else None,
            )
        case pb.START_TLS:
            return StartTlsResponse(txn_id, outer)
        case pb.AUTH:
            return AuthResponse(txn_id, outer, plugin_name(frame.auth.plugin), frame.auth.payload)
    if not outer:
        raise BadRequest("the body of the response is missing", operation=Operation(operation).name, txn_id=txn_id)
    return ErrorResponse(txn_id, operation, outer)


def _framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


# Enum fields accept plain ints at run time; only the generated stubs require their own classes.


def _flag(number: int) -> pb.ReadRequest.Flag:
    return number  # type: ignore[return-value]


def _version(number: int) -> pb.ProtocolVersion:
    return number  # type: ignore[return-value]


def _operation(number: int) -> pb.OperationType:
    return number  # type: ignore[return-value]


def _status(number: int) -> pb.StatusCode:
    return number  # type: ignore[return-value]
