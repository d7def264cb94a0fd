"""Random histories of the ledger protocol: no invariant breaks, they are what they claim, and a seed is a history."""

import hashlib
import os
import subprocess
import sys

import pytest
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId
from bindery_simulation.protocol.bookie import FENCED, NO_ENTRY, OK, UNKNOWN, Bookie
from bindery_simulation.protocol.history import play
from bindery_simulation.protocol.invariants import Invariant, Violation
from bindery_simulation.protocol.ledger import Ledger
from bindery_simulation.protocol.profiles import PROFILES

SEED_COUNT = 250


@pytest.mark.parametrize("profile", PROFILES)
def test_every_invariant_holds(profile: str) -> None:
    for seed in range(SEED_COUNT):
        outcome = play(seed, profile=profile)
        assert outcome.violation is None, f"seed {seed} of {profile}: {outcome.violation}"


REACHED = {
    "fences": 0.6, "rival recoveries": 0.25, "write-backs": 0.4, "changes": 0.08, "unknown outcomes": 0.03,
    "version conflicts": 0.05, "degraded": 0.1, "limbo": 0.05, "rot": 0.03, "marks removed": 0.15,
    "fragments copied": 0.05, "fragments replaced": 0.01, "long polls with an entry": 0.01, "lacs learned": 0.05,
    "deletes": 0.02, "changes in recovery": 0.01, "recoveries killed": 0.05, "segments 2": 0.02, "segments 3": 0.002,
    "kept unacknowledged entries": 0.1, "links cut": 0.01,
}  # fmt: skip
"""In which share of the histories these happen, at least."""


def test_histories_reach_the_depths_where_protocols_break() -> None:
    """Goal: the runs are not vacuous."""
    count = 2_000
    reach = dict.fromkeys(REACHED, 0)
    for seed in range(count):
        for what in play(seed).reach:
            if what in reach:
                reach[what] += 1
    assert not {what: reach[what] for what, share in REACHED.items() if reach[what] < share * count}


def test_looking_on_changes_nothing() -> None:
    for seed in range(100):
        assert play(seed).reach == play(seed, trace=True).reach


_DIGEST = """
import hashlib
from bindery_simulation.protocol.history import play
found = hashlib.sha256()
for seed in range(200):
    found.update(play(seed, trace=True).chart.digest().encode())
print(found.hexdigest())
"""


def test_a_seed_is_the_same_history_in_every_process() -> None:
    """Bit for bit, even under another hash seed: no outcome depends on the order in which a set is walked through."""
    digests = set()
    for hash_seed in ("0", "1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", _DIGEST], env=environment, capture_output=True, text=True, timeout=100, check=True
        )
        digests.add(done.stdout)
    here = hashlib.sha256()
    for seed in range(200):
        chart = play(seed, trace=True).chart
        assert chart is not None
        here.update(chart.digest().encode())
    assert digests == {here.hexdigest() + "\n"}


# -- the model itself --------------------------------------------------------------------------------------------------


def test_a_bookie_keeps_over_a_crash_what_it_answered() -> None:
    bookie = Bookie(BookieId("b0"))
    frame = bytes(8) + bytes(8) + (3).to_bytes(8, "big") + bytes(12) + b"x"
    assert bookie.add(4, frame, recovery=False) == OK
    bookie.fence()
    bookie.is_up = False
    bookie.restart()
    assert bookie.read(4) == (OK, frame)
    assert bookie.read(-1) == (OK, frame)
    assert bookie.lac == 3
    assert bookie.add(5, frame, recovery=False) == FENCED
    assert bookie.add(5, frame, recovery=True) == OK


def test_a_bookie_that_lost_its_disk_denies_nothing_and_takes_no_ordinary_add() -> None:
    bookie = Bookie(BookieId("b0"))
    frame = bytes(36) + b"x"
    bookie.add(0, frame, recovery=False)
    bookie.lose_storage(is_listed=True)
    assert bookie.read(0) == bookie.read(-1) == (UNKNOWN, None)
    assert bookie.add(1, frame, recovery=False) == FENCED
    bookie.lose_storage(is_listed=False)
    assert bookie.read(0) == (NO_ENTRY, None)


def a_ledger(*, state: LedgerState = LedgerState.OPEN) -> Ledger:
    names = (BookieId("b0"), BookieId("b1"))
    metadata = LedgerMetadata(
        ensemble_size=2,
        write_quorum=2,
        ack_quorum=2,
        segments=(Segment(0, names),),
        state=state,  # type: ignore[arg-type]
    )
    return Ledger(metadata, {name: Bookie(name) for name in (*names, BookieId("b2"))})


def test_the_mark_survives_a_repair_that_began_before_it() -> None:
    ledger = a_ledger()
    ledger.set_mark()
    seen = ledger.mark
    assert seen is not None
    ledger.set_mark()
    assert not ledger.remove_mark(seen)
    assert ledger.mark is not None


@pytest.mark.parametrize(
    ("changes", "invariant"),
    [
        ({"state": LedgerState.CLOSED, "last_entry_id": 0, "length": 1}, Invariant.DENSE),
        ({"segments": (Segment(0, (BookieId("b1"), BookieId("b1"))),)}, Invariant.SEGMENTS),  # type: ignore[arg-type]
    ],
    ids=["closed beyond what was pushed", "a bookie twice"],
)
def test_metadata_that_must_not_be_is_seen(changes: dict[str, object], invariant: Invariant) -> None:
    ledger = a_ledger()
    with pytest.raises(Violation) as found:
        ledger.compare_and_set(ledger.metadata.with_changes(**changes), ledger.version)
    assert found.value.invariant is invariant


def test_closed_metadata_may_change_members_but_not_its_end() -> None:
    ledger = a_ledger(state=LedgerState.CLOSED)
    moved = ledger.metadata.with_changes(segments=(Segment(0, (BookieId("b0"), BookieId("b2"))),))  # type: ignore[arg-type]
    assert ledger.compare_and_set(moved, ledger.version)
    assert not ledger.compare_and_set(moved, 0), "an old version"
    with pytest.raises(Violation, match="closed-is-final"):
        ledger.compare_and_set(moved.with_changes(length=9), ledger.version)
