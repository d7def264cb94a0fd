"""Errors of the storage engine that are not in the common tree."""

from bindery_core.errors import OutcomeUnknown


class JournalFailed(OutcomeUnknown):
    """The journal could not be written: whether the record is on disk is not known, and nothing more is accepted."""

    code = "journal_failed"
