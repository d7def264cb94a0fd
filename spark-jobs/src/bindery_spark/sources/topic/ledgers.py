"""Find the ledgers of a topic and their last confirmed entries, from ZooKeeper and, for open ledgers, from bookies."""

import asyncio
import json
from typing import Final

from bindery_client.client import LedgerClient
from bindery_core.errors import Corrupt, NoSuchLedger, NoSuchNode, NoSuchTopic
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import LedgerId
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar import znode_layout
from bindery_pulsar.managed_ledger_codec import TopicInfo, decode_topic
from bindery_pulsar.managed_ledger_records import LedgerRecord
from bindery_pulsar.topic_name import TopicName

from bindery_spark.sources.topic.positions import Extent

READS_IN_FLIGHT: Final = 64
"""Maximum number of ledgers whose end is read at a time."""
ATTEMPTS_MAX: Final = 5
"""Maximum number of reads of a topic's metadata. It is read again if a ledger of the topic is missing, because
retention may have deleted the ledger."""


async def partitions_of(store: MetadataStore, topic: TopicName) -> list[TopicName]:
    """Return the topic itself, or its partitions if it is partitioned. Raises Corrupt, MetadataUnavailable."""
    if topic.partition >= 0:
        return [topic]
    path = znode_layout.partitioned_topic(tenant=topic.tenant, namespace=topic.namespace, topic=topic.local)
    try:
        data = (await store.get(path)).data
    except NoSuchNode:
        return [topic]
    try:
        count = int(json.loads(data)["partitions"])
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt("metadata of a partitioned topic cannot be read", topic=topic) from error
    return [topic.with_partition(index) for index in range(count)]


async def extents_of(
    store: MetadataStore, client: LedgerClient, topic: TopicName, *, skip_missing: bool = False
) -> list[Extent]:
    """Return the topic's ledgers in their order. An unused partition has none. `skip_missing`: omit missing ledgers
    that the topic names.

    Raises NoSuchTopic, NoSuchLedger, Corrupt, MetadataUnavailable, BookieUnavailable.
    """
    for attempt in range(1, ATTEMPTS_MAX + 1):
        extents: list[Extent] = []
        records = (await _info(store, topic)).ledgers
        try:
            for start in range(0, len(records), READS_IN_FLIGHT):
                part = records[start : start + READS_IN_FLIGHT]
                found = await asyncio.gather(*(_extent(client, record, skip_missing=skip_missing) for record in part))
                extents += (extent for extent in found if extent is not None)
        except NoSuchLedger:
            if attempt == ATTEMPTS_MAX:
                raise
        else:
            return extents
    raise AssertionError("the last attempt returns or raises")


async def _info(store: MetadataStore, topic: TopicName) -> TopicInfo:
    path = znode_layout.managed_ledger(tenant=topic.tenant, namespace=topic.namespace, topic=topic.local)
    try:
        return decode_topic((await store.get(path)).data)
    except NoSuchNode:
        if topic.partition >= 0:
            return TopicInfo()
        raise NoSuchTopic("no such topic; `bindery topics list` lists all topics", topic=topic.short) from None


async def _extent(client: LedgerClient, record: LedgerRecord, *, skip_missing: bool) -> Extent | None:
    ledger_id = LedgerId(record.ledger_id)
    try:
        found = await client.metadata_versioned(ledger_id)
        metadata = found.value
        is_closed = metadata.state is LedgerState.CLOSED
        last = metadata.last_entry_id if is_closed else await _confirmed(client, ledger_id, metadata.password or b"")
    except NoSuchLedger:
        if skip_missing:
            return None
        raise
    return Extent(
        ledger_id=record.ledger_id,
        last_entry=int(last),
        is_closed=is_closed,
        size=metadata.length if is_closed else 0,
        created_ms=metadata.ctime_ms or found.created_ms or 0,
        closed_ms=record.closed_ms,
    )


async def _confirmed(client: LedgerClient, ledger_id: LedgerId, password: bytes) -> int:
    """Return the last confirmed entry without fencing the ledger, also if the ledger was closed meanwhile."""
    handle = await client.open(ledger_id, password=password, recover=False)
    await handle.release()
    return handle.last_add_confirmed
