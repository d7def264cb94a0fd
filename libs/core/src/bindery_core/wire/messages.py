"""Requests and responses of the BookKeeper protocol, free of any encoding.

The v3 and v2 codecs produce and consume these. They are plain structs, which are cheap to create in large numbers;
`gc=False` is safe because none can take part in a reference cycle. Ids are ints as on the wire, so -1 may appear.

A response repeats the `txn_id` of its request. In v3 this is the transaction id. v2 has no transaction ids, so `txn_id`
contains the version byte.
Source: BookkeeperProtocol.proto; error numbers: BookieProtocol.
"""

from enum import IntEnum, IntFlag
from typing import Final

import msgspec


class Status(IntEnum):
    """Statuses, with the numbers of v3's StatusCode. The module `status` maps the numbers of v2."""

    OK = 0
    NO_LEDGER = 402
    NO_ENTRY = 403
    BAD_REQUEST = 404
    IO_ERROR = 501
    UNAUTHORIZED = 502
    BAD_VERSION = 503
    FENCED = 504
    READ_ONLY = 505
    TOO_MANY_REQUESTS = 506
    UNKNOWN_LEDGER_STATE = 507


class Operation(IntEnum):
    """Operations, with the numbers of v3's OperationType."""

    READ_ENTRY = 1
    ADD_ENTRY = 2
    RANGE_READ_ENTRY = 3
    RANGE_ADD_ENTRY = 4
    AUTH = 5
    WRITE_LAC = 6
    READ_LAC = 7
    GET_BOOKIE_INFO = 8
    START_TLS = 9
    FORCE_LEDGER = 10
    GET_LIST_OF_ENTRIES_OF_LEDGER = 11
    BATCH_READ_ENTRY = 12


class ReadFlag(IntEnum):
    """Flag of a read; a read has at most one."""

    NONE = 0
    FENCE_LEDGER = 1
    ENTRY_PIGGYBACK = 2


class WriteFlag(IntFlag):
    """Flags of an add, as bits."""

    NONE = 0
    DEFERRED_SYNC = 1


MASTER_KEY_SIZE_MAX = 255
"""Maximum bytes of a master key in a request. Clients send 20 (`digest.MASTER_KEY_SIZE`)."""
LAC_PACKET_SIZE_MAX = 256
"""Maximum bytes of the packet in a WriteLacRequest. Clients send at most 36."""
HIGH_PRIORITY = 100
"""Priority that the Java client sends; a bookie treats any value above 0 as high."""


class AddRequest(msgspec.Struct, gc=False):
    txn_id: int
    ledger_id: int
    entry_id: int
    master_key: bytes
    body: bytes
    """The whole entry frame. Storage uses the ids inside it."""
    recovery: bool = False
    """The RECOVERY_ADD flag: a fenced ledger accepts the add."""
    write_flags: int = 0
    """WriteFlag bits."""
    priority: int = 0
    """Above 0: high."""


class ReadRequest(msgspec.Struct, gc=False):
    txn_id: int
    ledger_id: int
    entry_id: int
    flag: int = 0
    """A ReadFlag; one value, not a bit set. Unknown numbers count as NONE."""
    master_key: bytes | None = None
    """Needed to fence."""
    previous_lac: int | None = None
    """If set, the read is a long poll: it waits until the LAC is above this value."""
    timeout_ms: int | None = None
    """Maximum time of a long poll in milliseconds; None: do not wait."""
    priority: int = 0


class BatchReadRequest(msgspec.Struct, gc=False):
    """A read of consecutive entries that one response returns. v2 only."""

    txn_id: int
    ledger_id: int
    entry_id: int
    """Id of the first entry."""
    request_id: int
    count_max: int = 0
    """Maximum number of entries; 0 or less: as many as fit."""
    size_max: int = 0
    """Maximum bytes of the response; the first entry is sent whatever its size."""
    flag: int = 0
    master_key: bytes | None = None
    priority: int = 0


class WriteLacRequest(msgspec.Struct, gc=False):
    txn_id: int
    ledger_id: int
    lac: int
    master_key: bytes
    body: bytes
    """The LAC packet (`entry.pack_lac`)."""
    priority: int = 0


class ReadLacRequest(msgspec.Struct, gc=False):
    txn_id: int
    ledger_id: int
    priority: int = 0


class BookieInfoRequest(msgspec.Struct, gc=False):
    txn_id: int
    requested: int = 0
    """Bit 0: total capacity, bit 1: free space."""


class ForceLedgerRequest(msgspec.Struct, gc=False):
    txn_id: int
    ledger_id: int


class ListEntriesRequest(msgspec.Struct, gc=False):
    txn_id: int
    ledger_id: int


class StartTlsRequest(msgspec.Struct, gc=False):
    txn_id: int


