"""Errors of the storage engine, in addition to the common error tree."""

from bindery_core.errors import BinderyError, DamagedStorage, OutcomeUnknown, ReadOnly


class JournalFailed(OutcomeUnknown):
    """The journal could not be written. It is unknown whether the record is on disk; no more records are accepted."""

    code = "journal_failed"


class DamagedIndex(DamagedStorage):
    """The index is damaged. No entry is lost, because the index can be rebuilt from the entry logs."""

    code = "damaged_index"


class JournalFull(ReadOnly):
    """There is no space for a journal file. Nothing was written; the write is retried."""

    code = "journal_full"


class StartCancelled(BinderyError):
    """The opening of the storage was cancelled. Raised in workers only."""

    code = "start_cancelled"
