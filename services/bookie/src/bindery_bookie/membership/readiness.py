"""ReadinessNotes: show the state of the storage on /readyz and /startupz: progress of the start, read-only, limbo.

A bookie that is read-only or in limbo still serves reads. These states are therefore shown as notes, which do not make
the bookie unready.
"""

from collections.abc import Sequence
from typing import Final

from bindery_kit.observability.health import Health

from bindery_bookie.state import READ_ONLY_DRAINING, READ_ONLY_REMOVED, READ_ONLY_SESSION, BookieState
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.store import ReplayProgress

SHOWN_ELSEWHERE: Final = frozenset({READ_ONLY_SESSION, READ_ONLY_DRAINING, READ_ONLY_REMOVED})
"""Reasons for being read-only that have a note or a readiness reason of their own."""


class ReadinessNotes:
    """Keeps the notes and the progress in `health` up to date. Event loop only."""

    def __init__(self, health: Health, state: BookieState, shards: Sequence[StorageEngine]) -> None:
        self._health = health
        self._state = state
        self._shards = shards
        state.on_change(self.read_only)

    def read_only(self) -> None:
        """Show why no adds are accepted, or remove the note."""
        reasons = [why for part, why in self._state.reasons.items() if part not in SHOWN_ELSEWHERE]
        self._health.note("read_only", f"no adds are accepted: {'; '.join(reasons)}" if reasons else None)

    def limbo(self) -> None:
        """Show that storage is incomplete, or remove the note."""
        states = [shard.limbo for shard in self._shards if shard.limbo is not None]
        if not states:
            self._health.note("limbo", None)
            return
        reasons = "; ".join(dict.fromkeys(state.reason for state in states))
        left = sum(state.left for state in states)  # 0: not counted since the start
        counted = f" (ledgers left: {left})" if left else ""
        self._health.note(
            "limbo", f"storage is incomplete and is being refilled from other bookies{counted}: {reasons}"
        )

    def ledgers_checked(self, ledgers: int) -> None:
        """Show the progress of a start after storage was lost. `ledgers`: number of ledgers checked so far."""
        self._health.progress("storage was lost: checking which ledgers were stored here", done=ledgers, unit="ledgers")

    def replayed(self, progress: ReplayProgress) -> None:
        """Show the progress of the journal replay."""
        percent = 100 * progress.bytes_done // progress.bytes_total if progress.bytes_total else 100
        self._health.progress(
            f"replaying the journal ({percent} %, {progress.entries} entries)",
            done=progress.bytes_done,
            total=progress.bytes_total,
            unit="bytes",
        )
