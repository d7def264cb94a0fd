"""Statuses in both protocol versions, and the status that a bookie sends for each error.

| meaning                                             | v2  | v3  | error                                              |
|-----------------------------------------------------|----:|----:|----------------------------------------------------|
| done                                                |   0 |   0 |                                                    |
| the bookie has nothing of the ledger                |   1 | 402 | NoSuchLedger                                       |
| the bookie has the ledger, but not the entry        |   2 | 403 | NoSuchEntry                                        |
| invalid request                                     | 100 | 404 | BadRequest                                         |
| disk or damage                                      | 101 | 501 | any other                                          |
| wrong master key, or not authenticated              | 102 | 502 | Unauthorized                                       |
| unsupported protocol version                        | 103 | 503 | BadVersion                                         |
| the ledger is fenced                                | 104 | 504 | LedgerFenced                                       |
| the bookie accepts no writes now                    | 105 | 505 | ReadOnly                                           |
| a limit is reached: try later                       | 106 | 506 | TooManyRequests                                    |
| storage was lost, the ledger is not repaired yet    | 107 | 507 | LedgerStateUnknown                                 |

BookKeeper's v2 client does not support 107: it throws, closes the connection and fails all requests in flight on it. A
v2 response therefore uses 101 instead (`v2_answer`), which is also indefinite: no client counts it as a denial.
Source: BookieProtocol, BookkeeperProtocol.StatusCode, PerChannelBookieClient's mapping.
"""

from typing import Final

from bindery_core.errors import (
    BadRequest,
    BadVersion,
    BinderyError,
    LedgerFenced,
    LedgerStateUnknown,
    NoSuchEntry,
    NoSuchLedger,
    ReadOnly,
    TooManyRequests,
    Unauthorized,
)
from bindery_core.wire.messages import Status

V2_OF: Final[dict[int, int]] = {
    Status.OK: 0,
    Status.NO_LEDGER: 1,
    Status.NO_ENTRY: 2,
    Status.BAD_REQUEST: 100,
    Status.IO_ERROR: 101,
    Status.UNAUTHORIZED: 102,
    Status.BAD_VERSION: 103,
    Status.FENCED: 104,
    Status.READ_ONLY: 105,
    Status.TOO_MANY_REQUESTS: 106,
    Status.UNKNOWN_LEDGER_STATE: 107,
}
"""Number in v2 of each v3 status."""

_OF_V2: Final = {number: int(status) for status, number in V2_OF.items()}
_V2_ANSWERS: Final = {**V2_OF, Status.UNKNOWN_LEDGER_STATE: V2_OF[Status.IO_ERROR]}
_IO_ERROR_V2: Final = V2_OF[Status.IO_ERROR]

_OF_ERROR: Final[tuple[tuple[type[BinderyError], Status], ...]] = (
    (Unauthorized, Status.UNAUTHORIZED),
    (NoSuchLedger, Status.NO_LEDGER),
    (NoSuchEntry, Status.NO_ENTRY),
    (LedgerStateUnknown, Status.UNKNOWN_LEDGER_STATE),
    (TooManyRequests, Status.TOO_MANY_REQUESTS),
    (ReadOnly, Status.READ_ONLY),
    (LedgerFenced, Status.FENCED),
    (BadVersion, Status.BAD_VERSION),
    (BadRequest, Status.BAD_REQUEST),
)

assert len(V2_OF) == len(Status) == len(_OF_V2)


def v2_answer(status: int) -> int:
    """Return the v2 number that a bookie sends for a v3 `status`; 101 for unknown numbers."""
    return _V2_ANSWERS.get(status, _IO_ERROR_V2)


def of_v2(number: int) -> int:
    """Return the v3 status of a v2 number. Raises BadRequest for an unknown number."""
    try:
        return _OF_V2[number]
    except KeyError:
        raise BadRequest("not a status of protocol version 2", number=number) from None


def of_error(error: BinderyError) -> int:
    """Return the status of `error`; IO_ERROR if it has none of its own."""
    for kind, status in _OF_ERROR:
        if isinstance(error, kind):
            return int(status)
    return int(Status.IO_ERROR)
