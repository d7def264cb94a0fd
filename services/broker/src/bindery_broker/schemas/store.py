"""Read and write the schemas of topics: a locator in ZooKeeper, and a ledger for each version.

| step of adding a version                           | after a crash                                              |
|----------------------------------------------------|------------------------------------------------------------|
| 1 create a ledger, write the record, close it      | the ledger is named nowhere                                |
| 2 compare-and-set the locator                      | the version exists                                         |

Two brokers that add a version at the same time read the same locator; the second one's step 2 fails, it deletes its
ledger and starts again from the locator. Records never change, so they are cached.
Source: Pulsar BookkeeperSchemaStorage, which does not close the ledgers; therefore they are opened with recovery.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import (
    AlreadyExists,
    BinderyError,
    Corrupt,
    MetadataOutcomeUnknown,
    NoSuchEntry,
    NoSuchLedger,
    NoSuchNode,
    VersionConflict,
)
from bindery_core.ids import EntryId, LedgerId
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import NoSuchSchema
from bindery_broker.managed_ledger import ManagedLedgerSettings
from bindery_broker.managed_ledger.topic_metadata import limited
from bindery_broker.schemas.codec import (
    IndexEntry,
    Locator,
    SchemaPosition,
    StoredSchema,
    decode_locator,
    decode_record,
    encode_locator,
    encode_record,
)

SCHEMAS_ROOT: Final = "/schemas"
CACHE_SIZE_MAX: Final = 4 * 2**20
"""Maximum bytes of cached definitions."""
RECORD_OVERHEAD: Final = 500
"""Bytes of a cached record besides its definition."""

log = get_logger(__name__)


def schema_id(topic: TopicName) -> str:
    """Return `T/N/<encTopic>`. The partitions of a topic share one schema."""
    base = topic.partitioned_topic
    return f"{base.tenant}/{base.namespace}/{base.encoded_local}"


class SchemaStore:
    def __init__(
        self, store: MetadataStore, client: LedgerClient, *, settings: ManagedLedgerSettings, clock: Callable[[], int]
    ) -> None:
        """`settings`: quorums of the ledgers, and the limit of each call. `clock`: wall time in ms."""
        self._store = store
        self._client = client
        self._settings = settings
        self._cache: OrderedDict[SchemaPosition, StoredSchema] = OrderedDict()
        self._cached_size = 0
        self.clock = clock

    async def locator(self, name: str) -> tuple[Locator | None, int | None]:
        """Return the versions of schema `name` and the version of the znode; (None, None): there is none.

        Raises Corrupt, MetadataUnavailable.
        """
        async with limited(self._settings.operation_timeout_s, "read the topic's schema versions"):
            try:
                node = await self._store.get(f"{SCHEMAS_ROOT}/{name}")
            except NoSuchNode:
                return None, None
        return decode_locator(node.data), node.stat.version

    async def read(self, name: str, entry: IndexEntry) -> StoredSchema:
        """Return a version. Raises NoSuchSchema if it was removed meanwhile, Corrupt if its record is lost or damaged,
        TryAgain if it cannot be read now."""
        cached = self._cache.get(entry.position)
        if cached is not None:
            self._cache.move_to_end(entry.position)
            return cached
        ledger_id, entry_id = entry.position
        facts = {"schema": name, "version": entry.version, "ledger_id": ledger_id}
        try:
            async with limited(self._settings.operation_timeout_s, "read a schema"):
                reader = await self._client.open(LedgerId(ledger_id), recover=True)
                try:
                    if entry_id > reader.last_add_confirmed:
                        raise NoSuchEntry("no such entry", entry_id=entry_id)
                    found = await reader.read(EntryId(entry_id), EntryId(entry_id))
                finally:
                    await reader.release()
            stored = decode_record(found[0].payload, version=entry.version)
        except (NoSuchLedger, NoSuchEntry, Corrupt) as error:
            if isinstance(error, NoSuchLedger) and not await self._is_named(f"{SCHEMAS_ROOT}/{name}", entry.position):
                raise NoSuchSchema("the schema version was removed", schema=name, version=entry.version) from error
            log.error("schema_damaged", **facts, error=str(error))
            raise Corrupt(
                "a schema of the topic is lost or damaged; delete the schema to begin again after this version",
                **facts,
                cause=str(error),
            ) from error
        self._keep(entry.position, stored)
        return stored

    async def append(
        self, name: str, stored: StoredSchema, locator: Locator | None, znode_version: int | None, *, only: bool = False
    ) -> bool:
        """Add a version after those of `locator`, which was read at `znode_version`. Returns False, with nothing
        added, if the versions have changed since.

        `only`: remove the versions before it from the locator. Raises OutcomeUnknown if the version may be added, and
        TryAgain if it is not.
        """
        before = () if locator is None else locator.index
        hashed = b"" if stored.is_deletion else stored.schema.hash
        position = await self._write_record(name, encode_record(name, stored, before))
        entry = IndexEntry(stored.version, position, hashed)
        data = encode_locator(Locator((*(() if only else before), entry)))
        try:
            added = await self._set(f"{SCHEMAS_ROOT}/{name}", data, znode_version, position)
        except MetadataOutcomeUnknown:
            raise  # the ledger may be in use
        except BinderyError:
            await self.delete_ledger(position.ledger_id)
            raise
        if not added:
            await self.delete_ledger(position.ledger_id)
            return False
        self._keep(position, stored)
        return True

    async def remove(self, name: str, locator: Locator, znode_version: int) -> bool:
        """Delete schema `name` with all versions, those of `locator`, which was read at `znode_version`. Returns False,
        with nothing deleted, if the versions have changed since."""
        async with limited(self._settings.operation_timeout_s, "delete the topic's schema versions"):
            try:
                await self._store.delete(f"{SCHEMAS_ROOT}/{name}", version=znode_version)
            except VersionConflict:
                return False
            except NoSuchNode:
                pass
        for entry in locator.index:
            await self.delete_ledger(entry.position.ledger_id)
        return True

    async def delete_ledger(self, ledger_id: int) -> None:
        """Delete the ledger of a version that no locator names. An error is only logged: the ledger is small."""
        try:
            async with limited(self._settings.operation_timeout_s, "delete a schema ledger"):
                await self._client.delete(LedgerId(ledger_id))
        except BinderyError as error:
            log.warning("schema_ledger_not_deleted", ledger_id=ledger_id, **error_fields(error))

    async def _write_record(self, name: str, record: bytes) -> SchemaPosition:
        settings = self._settings
        async with limited(settings.operation_timeout_s, "write a schema"):
            handle = await self._client.create(
                ensemble_size=settings.ensemble_size,
                write_quorum=settings.write_quorum,
                ack_quorum=settings.ack_quorum,
                custom={"application": b"pulsar", "component": b"schema", "pulsar/schemaId": name.encode()},
            )
            try:
                entry_id = await handle.add(record)
                await handle.close()
            except (BinderyError, asyncio.CancelledError):
                await handle.abandon()
                await self.delete_ledger(handle.ledger_id)
                raise
        return SchemaPosition(handle.ledger_id, entry_id)

    async def _set(self, path: str, data: bytes, version: int | None, position: SchemaPosition) -> bool:
        """Create or replace the locator. Returns False if its version is another one, or if it exists unexpectedly."""
        async with limited(self._settings.operation_timeout_s, "write the topic's schema versions"):
            try:
                if version is None:
                    await self._store.create(path, data, make_parents=True)
                else:
                    await self._store.set(path, data, version=version)
            except (AlreadyExists, VersionConflict, NoSuchNode):
                return False
            except MetadataOutcomeUnknown:
                return await self._is_named(path, position)
        return True

    async def _is_named(self, path: str, position: SchemaPosition) -> bool:
        """Return whether the locator has the version at `position`. Raises MetadataOutcomeUnknown if that cannot be
        determined now."""
        try:
            await self._store.sync(path)
            found = decode_locator((await self._store.get(path)).data)
        except NoSuchNode:
            return False
        except BinderyError as error:
            raise MetadataOutcomeUnknown("whether the schema is stored is not known", path=path) from error
        return any(entry.position == position for entry in found.index)

    def _keep(self, position: SchemaPosition, stored: StoredSchema) -> None:
        if position in self._cache:
            return
        self._cache[position] = stored
        self._cached_size += _size_of(stored)
        while self._cached_size > CACHE_SIZE_MAX and len(self._cache) > 1:
            self._cached_size -= _size_of(self._cache.popitem(last=False)[1])


def _size_of(stored: StoredSchema) -> int:
    properties = sum(len(key) + len(value) for key, value in stored.schema.properties.items())
    return RECORD_OVERHEAD + len(stored.schema.definition) + properties
