"""Mark the ledgers that an audit found under-replicated (`--apply`), as the auditor does, for replication workers.

The metadata of each ledger is read again before it is marked. Deleted ledgers are skipped, and so are bookies that the
metadata no longer names. Marking a marked ledger again is harmless. Apart from the marks and their recovery
records, only one event in the recovery history is written.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from bindery_core.errors import BadVersion, Corrupt, NoSuchNode
from bindery_core.formats import ledger_metadata_codec
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.recovery_records import HistoryEvent, Reason, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore
from bindery_recovery.checks.bookie_audit import LedgerMarker
from bindery_recovery.cluster.ledger_index import members_of

from bindery_spark.audit.cluster_facts import NoRandomness, connected
from bindery_spark.audit.findings.actions import Proposal


@dataclass(slots=True)
class Applied:
    """Result of `apply`. Ledgers are ids."""

    marked: list[int] = field(default_factory=list)
    already: list[int] = field(default_factory=list)
    """Ledgers whose mark already listed these bookies."""
    left: dict[int, str] = field(default_factory=dict)
    """Reason by skipped ledger."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def apply(
    store: MetadataStore,
    layout: LedgersLayout,
    proposals: Iterable[Proposal],
    *,
    run_id: str,
    clock_ms: Callable[[], int],
) -> Applied:
    """Mark the ledgers. Raises MetadataUnavailable, MetadataOutcomeUnknown; it is safe to apply again."""
    marks = UnderreplicationManager(store, layout, randomness=NoRandomness(), clock_ms=clock_ms)
    records = RecoveryRecords(store)
    marker = LedgerMarker(marks, records, leadership=None, clock_ms=clock_ms)
    await marks.prepare()
    done = Applied()
    for proposal in proposals:
        ledger_id = LedgerId(proposal.ledger_id)
        try:
            node = await store.get(layout.ledger(ledger_id))
            members = set(members_of(ledger_metadata_codec.decode(node.data)))
        except NoSuchNode:
            done.left[ledger_id] = "it was deleted"
            continue
        except (Corrupt, BadVersion) as error:
            done.left[ledger_id] = f"its metadata cannot be read: {error}"
            continue
        named = [BookieId(bookie) for bookie in proposal.bookies if bookie in members]
        if proposal.bookies and not named:
            done.left[ledger_id] = f"it no longer names {', '.join(proposal.bookies)}"
            continue
        is_new = await marker.mark(
            ledger_id,
            named,
            Reason(proposal.reason),
            missing_entries=proposal.missing_entries,
            missing_bytes=None,
            only_new=True,
        )
        (done.marked if is_new else done.already).append(ledger_id)
    if done.marked:
        text = f"an audit marked {len(done.marked)} ledgers"
        await records.append_history(
            HistoryEvent(clock_ms(), "marked", text, {"run_id": run_id, "ledgers": len(done.marked)})
        )
    return done


def apply_to(
    zookeeper: str, ledgers_root: str, proposals: Iterable[Proposal], *, run_id: str, clock_ms: Callable[[], int]
) -> Applied:
    """Like `apply`, for a caller without an event loop."""

    async def write() -> Applied:
        async with connected(zookeeper) as store:
            return await apply(store, LedgersLayout(ledgers_root), proposals, run_id=run_id, clock_ms=clock_ms)

    return asyncio.run(write())
