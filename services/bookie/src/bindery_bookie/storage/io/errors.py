"""Errors of the storage engine that are not in the common tree."""

from bindery_core.errors import BinderyError, DamagedStorage, OutcomeUnknown, ReadOnly


class JournalFailed(OutcomeUnknown):
    """The journal could not be written: whether the record is on disk is not known, and nothing more is accepted."""

    code = "journal_failed"


class DamagedIndex(DamagedStorage):
    """The index, not an entry log: no entry was lost, and the index can be rebuilt from the logs."""

    code = "damaged_index"


class JournalFull(ReadOnly):
    """There is no room for a journal file: nothing was written, and it is tried again."""

    code = "journal_full"


class StartGivenUp(BinderyError):
    """Whoever opened the storage does not wait for it any more. Only workers see it."""

    code = "start_given_up"
