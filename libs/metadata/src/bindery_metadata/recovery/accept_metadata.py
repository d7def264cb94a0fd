"""Accept the metadata as it is after a suspected rollback, and record that in the history of recovery."""

import logging
from typing import Final

from bindery_core.errors import BinderyError

from bindery_metadata.ledgers.known_ledgers import KnownLedgers, KnownLedgersStore
from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords
from bindery_metadata.stores.store import MetadataStore

KIND: Final = "metadata_accepted"
"""The event's kind."""

_log = logging.getLogger(__name__)


async def accept_metadata(
    store: MetadataStore, *, instance_id: str, version: int | None, by: str, at_ms: int
) -> KnownLedgers:
    """Remove all reports, so that bookies delete their ledgers without metadata. Return the value before.

    `version`: of the node that the operator saw. Raises Conflict if the reports have changed since or there are none;
    MetadataUnavailable, MetadataOutcomeUnknown. If the event cannot be recorded, it is only logged.
    """
    before = await KnownLedgersStore(store, instance_id=instance_id).accept(version=version, by=by, at_ms=at_ms)
    unknown = sum(report.unknown for report in before.reports.values())
    missing = sum(report.missing or 0 for report in before.reports.values())
    bookies = ", ".join(sorted(before.reports))
    text = (
        f"{by} accepted the metadata after a suspected rollback: bookies ({bookies}) delete {missing or unknown} "
        f"replicas of ledgers without metadata, of which the metadata never knew {unknown}"
    )
    fields = {"bookies": bookies, "unknown": unknown, "missing": missing, "by": by}
    try:
        await RecoveryRecords(store).append_history(HistoryEvent(at_ms, KIND, text, fields))
    except BinderyError as error:
        _log.warning("acceptance_not_recorded", extra={**fields, "error": str(error)})
    return before
