"""Fixtures of the tests of under-replication marks."""

import pytest
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore
from marks import manager_of


@pytest.fixture
async def manager(store: MetadataStore) -> UnderreplicationManager:
    manager = manager_of(store)
    await manager.prepare()
    return manager


@pytest.fixture
def others(other: MetadataStore) -> UnderreplicationManager:
    return manager_of(other, name="worker-2", seed=2)
