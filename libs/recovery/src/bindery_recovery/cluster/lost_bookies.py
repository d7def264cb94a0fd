"""Which bookies are lost: absence, the delay, and what ends either. Pure: what is seen and the time are handed in.

A bookie is *absent* when it is known (it has a cookie, or a ledger names it), is in neither list of registered bookies,
and nothing excuses it (a valid maintenance lease, or removed by its operator, which needs no delay). It is *lost*, and
its ledgers are to be marked, once its absence has lasted for the delay, or somebody asked for an audit now.

| phase   | what happens                            | then    | change told                          |
|---------|-----------------------------------------|---------|--------------------------------------|
| -       | absent                                  | WAITING | ABSENT (at the end of a quiet time)  |
| WAITING | registered                              | -       | BACK                                 |
| WAITING | excused                                 | -       | EXCUSED                              |
| WAITING | absent for the delay                    | due     |                                      |
| WAITING | another delay                           | WAITING | due at the new delay, or at once     |
| WAITING | audit asked for                         | FORCED  |                                      |
| WAITING | its cookie is deleted                   | WAITING | gone for good is no reason to forget |
| FORCED  | registered; excused                     | -       | BACK; EXCUSED                        |
| FORCED  | another delay                           | FORCED  | (asked for is asked for)             |
| due     | audited (`handled`)                     | HANDLED |                                      |
| HANDLED | registered; excused                     | -       | BACK; EXCUSED                        |
| HANDLED | audit asked for, or the regular recheck | FORCED  |                                      |
| HANDLED | its cookie is deleted                   | -       |                                      |
| any     | others are lost at the same time        | same    | each waits for its own delay         |

Time
- Only absence that was *observed* counts: `absent_s` grows between two looks that both found the bookie absent, by
  GAP_MAX_S at most, and not while the store could not be asked. It is kept for the next leader, who goes on from there:
  a hand-over neither restarts the delay nor counts a time in which nobody looked.
- Each return ends an absence. A registration that flaps is a chain of short ones, none of them a loss; `flaps` counts
  them, so that it is seen.
- Quiet time: for `settle_s` after the store could be asked again, and at the start, nobody is due and no new absence is
  told. The sessions of bookies end in an outage of the store itself, and they need a moment to come back.

Invariants: HANDLED, FORCED and WAITING only for bookies that were absent at the last look; nothing is due while quiet
or cut off. Source: BookKeeper's Auditor, but for several bookies lost at once (docs/adr/0007) and the observed time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from bindery_core.ids import BookieId

GAP_MAX_S: Final = 30.0
"""Most that two looks count for: a process that stood still has seen nothing in between."""
_ROUNDING_S: Final = 1e-6
"""Sums of looks may fall short of the delay by this."""


class Phase(StrEnum):
    WAITING = "waiting"
    FORCED = "forced"
    HANDLED = "handled"


class What(StrEnum):
    ABSENT = "absent"
    BACK = "back"
    EXCUSED = "excused"


@dataclass(frozen=True, slots=True)
class View:
    """One look at the cluster."""

    known: frozenset[BookieId]
    registered: frozenset[BookieId]
    """Writable and read-only ones."""
    excused: frozenset[BookieId] = frozenset()

    @property
    def absent(self) -> frozenset[BookieId]:
        return self.known - self.registered - self.excused


@dataclass(frozen=True, slots=True)
class Change:
    bookie_id: BookieId
    what: What
    absent_s: float
    was_handled: bool = False
    """Its ledgers are marked already."""


@dataclass(slots=True)
class Absence:
    bookie_id: BookieId
    since_ms: int
    """Wall clock, for people; nothing is computed from it."""
    absent_s: float = 0.0
    """Observed so far, before this leader too."""
    phase: Phase = Phase.WAITING
    is_told: bool = False


@dataclass(slots=True)
class LostBookies:
    """`now_s` is a clock that only goes on (the loop's); `now_ms` the wall's."""

    delay_s: float
    settle_s: float
    absences: dict[BookieId, Absence] = field(default_factory=dict)
    flaps: dict[BookieId, int] = field(default_factory=dict)
    """Returns within the delay, by bookie, since this leader began."""
    _looked_at_s: float | None = None
    """None: before the first look, and while the store cannot be asked."""
    _quiet_until_s: float = 0.0

    # --- what happens ---------------------------------------------------------------------------------------------

    def begin(self, now_s: float) -> None:
        """A leadership begins, or the store can be asked again."""
        self._looked_at_s = None
        self._quiet_until_s = now_s + self.settle_s

    def cut_off(self, now_s: float) -> None:
        """The store cannot be asked: what passes from now on is not observed."""
        self._count(now_s)
        self._looked_at_s = None

    def observe(self, view: View, now_s: float, now_ms: int) -> list[Change]:
        """Take one look. Returns what is to be told, by bookie."""
        self._count(now_s)
        self._looked_at_s = now_s
        changes: list[Change] = []
        for bookie_id in sorted(self.absences):
            absence = self.absences[bookie_id]
            handled = absence.phase is Phase.HANDLED
            if bookie_id in view.registered:
                what = What.BACK
                if not handled:
                    self.flaps[bookie_id] = self.flaps.get(bookie_id, 0) + 1
            elif bookie_id in view.excused:
                what = What.EXCUSED
            elif handled and bookie_id not in view.known:
                del self.absences[bookie_id]
                continue
            else:
                continue
            del self.absences[bookie_id]
            if absence.is_told:
                changes.append(Change(bookie_id, what, absence.absent_s, handled))
        for bookie_id in view.absent - self.absences.keys():
            self.absences[bookie_id] = Absence(bookie_id, now_ms)
        if not self.is_quiet(now_s):
            for bookie_id in sorted(self.absences):
                absence = self.absences[bookie_id]
                if not absence.is_told:
                    absence.is_told = True
                    changes.append(Change(bookie_id, What.ABSENT, absence.absent_s))
        return changes

    def set_delay(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def force(self) -> None:
        """An audit was asked for: whoever is absent is due, whatever the delay."""
        for absence in self.absences.values():
            absence.phase = Phase.FORCED

    def recheck(self) -> None:
        """The regular check: look again for ledgers of those that were handled. Delays are left alone."""
        for absence in self.absences.values():
            if absence.phase is Phase.HANDLED:
                absence.phase = Phase.FORCED

    def handled(self, bookie_ids: Iterable[BookieId]) -> None:
        """Every ledger of these is marked."""
        for bookie_id in bookie_ids:
            if bookie_id in self.absences:
                self.absences[bookie_id].phase = Phase.HANDLED

    # --- questions ------------------------------------------------------------------------------------------------

    def is_quiet(self, now_s: float) -> bool:
        return now_s < self._quiet_until_s

    def due(self, now_s: float) -> frozenset[BookieId]:
        """Whose ledgers are to be marked now. Look first."""
        if self._looked_at_s is None or self.is_quiet(now_s):
            return frozenset()
        return frozenset(b for b, absence in self.absences.items() if self._left_s(absence, now_s) <= _ROUNDING_S)

    def next_look_s(self, now_s: float) -> float | None:
        """Seconds until somebody may become due, not before a quiet time ends; None: nobody will."""
        waits = [max(0.0, self._left_s(a, now_s)) for a in self.absences.values() if a.phase is not Phase.HANDLED]
        if self.is_quiet(now_s):
            return max(self._quiet_until_s - now_s, min(waits, default=0.0))
        return min(waits, default=None)

    def left_s(self, bookie_id: BookieId, now_s: float) -> float | None:
        """What is left of the delay of an absent bookie, 0 when it is due; None: handled, or not absent."""
        absence = self.absences.get(bookie_id)
        if absence is None or absence.phase is Phase.HANDLED:
            return None
        return max(0.0, self._left_s(absence, now_s))

    # --- across leaders -------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What the next leader goes on from. Absences that were not told are not worth keeping."""
        return {
            bookie_id: {
                "absent_s": round(absence.absent_s, 1),
                "phase": absence.phase.value,
                "since_ms": absence.since_ms,
            }
            for bookie_id, absence in sorted(self.absences.items())
            if absence.is_told
        }

    def resume(self, kept: Mapping[str, Any]) -> None:
        """Go on from a former leader's `to_json`. What cannot be understood is left out: its delay begins anew."""
        for bookie_id, fields in kept.items():
            try:
                absent_s, phase = float(fields["absent_s"]), Phase(fields["phase"])
                since_ms = int(fields["since_ms"])
            except (KeyError, TypeError, ValueError):
                continue
            if not 0 <= absent_s < float("inf"):
                continue
            bookie = BookieId(bookie_id)
            self.absences[bookie] = Absence(bookie, since_ms, absent_s, phase, is_told=True)

    def _left_s(self, absence: Absence, now_s: float) -> float:
        if absence.phase is Phase.WAITING:
            return self.delay_s - absence.absent_s - self._uncounted_s(now_s)
        return 0.0 if absence.phase is Phase.FORCED else float("inf")

    def _uncounted_s(self, now_s: float) -> float:
        """Since the last look."""
        if self._looked_at_s is None:
            return 0.0
        assert now_s >= self._looked_at_s, "this clock only goes on"
        return min(GAP_MAX_S, now_s - self._looked_at_s)

    def _count(self, now_s: float) -> None:
        passed_s = self._uncounted_s(now_s)
        for absence in self.absences.values():
            absence.absent_s += passed_s
