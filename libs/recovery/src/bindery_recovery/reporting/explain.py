"""Why a ledger is not healed, and what would heal it: one sentence from what is known. Pure.

The facts are asked in the order in which they decide: is there anything to heal, may anybody heal, does somebody, and
what did the last attempt meet. What has changed since that attempt is taken from the present view, so that nobody is
told to add a bookie that has joined meanwhile.
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
"""A worker that has said nothing for so long is not counted on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """All that an explanation goes by, as it stands now."""

    ledger_id: LedgerId
    mark: Mark | None
    record: RecoveryRecord | None = None
    metadata: LedgerMetadata | None = None
    """None: the ledger does not exist, unless `metadata_error` says why it could not be read."""
    metadata_error: str = ""
    view: ClusterView
    locked_by: str | None = None
    """Who has the ledger's lock; None: nobody."""
    workers: Sequence[WorkerReport] = ()
    auditor: str | None = None
    """Who leads the auditors; None: nobody."""
    is_enabled: bool = True
    pause: Pause | None = None
    verified: Verified | None = None
    """When an audit last found it whole; None: that is not known."""
    closing: ClosingRecord | None = None
    """It was closed, or is being closed, by who does not know of all copies, and was not seen to be whole since."""

    @property
    def now_ms(self) -> int:
        return self.view.now_ms

    @property
    def fresh_workers(self) -> Sequence[WorkerReport]:
        return [one for one in self.workers if self.now_ms - one.at_ms < REPORT_STALE_S * 1000]


class Explanation(NamedTuple):
    sentence: str
    """With a capital and a full stop."""
    waits: bool
    """Nothing will heal the ledger before somebody does something."""


def explain(known: Known) -> Explanation:
    """Why the ledger is not healed and what would heal it, or that nothing is wrong with it."""
    said = _explain(known)
    return Explanation(f"{said.sentence[0].upper()}{said.sentence[1:]}.", said.waits)


def _explain(known: Known) -> Explanation:
    name = f"ledger {known.ledger_id}"
    if known.mark is None:
        return _not_marked(known, name)
    if known.metadata is None and not known.metadata_error:
        return _goes_on(f"{name} was deleted: its mark goes as soon as a worker looks at it")
    if not known.is_enabled:
        return _waits(f"{name} is marked and waits, because {_off(known)}")
    record = known.record
    if known.locked_by is not None:
        return _goes_on(_under_way(known, name, known.locked_by))
    if not known.fresh_workers:
        return _waits(
            f"{name} is marked ({_why_marked(known)}) and no replication worker runs: start an auditor, or set"
            " `autorecovery_embedded` on the bookies"
        )
    if record is None or (record.obstacle is Obstacle.NONE and not record.detail):
        return _goes_on(_waits_for_a_worker(known, name))
    text, waits = _OBSTACLES[record.obstacle](known, record)
    if text.startswith(f"{name} "):
        text = f"it{text[len(name) :]}"
    return Explanation(f"{name} is not healed because {text}{_when(known, record)}", waits)


def _goes_on(text: str) -> Explanation:
    return Explanation(text, False)


def _waits(text: str) -> Explanation:
    return Explanation(text, True)


# --- before any attempt -----------------------------------------------------------------------------------------------


