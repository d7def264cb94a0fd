"""The context gives its parts once the bookie has them."""

import random
from typing import Any

import pytest
from bindery_bookie.admin.context import AdminContext
from bindery_bookie.state import BookieState
from bindery_bookie.storage.io.disk import RealDisk
from bindery_core.errors import MetadataUnavailable
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_kit.observability.health import Health
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree


def context(store: Any, **fields: Any) -> AdminContext:
    return AdminContext(
        bookie_id="b0",
        store=store,
        state=BookieState(),
        health=Health(),
        settings=dict,
        is_open=lambda: True,
        disk=RealDisk(),
        layout=LedgersLayout(),
        randomness=random.Random(1),
        **{"metadata": lambda: None, **fields},
    )


async def test_parts_that_the_bookie_does_not_have_are_errors(memory_store: Any) -> None:
    made = context(memory_store)
    with pytest.raises(MetadataUnavailable, match="the bookie has no connection to the metadata store yet"):
        made.metadata_store()
    with pytest.raises(MetadataUnavailable, match="the bookie has no connection to the metadata store yet"):
        made.ledger_manager()
    with pytest.raises(MetadataUnavailable, match="this bookie has no access to the recovery of the cluster"):
        await made.recovery_admin()
    with pytest.raises(MetadataUnavailable, match="this bookie has no ledger client"):
        await made.client()
    assert made.repair() is None
    assert made.shards() == made.directories() == ()


async def test_parts_that_the_bookie_has_are_returned(memory_store: Any) -> None:
    metadata = MemoryTree().connect()
    await initialize_cluster(metadata, LedgersLayout(), randomness=random.Random(1))
    client, recovery = object(), object()

    async def connected() -> Any:
        return client

    async def recovering() -> Any:
        return recovery

    made = context(memory_store, metadata=lambda: metadata, ledger_client=connected, recovery=recovering)
    assert made.metadata_store() is metadata
    assert await made.client() is client
    assert await made.recovery_admin() is recovery
    segments = (Segment(EntryId(0), (BookieId("b0"),)),)
    created = LedgerMetadata(ensemble_size=1, write_quorum=1, ack_quorum=1, segments=segments)
    ledger_id, _ = await made.ledger_manager().create(created)
    assert (await made.ledger_manager().read(ledger_id)).value.segments == segments
