"""Read the cluster id, absent bookies, and verified and healed ledgers from ZooKeeper; write the results of a run."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from bindery_core.errors import NoSuchNode
from bindery_kit.observability import logs
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.verified_records import Verified, VerifiedRecords
from bindery_metadata.recovery.last_audits import LastAudit, LastAudits
from bindery_metadata.recovery.recovery_records import RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore
from bindery_recovery.cluster import bookie_watch

from bindery_spark.reading import zookeeper as zookeeper_connection

LOST_BOOKIE_DELAY_S: Final = 120
"""Lost-bookie delay in seconds if no auditor has written one."""


class NoRandomness:
    """Source of randomness that raises: marking without locks uses no randomness."""

    def getrandbits(self, bits: int, /) -> int:
        raise AssertionError("randomness is not used here")


@dataclass(frozen=True, slots=True)
class Facts:
    """State of the cluster when the run begins. Times in ms since 1970."""

    cluster_id: str
    lost_bookie_delay_ms: int = 0
    absent_since_ms: dict[str, int] = field(default_factory=dict)
    """Time by bookie, of bookies that the auditor has found absent."""
    healed: dict[int, int] = field(default_factory=dict)
    """Time of the last report by ledger, of ledgers that workers healed according to the recovery history."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Facts":
        return cls(**{**fields, "healed": {int(k): v for k, v in fields["healed"].items()}})


@asynccontextmanager
async def connected(zookeeper: str) -> AsyncIterator[MetadataStore]:
    """Connect to ZooKeeper. Raises MetadataUnavailable if no server answers."""
    logs.configure(service="audit", level="warning")
    store = await zookeeper_connection.connect(zookeeper)
    try:
        yield store
    finally:
        await store.close()


async def read_facts(store: MetadataStore, layout: LedgersLayout) -> Facts:
    """Read the facts. Raises NoSuchNode if there is no cluster."""
    try:
        cluster_id = (await store.get(layout.instance_id)).data.decode(errors="replace")
    except NoSuchNode:
        raise NoSuchNode(f"there is no cluster at {layout.root}. To create one, run `bindery cluster init`") from None
    marks = UnderreplicationManager(store, layout, randomness=NoRandomness(), clock_ms=lambda: 0)
    delay_s = await marks.lost_bookie_delay_s()
    records = RecoveryRecords(store)
    watched = await records.get_cursor(bookie_watch.CURSOR) or {}
    absent = {
        bookie: int(fields["since_ms"])
        for bookie, fields in watched.get("bookies", {}).items()
        if isinstance(fields, dict) and isinstance(fields.get("since_ms"), int)
    }
    healed: dict[int, int] = {}
    for event in await records.history():
        ledger_id = event.fields.get("ledger_id")
        if event.kind == "healed" and isinstance(ledger_id, int):
            healed[ledger_id] = max(event.at_ms, healed.get(ledger_id, 0))
    return Facts(cluster_id, 1000 * (LOST_BOOKIE_DELAY_S if delay_s is None else delay_s), absent, healed)


async def read_verified(store: MetadataStore) -> list[Verified]:
    """Return the records of verified ledgers."""
    return [record async for record in VerifiedRecords(store).list()]


def facts_of(zookeeper: str, ledgers_root: str) -> tuple[Facts, list[Verified]]:
    """Read facts and verified records, for a caller without an event loop."""

    async def read() -> tuple[Facts, list[Verified]]:
        async with connected(zookeeper) as store:
            return await read_facts(store, LedgersLayout(ledgers_root)), await read_verified(store)

    return asyncio.run(read())


def write_verified(zookeeper: str, records: Sequence[Verified], gone: Collection[int]) -> None:
    """Write verified records and delete those of `gone`, for a caller without an event loop."""

    async def write() -> None:
        async with connected(zookeeper) as store:
            await VerifiedRecords(store).put_all(records, gone=gone)

    asyncio.run(write())


def write_last(zookeeper: str, audit: LastAudit) -> None:
    """Write the record of the last audit, for a caller without an event loop."""

    async def write() -> None:
        async with connected(zookeeper) as store:
            await LastAudits(store).put(audit)

    asyncio.run(write())
