"""Defects that more than one search must report: in the protocol alone, in the storage engine alone, in a cluster."""

from collections.abc import Sequence
from typing import Any

from bindery_bookie.storage.journal.journal import Journal
from bindery_core.digest import Digester
from bindery_core.ledger.ledger_writer import LedgerWriter

from bindery_simulation.mutant import Replacement


def ack_before_journal() -> list[Replacement]:
    """Adds are acknowledged when they are handed to the journal, before it writes them."""
    original = Journal.append

    def append(self: Any, parts: Sequence[bytes], size: int, synced: Any, *, when_written: bool = False) -> None:
        original(self, parts, size, lambda ok: None, when_written=when_written)
        self._loop.call_soon(synced, True)

    return [(Journal, "append", append)]


def confirm_before_ensemble_change() -> list[Replacement]:
    """The writer confirms entries while a change of its ensemble is in progress."""
    original = LedgerWriter._drain

    def drain(self: LedgerWriter, now: float) -> Any:
        changing, self._changing = self._changing, False
        try:
            return original(self, now)
        finally:
            self._changing = changing

    return [(LedgerWriter, "_drain", drain)]


def replaced_member_counts() -> list[Replacement]:
    """An acknowledgement of a bookie that was replaced still counts towards the ack quorum."""
    original = LedgerWriter._replaced

    def replaced(self: LedgerWriter, bit: int) -> None:
        before = list(self._acks.acks)
        original(self, bit)
        self._acks.acks[:] = before

    return [(LedgerWriter, "_replaced", replaced)]


def digest_unchecked() -> list[Replacement]:
    """Readers accept any payload, whatever its digest."""
    return [(Digester, "verify", lambda self, header, digest, payload: True)]
