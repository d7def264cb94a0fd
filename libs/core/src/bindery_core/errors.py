"""Errors, sorted by what the caller should do next.

BinderyError                never raised itself                                    status
  TryAgain                  nothing happened; the same request later               503
    NotEnoughBookies        fewer writable bookies than asked for
    BookieUnavailable       no connection, or it went away before the request was sent
    MetadataUnavailable     ZooKeeper cannot be asked now
    TooManyRequests         a byte or queue budget is used up                      429
    ReadOnly                this bookie takes no writes now
    LedgerStateUnknown      the bookie may have held it and cannot say (limbo)
  OutcomeUnknown            it may have happened; ask before repeating             504
    AddTimeout, MetadataOutcomeUnknown
  LostOwnership             stop writing, open anew                                409
    LedgerFenced            another client recovers or owns the ledger
    LedgerClosed            the ledger was closed
    TopicFenced             another broker owns the topic
    NotLeader               the auditor's leadership is over
  Conflict                  what is there is not what you expected                 409
    AlreadyExists, VersionConflict, NotEmpty
  NotThere                                                                         404
    NoSuchLedger, NoSuchEntry, NoSuchTopic, NoSuchSubscription, NoSuchNode
  BadRequest                                                                       400
    BadVersion              a protocol or format version that is not spoken
    TooLarge                over a named limit                                     413
  Unauthorized              wrong password or token                                401
  Corrupt                   bytes contradict their digest or format: repair        500
    DigestMismatch, DamagedStorage

Messages are lower case with the facts last: `no such entry: ledger_id=7 entry_id=42`. `code` is stable, for programs.
"""

from typing import Any, ClassVar


class BinderyError(Exception):
    """Base of all. `facts` are the fields behind the message; they appear in logs and in HTTP problem bodies."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal"

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
    """Nothing answered at all: a server is not there, or is called something else."""


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


class Unauthorized(BinderyError):
    status = 401
    code = "unauthorized"


class Corrupt(BinderyError):
    code = "corrupt"


class DigestMismatch(Corrupt):
    code = "digest_mismatch"


class DamagedStorage(Corrupt):
    code = "damaged_storage"
