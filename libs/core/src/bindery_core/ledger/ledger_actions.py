"""Actions that the ledger state machines request from their transport.

| action         | from              | the transport responds with                                                  |
|----------------|-------------------|------------------------------------------------------------------------------|
| SendAdds       | writer, recovery  | `receive_many` / `receive_adds`, or `bookie_failed`                          |
| SendReads      | reader, recovery  | `receive_many` / `receive_reads`, or `bookie_failed`                         |
| SendLac        | writer            | nothing: best effort                                                         |
| ChangeEnsemble | writer, recovery  | `ensemble_changed`, `ensemble_change_failed`                                 |
| Confirm        | writer            | nothing: complete the callers that wait for these entries                    |
| Degraded       | writer, recovery  | nothing: mark the ledger under-replicated, once per handle is enough         |
| SealLedger     | writer            | nothing more: run `plan_close`; the writer is finished                       |
| BeginRecovery  | recovery          | `recovery_begun`, `metadata_failed`                                          |
| CloseRecovered | recovery          | `recovery_closed`, `metadata_failed`                                         |
| Recovered      | recovery          | nothing: the ledger is closed as in `metadata`                               |
| Done           | reader            | nothing: the result is available                                             |
| Fail           | all               | nothing: the machine has ended                                               |

The actions are frozen, so that tests can compare and print them. A batch results in one action per bookie. Equal
positions in `entry_ids` and `frames` belong to the same entry.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bindery_core.errors import BinderyError
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.ids import BookieId


@dataclass(frozen=True, slots=True)
class SendAdds:
    """Send these entries to one bookie. The sequences are shared between actions: do not change them."""

    bookie_id: BookieId
    entry_ids: Sequence[int]
    frames: Sequence[bytes]
    recovery: bool = False
    """Set the RECOVERY_ADD flag (and high priority): accepted by a fenced ledger."""


@dataclass(frozen=True, slots=True)
class SendReads:
    """Read these entries from one bookie; -1 requests the last entry it has (the response repeats -1)."""

    bookie_id: BookieId
    entry_ids: Sequence[int]
    fence: bool = False
    """Set FENCE_LEDGER (with master key, high priority): from then on the bookie rejects the writer's adds."""


@dataclass(frozen=True, slots=True)
class SendLac:
    """Send an explicit LAC (WRITE_LAC) to these bookies; failures are ignored."""

    bookie_ids: tuple[BookieId, ...]
    lac: int


@dataclass(frozen=True, slots=True)
class ChangeEnsemble:
    """Replace failed members of the last ensemble: run `plan_ensemble_change` with these arguments.

    `publish` True: run it in the metadata update loop, and respond after the compare-and-set. False (recovery): plan on
    the machine's own `metadata` and respond at once; the result is published when recovery closes the ledger.
    """

    failed: Mapping[int, BookieId]
    """Ensemble index -> the bookie that failed at this index."""
    first_entry_id: int
    """First entry of the new ensemble: last add confirmed + 1."""
    publish: bool = True


@dataclass(frozen=True, slots=True)
class Confirm:
    """Entries first..last are acknowledged: they and all entries before them are durable on an ack quorum."""

    first_entry_id: int
    last_entry_id: int


@dataclass(frozen=True, slots=True)
class Degraded:
    """Entries from `first_entry_id` on are missing on this bookie, and no spare replaced it."""

    bookie_id: BookieId
    first_entry_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SealLedger:
    """No entry is in flight any more: close the ledger at these values (`plan_close`)."""

    last_entry_id: int
    length: int


@dataclass(frozen=True, slots=True)
class BeginRecovery:
    """Run `plan_begin_recovery` in the metadata update loop."""


@dataclass(frozen=True, slots=True)
class CloseRecovered:
    """Run `plan_recovery_close` with these arguments in the metadata update loop."""

    began: tuple[Segment, ...]
    """Segments as recovery read them."""
    recovered: tuple[Segment, ...]
    """Segments with the ensembles that recovery changed in memory."""
    last_entry_id: int
    length: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """The ledger is closed, by this or by another client."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class Done:
    """A read is complete."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The state machine has ended with this error."""

    error: BinderyError


WriterAction = SendAdds | SendLac | ChangeEnsemble | Confirm | Degraded | SealLedger | Fail
RecoveryAction = BeginRecovery | SendReads | SendAdds | ChangeEnsemble | Degraded | CloseRecovered | Recovered | Fail
ReaderAction = SendReads | Done | Fail
