"""All errors of the system, grouped by what the caller should do next.

BinderyError                base class, never raised itself                        status
  TryAgain                  nothing was changed; repeat the request later          503
    NotEnoughBookies        fewer writable bookies than the ledger needs
    BookieUnavailable       no connection, or it was lost before a response arrived
    MetadataUnavailable     the metadata store is not reachable now
      MetadataUnreachable   no server answered: none is running, or the address is wrong
    TooManyRequests         a limit on bytes or queued requests is reached         429
    ReadOnly                the bookie accepts no writes now
    LedgerStateUnknown      the bookie may have lost entries of this ledger (limbo)
  OutcomeUnknown            the write may have been applied; read before repeating 504
    AddTimeout, MetadataOutcomeUnknown
  LostOwnership             stop writing and reopen                                409
    LedgerFenced            another client is recovering the ledger, or writes it
    LedgerClosed            the ledger was closed
    TopicFenced             another broker owns the topic
    NotLeader               this process is no longer the leader
  Conflict                  the stored state differs from the expected state       409
    AlreadyExists, VersionConflict, NotEmpty
  NotThere                  the object does not exist                              404
    NoSuchLedger, NoSuchEntry, NoSuchTopic, NoSuchSubscription, NoSuchNode
  BadRequest                the request is invalid; do not repeat it               400
    BadVersion              unsupported version of a protocol or format
    TooLarge                larger than a named limit                              413
    UnsupportedMediaType    the body has a type or an encoding that is not read    415
  Unauthorized              wrong password or token                                401
  Forbidden                 the client is known and may not do this                403
  Corrupt                   stored bytes contradict their digest or format: repair 500
    DigestMismatch, DamagedStorage

Messages are in lower case, with the facts last: `no such entry: ledger_id=7 entry_id=42`. The `code` of an error never
changes, so that programs can rely on it.
"""

from typing import Any, ClassVar


class BinderyError(Exception):
    """Base class of all errors. `facts` are the values behind the message, for logs and HTTP problem bodies."""

    status: ClassVar[int] = 500
    """HTTP status of a response that reports this error."""
    code: ClassVar[str] = "internal"
    """Stable name of the error in snake_case."""

    def __init__(self, message: str = "", /, **facts: Any) -> None:
        self.message = message or self.code.replace("_", " ")
        self.facts = facts
        super().__init__(self.message)

    def __str__(self) -> str:
        if not self.facts:
            return self.message
        return f"{self.message}: " + " ".join(f"{name}={value}" for name, value in self.facts.items())


class TryAgain(BinderyError):
    status = 503
    code = "try_again"


class NotEnoughBookies(TryAgain):
    code = "not_enough_bookies"


class BookieUnavailable(TryAgain):
    code = "bookie_unavailable"


class MetadataUnavailable(TryAgain):
    code = "metadata_unavailable"


class MetadataUnreachable(MetadataUnavailable):
    """No server answered: none is running, or the address is wrong."""


class TooManyRequests(TryAgain):
    status = 429
    code = "too_many_requests"


class ReadOnly(TryAgain):
    code = "read_only"


class LedgerStateUnknown(TryAgain):
    code = "ledger_state_unknown"


class OutcomeUnknown(BinderyError):
    status = 504
    code = "outcome_unknown"


class AddTimeout(OutcomeUnknown):
    code = "add_timeout"


class MetadataOutcomeUnknown(OutcomeUnknown):
    code = "metadata_outcome_unknown"


class LostOwnership(BinderyError):
    status = 409
    code = "lost_ownership"


class LedgerFenced(LostOwnership):
    code = "ledger_fenced"


class LedgerClosed(LostOwnership):
    code = "ledger_closed"


class TopicFenced(LostOwnership):
    code = "topic_fenced"


class NotLeader(LostOwnership):
    code = "not_leader"


class Conflict(BinderyError):
    status = 409
    code = "conflict"


class AlreadyExists(Conflict):
    code = "already_exists"


class VersionConflict(Conflict):
    code = "version_conflict"


class NotEmpty(Conflict):
    code = "not_empty"


class NotThere(BinderyError):
    status = 404
    code = "not_there"


class NoSuchLedger(NotThere):
    code = "no_such_ledger"


class NoSuchEntry(NotThere):
    code = "no_such_entry"


class NoSuchTopic(NotThere):
    code = "no_such_topic"


class NoSuchSubscription(NotThere):
    code = "no_such_subscription"


class NoSuchNode(NotThere):
    code = "no_such_node"


class BadRequest(BinderyError):
    status = 400
    code = "bad_request"


class BadVersion(BadRequest):
    code = "bad_version"


class TooLarge(BadRequest):
    status = 413
    code = "too_large"


class UnsupportedMediaType(BadRequest):
    status = 415
    code = "unsupported_media_type"


class Unauthorized(BinderyError):
    status = 401
    code = "unauthorized"


class Forbidden(BinderyError):
    status = 403
    code = "forbidden"


class Corrupt(BinderyError):
    code = "corrupt"


class DigestMismatch(Corrupt):
    code = "digest_mismatch"


class DamagedStorage(Corrupt):
    code = "damaged_storage"
