"""Explain in one sentence why a ledger is not repaired, and what to do. Pure.

The first fact that explains the state decides: the ledger is not marked, recovery is disabled, no worker runs, or the
last attempt met an obstacle. The present state of the cluster is taken into account, so that the sentence does not ask
for a bookie that has joined since that attempt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecord
from bindery_metadata.ledgers.verified_records import Verified
from bindery_metadata.recovery.recovery_records import Obstacle, Pause, RecoveryRecord, RecoveryState, WorkerReport
from bindery_metadata.recovery.underreplication import Mark

from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.records.reasons import REASON_WORDS
from bindery_recovery.records.sentences import counted, listed, size, span

REPORT_STALE_S: Final = 30.0
"""Seconds without a new report after which a worker counts as stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The facts on which an explanation is based."""

    ledger_id: LedgerId
    mark: Mark | None
    record: RecoveryRecord | None = None
    metadata: LedgerMetadata | None = None
    """None: the ledger does not exist, or it could not be read; then `metadata_error` is set."""
    metadata_error: str = ""
    view: ClusterView
    locked_by: str | None = None
    """Worker that holds the lock of the ledger; None: not locked."""
    workers: Sequence[WorkerReport] = ()
    auditor: str | None = None
    """Name of the leading auditor; None: no auditor runs."""
    is_enabled: bool = True
    pause: Pause | None = None
    verified: Verified | None = None
    """When an audit last found the ledger whole; None: unknown."""
    closing: ClosingRecord | None = None
    """Closing record of the ledger; None: there is none. It is removed when a check finds the ledger whole."""

    @property
    def now_ms(self) -> int:
        return self.view.now_ms

    @property
    def fresh_workers(self) -> Sequence[WorkerReport]:
        """Reports of workers that are running."""
        return [one for one in self.workers if self.now_ms - one.at_ms < REPORT_STALE_S * 1000]


class Explanation(NamedTuple):
    """The answer for one ledger."""

    sentence: str
    """Begins with a capital letter and ends with a full stop."""
    waits: bool
    """Whether an action by an operator is needed before the ledger can be repaired."""


def explain(known: Known) -> Explanation:
    """Explain why the ledger is not repaired and what to do, or state that nothing is known to be missing."""
    found = _explain(known)
    return Explanation(f"{found.sentence[0].upper()}{found.sentence[1:]}.", found.waits)


def _explain(known: Known) -> Explanation:
    name = f"ledger {known.ledger_id}"
    if known.mark is None:
        return _not_marked(known, name)
    if known.metadata is None and not known.metadata_error:
        return _no_action(f"{name} was deleted: a worker will remove its mark")
    if not known.is_enabled:
        return _waits(f"{name} is marked and waits, because {_off(known)}")
    record = known.record
    if known.locked_by is not None:
        return _no_action(_under_way(known, name, known.locked_by))
    if not known.fresh_workers:
        return _waits(
            f"{name} is marked ({_why_marked(known)}) and no replication worker is running: start an auditor, or set"
            " `autorecovery_embedded` on the bookies"
        )
    if record is None or (record.obstacle is Obstacle.NONE and not record.detail):
        return _no_action(_waits_for_a_worker(known, name))
    text, waits = _OBSTACLES[record.obstacle](known, record)
    if text.startswith(f"{name} "):
        text = f"it{text[len(name) :]}"
    return Explanation(f"{name} is not repaired because {text}{_when(known, record)}", waits)


def _no_action(text: str) -> Explanation:
    return Explanation(text, False)


def _waits(text: str) -> Explanation:
    return Explanation(text, True)


# --- before any attempt -----------------------------------------------------------------------------------------------


def _not_marked(known: Known, name: str) -> Explanation:
    if known.metadata is None:
        if known.metadata_error:
            return _waits(
                f"{name} is not marked, but its metadata cannot be read ({known.metadata_error}):"
                " restore it from a backup"
            )
        return _no_action(f"{name} does not exist")
    members = _members(known.metadata)
    away = [b for b in members if b not in known.view.bookies and not known.view.is_exempt(b)]
    leaving = [b for b in members if b in known.view.leaving and b not in away]
    if away or leaving:
        be = "is" if len(away or leaving) == 1 else "are"
        what = f"{listed(away)} {be} not registered" if away else f"{listed(leaving)} {be} leaving the cluster"
        if not known.is_enabled:
            return _waits(f"{name} is not marked, though {what}, because {_off(known)}")
        if known.auditor is None:
            return _waits(f"{name} is not marked, though {what}, because no auditor is running: start one")
        when = "when the lost-bookie delay has passed" if away else "soon"
        return _no_action(f"{name} is not marked yet, though {what}: the auditor {known.auditor} marks it {when}")
    exempt = [b for b in members if known.view.is_exempt(b)]
    if exempt:
        return _no_action(
            f"{name} is not marked, because {listed(exempt)} {'is' if len(exempt) == 1 else 'are'} in maintenance: no"
            " action is needed"
        )
    if known.closing is not None:
        return _to_be_checked(known, known.closing, name)
    return _no_action(
        f"{name} is not marked: no copy is known to be missing; to read every copy, run"
        f" `bindery ledger check {known.ledger_id} --deep`"
    )


def _to_be_checked(known: Known, note: ClosingRecord, name: str) -> Explanation:
    text = f"{name} is not marked, but {_CAUSE_WORDS[note.cause]}, so some copies may be missing"
    assert known.metadata is not None
    if known.metadata.state is not LedgerState.CLOSED:
        return _no_action(f"{text}: it is checked when it has been closed")
    if not known.is_enabled:
        return _waits(f"{text}; it is not checked, because {_off(known)}")
    if known.auditor is None:
        return _waits(f"{text}; it is not checked, because no auditor is running: start one")
    ago = span(max(0, known.now_ms - note.noted_at_ms) / 1000)
    return _no_action(f"{text}: the auditor {known.auditor} has been checking the entry lists of its bookies for {ago}")


_CAUSE_WORDS: Final[Mapping[ClosingCause, str]] = {
    ClosingCause.RECOVERED: "it was closed by recovery after its writer may have continued without some copies",
    ClosingCause.DEGRADED: "its writer continued without a copy of some entries",
    ClosingCause.IN_FLIGHT: "it was closed while copies were still being written",
    ClosingCause.UNKNOWN: "a client closed it without knowing of all its copies",
}
assert _CAUSE_WORDS.keys() == set(ClosingCause)


def _members(metadata: LedgerMetadata) -> list[BookieId]:
    return list(dict.fromkeys(b for segment in metadata.segments for b in segment.ensemble))


def _why_marked(known: Known) -> str:
    """Return the reason for the mark, such as `a bookie is lost: bookie-1`."""
    assert known.mark is not None
    words = "copies are missing" if known.record is None else REASON_WORDS[known.record.reason]
    bookies = known.mark.replicas or (known.record.bookies if known.record is not None else ())
    return f"{words}: {listed(bookies)}" if bookies else words


def _off(known: Known) -> str:
    who = f" by {known.pause.by}" if known.pause is not None and known.pause.by else ""
    why = f" ({known.pause.reason})" if known.pause is not None and known.pause.reason else ""
    return f"automatic recovery was disabled{who}{why}: run `bindery recovery resume` to enable it"


def _under_way(known: Known, name: str, worker: str) -> str:
    record = known.record
    if record is None or record.state is not RecoveryState.COPYING:
        return f"{name} is being checked by {worker or 'a worker'}: no action is needed"
    left = ""
    if record.missing_entries is not None:
        left = f", {counted(record.missing_entries, 'copy', 'copies')} left"
        if record.missing_bytes is not None:
            left += f" ({size(record.missing_bytes)})"
    rate = next((one.bytes_per_s for one in known.fresh_workers if one.name == worker), 0.0)
    if record.missing_bytes and rate > 0:
        left += f", about {span(record.missing_bytes / rate)}"
    return f"{name} is being copied by {worker or 'a worker'}{left}: no action is needed"


def _waits_for_a_worker(known: Known, name: str) -> str:
    workers = known.fresh_workers
    busy = [one for one in workers if one.ledger_id is not None]
    if len(busy) < len(workers):
        return f"{name} is marked ({_why_marked(known)}) and a worker will start within seconds: no action is needed"
    others = "the only worker is busy" if len(workers) == 1 else f"all {len(workers)} workers are busy"
    return (
        f"{name} is marked ({_why_marked(known)}) and waits for a worker: {others} with other ledgers; more"
        " workers or a higher rate limit would shorten the wait"
    )


# --- the obstacle of the last attempt -------------------------------------------------------------------------------


def _when(known: Known, record: RecoveryRecord) -> str:
    """Return the end of the sentence: when the next attempt is due."""
    if record.state is RecoveryState.UNRECOVERABLE:
        return " (the next attempt follows when a bookie returns, or after `bindery recovery retry`)"
    if record.next_retry_ms is None:
        return ""
    left_s = (record.next_retry_ms - known.now_ms) / 1000
    tried = f", after {counted(record.attempts, 'attempt')}" if record.attempts else ""
    return f" (next attempt {'now' if left_s <= 0 else f'in {span(left_s)}'}{tried})"


def _detail(known: Known, record: RecoveryRecord) -> str:
    return record.detail or record.last_error or "the last attempt failed"


def _none(known: Known, record: RecoveryRecord) -> Explanation:
    return _no_action(_detail(known, record))


def _no_spare(known: Known, record: RecoveryRecord) -> Explanation:
    members = _members(known.metadata) if known.metadata is not None else []
    spares = sorted(known.view.spares(tuple(members)))
    if spares:
        return _no_action(
            f"there was no spare bookie at the last attempt, but {spares[0]} can accept copies now: it will be repaired"
        )
    return _waits(_detail(known, record))


def _no_copy_left(known: Known, record: RecoveryRecord) -> Explanation:
    return _waits(
        f"no good copy of some entries is left ({_detail(known, record)}): start a bookie that had one, with its disks,"
        " or delete the ledger"
    )


def _source_unavailable(known: Known, record: RecoveryRecord) -> Explanation:
    away = [] if known.metadata is None else [b for b in _members(known.metadata) if b not in known.view.bookies]
    what = f"start {listed(away)} again" if away else "find out why these bookies do not answer"
    return _waits(f"the bookies that may have good copies do not return them ({_detail(known, record)}): {what}")


def _source_in_limbo(known: Known, record: RecoveryRecord) -> Explanation:
    return _waits(
        f"the last copies may be on a bookie that lost its storage ({_detail(known, record)}): start the other bookies"
        " that had them, or wait until that bookie has refilled its storage"
    )


def _target_refuses(known: Known, record: RecoveryRecord) -> Explanation:
    return _waits(f"no bookie accepts the copies ({_detail(known, record)}): free disk space, or add a bookie")


def _ledger_open(known: Known, record: RecoveryRecord) -> Explanation:
    if known.metadata is not None and known.metadata.state is LedgerState.CLOSED:
        return _no_action("it was open at the last attempt and is closed now: it will be repaired soon")
    return Explanation(_detail(known, record), waits=record.state is RecoveryState.BLOCKED)


def _recovery_impossible(known: Known, record: RecoveryRecord) -> Explanation:
    if known.metadata is not None and known.metadata.state is LedgerState.CLOSED:
        return _no_action("it could not be closed at the last attempt and is closed now: it will be repaired soon")
    return _waits(_detail(known, record))


def _metadata_unreadable(known: Known, record: RecoveryRecord) -> Explanation:
    if known.metadata is not None:
        return _no_action(
            "its metadata could not be read at the last attempt and can be read now: it will be repaired soon"
        )
    return _waits(_detail(known, record))


def _was_paused(known: Known, record: RecoveryRecord) -> Explanation:
    return _no_action(
        "automatic recovery was disabled during the last attempt and is enabled now: a worker will start soon"
    )


def _error(known: Known, record: RecoveryRecord) -> Explanation:
    return _no_action(f"the last attempt failed ({_detail(known, record)})")


_OBSTACLES: Final[Mapping[Obstacle, Callable[[Known, RecoveryRecord], Explanation]]] = {
    Obstacle.NONE: _none,
    Obstacle.NO_SPARE: _no_spare,
    Obstacle.NO_COPY_LEFT: _no_copy_left,
    Obstacle.SOURCE_UNAVAILABLE: _source_unavailable,
    Obstacle.SOURCE_IN_LIMBO: _source_in_limbo,
    Obstacle.TARGET_REFUSES: _target_refuses,
    Obstacle.LEDGER_OPEN: _ledger_open,
    Obstacle.RECOVERY_IMPOSSIBLE: _recovery_impossible,
    Obstacle.METADATA_UNREADABLE: _metadata_unreadable,
    Obstacle.PAUSED: _was_paused,
    Obstacle.ERROR: _error,
}
assert _OBSTACLES.keys() == set(Obstacle)
