"""Broken promises of the storage engine that more than one search must notice: alone, and in a cluster."""

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from bindery_bookie.storage.journal.journal import Journal


def ack_before_journal() -> contextlib.AbstractContextManager[Any]:
    """An add is answered when it was handed to the journal."""
    real = Journal.append

    def append(self: Any, parts: Sequence[bytes], size: int, synced: Any, *, when_written: bool = False) -> None:
        real(self, parts, size, lambda ok: None, when_written=when_written)
        self._loop.call_soon(synced, True)

    return patch.object(Journal, "append", append)
