"""The model of the metadata checks each change of a ledger."""

import pytest
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId
from bindery_simulation.protocol.bookie import Bookie
from bindery_simulation.protocol.invariants import Invariant, Violation
from bindery_simulation.protocol.ledger import Ledger


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


def test_the_mark_survives_a_repair_that_began_before_it_was_set() -> None:
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
def test_invalid_metadata_is_reported(changes: dict[str, object], invariant: Invariant) -> None:
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
