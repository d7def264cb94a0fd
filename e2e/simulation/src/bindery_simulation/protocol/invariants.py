"""What must hold in every history of the ledger protocol, by name.

The checks are in `ledger`, outside of all machines: they see what was pushed, confirmed and published, and what the
bookies really hold.

| invariant                            | what it says                                                                |
|--------------------------------------|-----------------------------------------------------------------------------|
| acknowledged-entries-readable        | a confirmed entry is never cut off, keeps its copies where metadata points, |
|                                      | and reads back at the end                                                   |
| no-divergence-of-writer-and-metadata | what is confirmed lies, when it is, on an ack quorum of the write set that  |
|                                      | *published* metadata names                                                  |
| no-ack-after-fence                   | a bookie that answered a fence takes no ordinary add; nothing is confirmed  |
|                                      | that a close left out, or that was pushed after a delete had fenced         |
| lac-never-beyond-safe                | no reader sees a LAC above what is confirmed, or closed                     |
| covered-lac-reads-are-recent         | a LAC read that covered an open ensemble knows the LAC that the entries     |
|                                      | carry which were confirmed before it began                                  |
| ids-dense                            | confirmations follow one another without gap, and end when the handle       |
|                                      | breaks; a closed ledger has no holes                                        |
| metadata-segments-valid              | segments ascend, members are distinct, history is not rewritten, states     |
|                                      | only go forward                                                             |
| closed-is-final                      | CLOSED metadata keeps its last entry and length, and the length is right    |
| copies-agree                         | whatever stands or is read as an entry is what its writer pushed            |
| mark-removed-means-whole             | when the under-replication mark goes, every entry has all its Qw copies     |
| recovery-terminates                  | once all faults are over a recovery closes the ledger, and repair ends      |
| machine-assertions                   | no assertion inside a state machine fails                                   |

A copy that the fault model took away (lost storage, rot) counts as a copy in the sums: the model damages fewer than Qa
bookies, so that one good copy is always left, and readability is checked on the good ones.
"""

from enum import Enum


class Invariant(Enum):
    READABLE = "acknowledged-entries-readable"
    NO_DIVERGENCE = "no-divergence-of-writer-and-metadata"
    NO_ACK_AFTER_FENCE = "no-ack-after-fence"
    LAC_SAFE = "lac-never-beyond-safe"
    LAC_RECENT = "covered-lac-reads-are-recent"
    DENSE = "ids-dense"
    SEGMENTS = "metadata-segments-valid"
    FINAL = "closed-is-final"
    AGREE = "copies-agree"
    MARK = "mark-removed-means-whole"
    TERMINATES = "recovery-terminates"
    MACHINE = "machine-assertions"


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, detail: str) -> None:
        super().__init__(f"{invariant.value}: {detail}")
        self.invariant = invariant
        self.detail = detail
