"""Record in the history of recovery that this bookie refilled its storage, for `bindery recovery history`.

A bookie that lost its storage copies the entries back by itself, without a mark and without a replication worker, so
without this event the history would show nothing. If ZooKeeper does not answer, the event is only logged.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import BinderyError
from bindery_core.ids import BookieId
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.process.late_imports import in_thread
from bindery_metadata.stores.store import MetadataStore

KIND: Final = "refilled"
"""The event's kind."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Refill:
    """The result of one refill. `entries`: number of entries of the `ledgers` that are stored here again. This bookie
    copied `entries_copied` of them, which have `bytes_copied` bytes."""

    ledgers: int
    entries: int
    entries_copied: int
    bytes_copied: int


def refill_recorder(
    metadata: MetadataStore, bookie_id: BookieId, *, wall_clock_ms: Callable[[], int]
) -> Callable[[Refill], Awaitable[None]]:
    """Return a function that appends the event of a refill to the history. The function does not raise."""

    async def record(refill: Refill) -> None:
        await in_thread(import_records)
        from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords

        text = (
            f"bookie {bookie_id} refilled {refill.entries} entries of {refill.ledgers} ledgers after it had lost its "
            f"storage; it copied {refill.entries_copied} entries ({refill.bytes_copied} bytes) from other bookies"
        )
        fields = {
            "bookie": str(bookie_id),
            "ledgers": refill.ledgers,
            "entries": refill.entries,
            "entries_copied": refill.entries_copied,
            "bytes_copied": refill.bytes_copied,
        }
        try:
            await RecoveryRecords(metadata).append_history(HistoryEvent(wall_clock_ms(), KIND, text, fields))
        except BinderyError as error:
            log.warning("refill_not_recorded", **fields, **error_fields(error))

    return record


def import_records() -> None:
    import bindery_metadata.recovery.recovery_records  # noqa: F401 - its parser takes long to import