def _not_marked(known: Known, name: str) -> Explanation:
    if known.metadata is None:
        if known.metadata_error:
            return _waits(
                f"{name} is not marked, but its metadata cannot be read ({known.metadata_error}): restore them"
            )
        return _goes_on(f"{name} does not exist, and nothing is to be healed")
    members = _members(known.metadata)
    away = [b for b in members if b not in known.view.bookies and not known.view.is_excused(b)]
    leaving = [b for b in members if b in known.view.leaving and b not in away]
    if away or leaving:
        be = "is" if len(away or leaving) == 1 else "are"
        what = f"{listed(away)} {be} not registered" if away else f"{listed(leaving)} {be} to hold nothing"
        if not known.is_enabled:
            return _waits(f"{name} is not marked, though {what}, because {_off(known)}")
        if known.auditor is None:
            return _waits(f"{name} is not marked, though {what}, because no auditor runs: start one")
        when = f"once {'it has' if be == 'is' else 'they have'} been away for the lost-bookie delay" if away else "soon"
        return _goes_on(f"{name} is not marked yet, though {what}: the auditor {known.auditor} marks it {when}")
    excused = [b for b in members if known.view.is_excused(b)]
    if excused:
        return _goes_on(
            f"{name} is not marked, because {listed(excused)} may be away for maintenance: nothing is to be done"
        )
    if known.closing is not None:
        return _to_be_looked_at(known, known.closing, name)
    return _goes_on(
        f"{name} is not marked: as far as is known every copy is there, and"
        f" `bindery ledger check {known.ledger_id} --deep` looks"
    )


def _to_be_looked_at(known: Known, note: ClosingRecord, name: str) -> Explanation:
    text = f"{name} is not marked, but {_CAUSE_WORDS[note.cause]}, so that it may lack copies"
    assert known.metadata is not None
    if known.metadata.state is not LedgerState.CLOSED:
        return _goes_on(f"{text}: it is not closed yet, and is looked at once it is")
    if not known.is_enabled:
        return _waits(f"{text}; nobody looks, because {_off(known)}")
    if known.auditor is None:
        return _waits(f"{text}; nobody looks, because no auditor runs: start one")
    ago = span(max(0, known.now_ms - note.noted_at_ms) / 1000)
    return _goes_on(f"{text}: since {ago} the auditor {known.auditor} asks its bookies for their lists of entries")


_CAUSE_WORDS: Final[Mapping[ClosingCause, str]] = {
    ClosingCause.RECOVERED: "it was closed by recovery, whose writer may have gone on without some",
    ClosingCause.DEGRADED: "its writer went on without a copy of some entries",
    ClosingCause.IN_FLIGHT: "it was closed while copies were on their way",
    ClosingCause.UNKNOWN: "it was closed by somebody who did not know of all its copies",
}
assert _CAUSE_WORDS.keys() == set(ClosingCause)


def _members(metadata: LedgerMetadata) -> list[BookieId]:
    return list(dict.fromkeys(b for segment in metadata.segments for b in segment.ensemble))


def _why_marked(known: Known) -> str:
    """`bookie-1 is lost`, in a few words."""
    assert known.mark is not None
    words = "copies are missing" if known.record is None else REASON_WORDS[known.record.reason]
    bookies = known.mark.replicas or (known.record.bookies if known.record is not None else ())
    return f"{words}: {listed(bookies)}" if bookies else words


def _off(known: Known) -> str:
    who = f" by {known.pause.by}" if known.pause is not None and known.pause.by else ""
    why = f" ({known.pause.reason})" if known.pause is not None and known.pause.reason else ""
    return f"automatic recovery was switched off{who}{why}: `bindery recovery resume` switches it on"


def _under_way(known: Known, name: str, worker: str) -> str:
    record = known.record
    if record is None or record.state is not RecoveryState.COPYING:
        return f"{name} is being looked at by {worker or 'a worker'} right now: nothing is to be done"
    left = ""
    if record.missing_entries is not None:
        left = f", {counted(record.missing_entries, 'copy', 'copies')} to go"
        if record.missing_bytes is not None:
            left += f" ({size(record.missing_bytes)})"
    rate = next((one.bytes_per_s for one in known.fresh_workers if one.name == worker), 0.0)
    if record.missing_bytes and rate > 0:
        left += f", done in about {span(record.missing_bytes / rate)}"
    return f"{name} is being copied by {worker or 'a worker'} right now{left}: nothing is to be done"