class AuthRequest(msgspec.Struct, gc=False):
    txn_id: int
    plugin: str
    payload: bytes = b""


class OtherRequest(msgspec.Struct, gc=False):
    """A request that can be decoded but is not served.

    Its version is not supported, its operation is not served, or the message of its operation is missing.
    """

    txn_id: int
    operation: int
    version: int
    ledger_id: int = 0
    entry_id: int = 0
    request_id: int = 0


Request = (
    AddRequest
    | ReadRequest
    | BatchReadRequest
    | WriteLacRequest
    | ReadLacRequest
    | BookieInfoRequest
    | ForceLedgerRequest
    | ListEntriesRequest
    | StartTlsRequest
    | AuthRequest
    | OtherRequest
)


class AddResponse(msgspec.Struct, gc=False):
    txn_id: int
    status: int
    ledger_id: int
    entry_id: int


class ReadResponse(msgspec.Struct, gc=False):
    txn_id: int
    status: int
    ledger_id: int
    entry_id: int
    """As in the request, so -1 stays -1."""
    body: bytes | None = None
    max_lac: int | None = None
    """LAC of the ledger as known to the bookie; None: not sent."""
    lac_update_timestamp_ms: int | None = None
    """Time of the last advance of the LAC in milliseconds since 1970; None: not sent."""


class BatchReadResponse(msgspec.Struct, gc=False):
    txn_id: int
    status: int
    ledger_id: int
    entry_id: int
    request_id: int
    bodies: tuple[bytes, ...] = ()


class WriteLacResponse(msgspec.Struct, gc=False):
    txn_id: int
    status: int
    ledger_id: int


class ReadLacResponse(msgspec.Struct, gc=False):
    txn_id: int
    status: int
    ledger_id: int
    lac_body: bytes | None = None
    """The explicit LAC packet; None: no explicit LAC was written."""
    last_entry_body: bytes | None = None
    """The frame of the last entry; None: the bookie has no entry."""


class BookieInfoResponse(msgspec.Struct, gc=False):
    txn_id: int
    status: int
    total_disk_capacity: int | None = None
    """Bytes; None: not requested."""
    free_disk_space: int | None = None
    """Bytes; None: not requested."""


class ForceLedgerResponse(msgspec.Struct, gc=False):
    txn_id: int
    status: int
    ledger_id: int


class ListEntriesResponse(msgspec.Struct, gc=False):
    txn_id: int
    status: int
    ledger_id: int
    availability: bytes | None = None
    """The entries of the ledger (`formats.availability`)."""


class StartTlsResponse(msgspec.Struct, gc=False):
    txn_id: int
    status: int


class AuthResponse(msgspec.Struct, gc=False):
    txn_id: int
    status: int
    plugin: str = ""
    payload: bytes = b""


class ErrorResponse(msgspec.Struct, gc=False):
    """Header and outer status only: the response to an OtherRequest that has no inner message."""

    txn_id: int
    operation: int
    status: int


Response = (
    AddResponse
    | ReadResponse
    | BatchReadResponse
    | WriteLacResponse
    | ReadLacResponse
    | BookieInfoResponse
    | ForceLedgerResponse
    | ListEntriesResponse
    | StartTlsResponse
    | AuthResponse
    | ErrorResponse
)

OPERATION_OF: Final[dict[type, Operation]] = {
    AddRequest: Operation.ADD_ENTRY, AddResponse: Operation.ADD_ENTRY,
    ReadRequest: Operation.READ_ENTRY, ReadResponse: Operation.READ_ENTRY,
    BatchReadRequest: Operation.BATCH_READ_ENTRY, BatchReadResponse: Operation.BATCH_READ_ENTRY,
    WriteLacRequest: Operation.WRITE_LAC, WriteLacResponse: Operation.WRITE_LAC,
    ReadLacRequest: Operation.READ_LAC, ReadLacResponse: Operation.READ_LAC,
    BookieInfoRequest: Operation.GET_BOOKIE_INFO, BookieInfoResponse: Operation.GET_BOOKIE_INFO,
    ForceLedgerRequest: Operation.FORCE_LEDGER, ForceLedgerResponse: Operation.FORCE_LEDGER,
    ListEntriesRequest: Operation.GET_LIST_OF_ENTRIES_OF_LEDGER,
    ListEntriesResponse: Operation.GET_LIST_OF_ENTRIES_OF_LEDGER,
    StartTlsRequest: Operation.START_TLS, StartTlsResponse: Operation.START_TLS,
    AuthRequest: Operation.AUTH, AuthResponse: Operation.AUTH,
}  # fmt: skip
"""Operation of each kind of message. OtherRequest and ErrorResponse are absent: they have a field `operation`."""
