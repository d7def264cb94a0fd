"""Name the invariants of every history of the ledger protocol.

The checks are in `ledger`, outside of all state machines. They use the entries that were pushed (passed to the writer)
and confirmed, the published metadata, and the entries that the bookies store.

| invariant                            | meaning                                                                     |
|--------------------------------------|-----------------------------------------------------------------------------|
| acknowledged-entries-readable        | a confirmed entry is never cut off, keeps its copies on the bookies that    |
|                                      | the metadata names, and can be read at the end                              |
| no-divergence-of-writer-and-metadata | an entry is confirmed only when an ack quorum of the write set in the       |
|                                      | *published* metadata stores it                                              |
| no-ack-after-fence                   | a bookie that answered a fence accepts no ordinary add; no entry is         |
|                                      | confirmed that a close left out, or that was pushed after a deletion that   |
|                                      | had fenced all bookies                                                      |
| lac-never-beyond-safe                | no reader sees a LAC above the last entry that is confirmed or closed       |
| covered-lac-reads-are-recent         | a LAC read that covered an open ensemble finds at least the LAC that the    |
|                                      | last entry contains that was confirmed before the read began                |
| ids-dense                            | confirmations follow one another without gap, and end when the handle       |
|                                      | breaks; a closed ledger has no holes                                        |
| metadata-segments-valid              | segments ascend, members are distinct, history is not rewritten, states     |
|                                      | never go back                                                               |
| closed-is-final                      | CLOSED metadata keeps its last entry and length, and the length is right    |
| copies-agree                         | an entry that is stored or read is the one that its writer pushed           |
| mark-removed-means-whole             | when the under-replication mark is removed, every entry has all Qw copies   |
| recovery-terminates                  | after all faults, a recovery closes the ledger, and repair ends             |
| machine-assertions                   | no assertion inside a state machine fails                                   |

A copy is the replica of an entry on one bookie. For these invariants, a copy that a fault removed (lost disk,
corruption) still counts: the model damages fewer than Qa bookies, so that one intact copy always remains. Whether
entries can be read is checked on the intact copies.
"""

from enum import Enum


class Invariant(Enum):
    """The invariants, as in the table."""

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
    """Raised when an invariant does not hold."""

    def __init__(self, invariant: Invariant, detail: str) -> None:
        super().__init__(f"{invariant.value}: {detail}")
        self.invariant = invariant
        self.detail = detail

    def __reduce__(self) -> tuple[type["Violation"], tuple[Invariant, str]]:
        """Pickle the arguments of the constructor: a search with several processes sends violations between them."""
        return Violation, (self.invariant, self.detail)