def _waits_for_a_worker(known: Known, name: str) -> str:
    workers = known.fresh_workers
    busy = [one for one in workers if one.ledger_id is not None]
    if len(busy) < len(workers):
        return f"{name} is marked ({_why_marked(known)}) and a worker takes it within seconds: nothing is to be done"
    others = "the worker is" if len(workers) == 1 else f"all {len(workers)} workers are"
    return (
        f"{name} is marked ({_why_marked(known)}) and waits for a worker: {others} at other ledgers; more workers or a"
        " higher rate would make it quicker"
    )


# --- what the last attempt met ----------------------------------------------------------------------------------------


def _when(known: Known, record: RecoveryRecord) -> str:
    """The end of the sentence: when it is tried again."""
    if record.state is RecoveryState.UNRECOVERABLE:
        return " (it is tried again when a bookie returns, or with `bindery recovery retry`)"
    if record.next_retry_ms is None:
        return ""
    left_s = (record.next_retry_ms - known.now_ms) / 1000
    tried = f", after {counted(record.attempts, 'attempt')}" if record.attempts else ""
    return f" (looked at again {'now' if left_s <= 0 else f'in {span(left_s)}'}{tried})"


def _told(known: Known, record: RecoveryRecord) -> str:
    return record.detail or record.last_error or "the last attempt failed"


def _none(known: Known, record: RecoveryRecord) -> Explanation:
    return _goes_on(_told(known, record))


def _no_spare(known: Known, record: RecoveryRecord) -> Explanation:
    members = _members(known.metadata) if known.metadata is not None else []
    spares = sorted(known.view.spares(tuple(members)))
    if spares:
        return _goes_on(f"there was no spare bookie when it was tried, but now there is {spares[0]}: it is healed soon")
    return _waits(_told(known, record))


def _no_copy_left(known: Known, record: RecoveryRecord) -> Explanation:
    return _waits(
        f"no good copy is left of some entries ({_told(known, record)}): bring a bookie back that had one, with its"
        " disks, or delete the ledger"
    )


def _source_unavailable(known: Known, record: RecoveryRecord) -> Explanation:
    away = [] if known.metadata is None else [b for b in _members(known.metadata) if b not in known.view.bookies]
    what = f"bring {listed(away)} back" if away else "see what keeps these bookies from answering"
    return _waits(f"the bookies that may have good copies do not give them ({_told(known, record)}): {what}")


def _source_in_limbo(known: Known, record: RecoveryRecord) -> Explanation:
    return _waits(
        f"what may be the last copies lie on a bookie that lost storage ({_told(known, record)}): bring back the other"
        " bookies that had them, or wait until it has refilled what it can"
    )


def _target_refuses(known: Known, record: RecoveryRecord) -> Explanation:
    return _waits(f"no bookie takes the copies ({_told(known, record)}): free its disk, or add a bookie")


def _ledger_open(known: Known, record: RecoveryRecord) -> Explanation:
    if known.metadata is not None and known.metadata.state is LedgerState.CLOSED:
        return _goes_on("it was open when it was looked at, and is closed now: it is healed soon")
    return Explanation(_told(known, record), waits=record.state is RecoveryState.BLOCKED)


def _recovery_impossible(known: Known, record: RecoveryRecord) -> Explanation:
    if known.metadata is not None and known.metadata.state is LedgerState.CLOSED:
        return _goes_on("it could not be closed when it was tried, and is closed now: it is healed soon")
    return _waits(_told(known, record))


def _metadata_unreadable(known: Known, record: RecoveryRecord) -> Explanation:
    if known.metadata is not None:
        return _goes_on("its metadata could not be read when it was tried, and can be now: it is healed soon")
    return _waits(_told(known, record))


def _was_paused(known: Known, record: RecoveryRecord) -> Explanation:
    return _goes_on("automatic recovery was switched off while it was copied, and is on again: a worker takes it soon")


def _error(known: Known, record: RecoveryRecord) -> Explanation:
    return _goes_on(f"the last attempt failed ({_told(known, record)})")


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
