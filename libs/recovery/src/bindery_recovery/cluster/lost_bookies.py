"""Decide which bookies are lost. Pure: the caller passes observations and the time.

A bookie is *absent* if it is known (it has a cookie, or a ledger names it), is registered neither as writable nor as
read-only, and is not exempt. A bookie is exempt while it has a valid maintenance lease, or if an operator removed it (a
removed bookie needs no delay). An absent bookie is *lost*, and its ledgers are to be marked, once its absence has
lasted for the delay or an operator has requested an audit.

| phase   | event                                   | then    | change reported                      |
|---------|-----------------------------------------|---------|--------------------------------------|
| -       | absent                                  | WAITING | ABSENT (at the end of a quiet time)  |
| WAITING | registered                              | -       | BACK                                 |
| WAITING | exempt                                  | -       | EXEMPT                               |
| WAITING | absent for the delay                    | due     |                                      |
| WAITING | delay changed                           | WAITING | due at the new delay, or at once     |
| WAITING | audit requested                         | FORCED  |                                      |
| WAITING | its cookie is deleted                   | WAITING | its ledgers still need repair        |
| FORCED  | registered; exempt                      | -       | BACK; EXEMPT                         |
| FORCED  | delay changed                           | FORCED  | (the request remains)                |
| due     | audited (`handled`)                     | HANDLED |                                      |
| HANDLED | registered; exempt                      | -       | BACK; EXEMPT                         |
| HANDLED | audit requested, or the regular recheck | FORCED  |                                      |
| HANDLED | its cookie is deleted                   | -       |                                      |
| any     | other bookies are lost at the same time | same    | the delay applies to each separately |

Time
- Only *observed* absence counts: `absent_s` grows between two polls that both found the bookie absent, by at most
  GAP_MAX_S, and not while the metadata store is disconnected. It is stored for the next leader, which continues from
  there: a failover neither restarts the delay nor counts a time without polls.
- Each registration ends an absence. A bookie that registers and disappears repeatedly has many short absences and is
  never lost; `flaps` counts them and makes this visible.
- Quiet time: for `settle_s` after the start and after a reconnect, no bookie is due and no new absence is reported. An
  outage of the metadata store ends the sessions of bookies, which need time to register again.

Invariants: only bookies that were absent at the last poll are WAITING, FORCED or HANDLED; no bookie is due during a
quiet time or while disconnected. Source: BookKeeper's Auditor, except for several bookies lost at once (docs/adr/0007)
and observed time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from bindery_core.ids import BookieId

GAP_MAX_S: Final = 30.0
"""Maximum seconds that count between two polls: a process that was suspended observed nothing in between."""
_ROUNDING_S: Final = 1e-6
"""Tolerance in seconds for rounding errors in the sum of observed times."""


class Phase(StrEnum):
    WAITING = "waiting"
    FORCED = "forced"
    HANDLED = "handled"


class ChangeKind(StrEnum):
    ABSENT = "absent"
    BACK = "back"
    EXEMPT = "exempt"


@dataclass(frozen=True, slots=True)
class Observation:
    """The bookies at one poll."""

    known: frozenset[BookieId]
    registered: frozenset[BookieId]
    """Writable and read-only bookies."""
    exempt: frozenset[BookieId] = frozenset()

    @property
    def absent(self) -> frozenset[BookieId]:
        return self.known - self.registered - self.exempt


@dataclass(frozen=True, slots=True)
class Change:
    bookie_id: BookieId
    kind: ChangeKind
    absent_s: float
    was_handled: bool = False
    """Whether its ledgers had been marked."""


@dataclass(slots=True)
class Absence:
    bookie_id: BookieId
    since_ms: int
    """Wall clock time, for display only."""
    absent_s: float = 0.0
    """Observed seconds of absence, including those under earlier leaders."""
    phase: Phase = Phase.WAITING
    is_reported: bool = False


@dataclass(slots=True)
class LostBookies:
    """The absent bookies, and whether they are lost. `now_s`: a monotonic clock (the loop's) in seconds. `now_ms`: the
    wall clock."""

    delay_s: float
    settle_s: float
    absences: dict[BookieId, Absence] = field(default_factory=dict)
    flaps: dict[BookieId, int] = field(default_factory=dict)
    """Number of returns within the delay, by bookie, since this leader started."""
    _observed_at_s: float | None = None
    """Time of the last poll. None: before the first poll, and while disconnected."""
    _quiet_until_s: float = 0.0

    # --- events ---------------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        """A term begins, or the metadata store is connected again."""
        self._observed_at_s = None
        self._quiet_until_s = now_s + self.settle_s

    def cut_off(self, now_s: float) -> None:
        """The metadata store is disconnected: from now on, time does not count as observed."""
        self._count(now_s)
        self._observed_at_s = None

    def observe(self, view: Observation, now_s: float, now_ms: int) -> list[Change]:
        """Process one poll. Return the changes to report, sorted by bookie."""
        self._count(now_s)
        self._observed_at_s = now_s
        changes: list[Change] = []
        for bookie_id in sorted(self.absences):
            absence = self.absences[bookie_id]
            handled = absence.phase is Phase.HANDLED
            if bookie_id in view.registered:
                kind = ChangeKind.BACK
                if not handled:
                    self.flaps[bookie_id] = self.flaps.get(bookie_id, 0) + 1
            elif bookie_id in view.exempt:
                kind = ChangeKind.EXEMPT
            elif handled and bookie_id not in view.known:
                del self.absences[bookie_id]
                continue
            else:
                continue
            del self.absences[bookie_id]
            if absence.is_reported:
                changes.append(Change(bookie_id, kind, absence.absent_s, handled))
        for bookie_id in view.absent - self.absences.keys():
            self.absences[bookie_id] = Absence(bookie_id, now_ms)
        if not self.is_quiet(now_s):
            for bookie_id in sorted(self.absences):
                absence = self.absences[bookie_id]
                if not absence.is_reported:
                    absence.is_reported = True
                    changes.append(Change(bookie_id, ChangeKind.ABSENT, absence.absent_s))
        return changes

    def set_delay(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def force(self) -> None:
        """An operator requested an audit: every absent bookie is due, whatever the delay."""
        for absence in self.absences.values():
            absence.phase = Phase.FORCED

    def recheck(self) -> None:
        """Regular check: handled bookies become due again, because new ledgers may name them. Delays do not change."""
        for absence in self.absences.values():
            if absence.phase is Phase.HANDLED:
                absence.phase = Phase.FORCED

    def handled(self, bookie_ids: Iterable[BookieId]) -> None:
        """Set these bookies to HANDLED: all their ledgers are marked."""
        for bookie_id in bookie_ids:
            if bookie_id in self.absences:
                self.absences[bookie_id].phase = Phase.HANDLED

    # --- state ----------------------------------------------------------------------------------------------------

    def is_quiet(self, now_s: float) -> bool:
        return now_s < self._quiet_until_s

    def due(self, now_s: float) -> frozenset[BookieId]:
        """Return the bookies whose ledgers are to be marked. Call `observe` first."""
        if self._observed_at_s is None or self.is_quiet(now_s):
            return frozenset()
        return frozenset(b for b, absence in self.absences.items() if self._left_s(absence, now_s) <= _ROUNDING_S)

    def next_poll_s(self, now_s: float) -> float | None:
        """Return the seconds until a bookie may become due, at least the rest of a quiet time; None: no bookie is
        waiting."""
        waits = [max(0.0, self._left_s(a, now_s)) for a in self.absences.values() if a.phase is not Phase.HANDLED]
        if self.is_quiet(now_s):
            return max(self._quiet_until_s - now_s, min(waits, default=0.0))
        return min(waits, default=None)

    def left_s(self, bookie_id: BookieId, now_s: float) -> float | None:
        """Return the remaining delay of an absent bookie in seconds, 0 if it is due; None: handled, or not absent."""
        absence = self.absences.get(bookie_id)
        if absence is None or absence.phase is Phase.HANDLED:
            return None
        return max(0.0, self._left_s(absence, now_s))

    # --- across leaders -------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the state for the next leader. Absences that were not reported yet are left out."""
        return {
            bookie_id: {
                "absent_s": round(absence.absent_s, 1),
                "phase": absence.phase.value,
                "since_ms": absence.since_ms,
            }
            for bookie_id, absence in sorted(self.absences.items())
            if absence.is_reported
        }

    def resume(self, stored: Mapping[str, Any]) -> None:
        """Load the `to_json` of a previous leader. The delay of a bookie whose entry is invalid starts again."""
        for bookie_id, fields in stored.items():
            try:
                absent_s, phase = float(fields["absent_s"]), Phase(fields["phase"])
                since_ms = int(fields["since_ms"])
            except (KeyError, TypeError, ValueError):
                continue
            if not 0 <= absent_s < float("inf"):
                continue
            bookie = BookieId(bookie_id)
            self.absences[bookie] = Absence(bookie, since_ms, absent_s, phase, is_reported=True)

    def _left_s(self, absence: Absence, now_s: float) -> float:
        if absence.phase is Phase.WAITING:
            return self.delay_s - absence.absent_s - self._uncounted_s(now_s)
        return 0.0 if absence.phase is Phase.FORCED else float("inf")

    def _uncounted_s(self, now_s: float) -> float:
        """Return the seconds since the last poll that are not counted yet."""
        if self._observed_at_s is None:
            return 0.0
        assert now_s >= self._observed_at_s, "the clock must be monotonic"
        return min(GAP_MAX_S, now_s - self._observed_at_s)

    def _count(self, now_s: float) -> None:
        passed_s = self._uncounted_s(now_s)
        for absence in self.absences.values():
            absence.absent_s += passed_s
