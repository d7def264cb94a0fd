"""The schemas of topics: register, look up, compare and delete them.

Any broker may run each operation: the compare-and-set in `store` orders them. If a version cannot be read, everything
that needs it fails: a new schema is refused, because it cannot be compared. Messages do not depend on schemas and flow
on.

Invariants: a version number names one definition as long as the topic exists, also after a deletion of its schema. A
version that was added was
compatible, by the strategy of that moment, with the versions that existed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from bindery_core.errors import Conflict, TooLarge, TryAgain
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import IncompatibleSchema, NoSuchSchema, NotSupported
from bindery_broker.namespaces.policies import SchemaCompatibility
from bindery_broker.schemas.codec import IndexEntry, Locator, Schema, SchemaType, StoredSchema
from bindery_broker.schemas.compatibility import check_valid, incompatibility, is_same, is_transitive
from bindery_broker.schemas.store import SchemaStore, schema_id

DEFINITION_SIZE_MAX: Final = 128 * 2**10
"""Maximum bytes of a definition."""
PROPERTIES_SIZE_MAX: Final = 16 * 2**10
"""Maximum bytes of the properties of a schema, as UTF-8."""
VERSIONS_MAX: Final = 1_000
"""Maximum number of versions that a topic keeps. Each has about 60 bytes in the topic's locator."""
ATTEMPTS_MAX: Final = 32
"""Maximum number of attempts to add a version while other brokers add versions to the same topic."""


class Registered(NamedTuple):
    version: int
    created: bool
    """Whether this call added the version."""


class Comparison(NamedTuple):
    version: int | None
    """The version that has the same definition; None: there is none."""
    problem: str | None
    """Why the schema may not be added; None: it is compatible."""


class SchemaRegistry:
    def __init__(self, store: SchemaStore) -> None:
        self._store = store
        self.check_new: Callable[[TopicName], Awaitable[None]] = _nothing
        """Called before and after a version is added. It raises an error if the topic must have no schema; a version
        that was added meanwhile is removed."""

    async def newest(self, topic: TopicName) -> StoredSchema:
        """Return the newest version. Raises NoSuchSchema, Corrupt, TryAgain."""
        live = await self._live(topic)
        if not live:
            raise NoSuchSchema("the topic has no schema", topic=topic.short)
        return await self._store.read(schema_id(topic), live[-1])

    async def get(self, topic: TopicName, version: int) -> StoredSchema:
        """Return a version that was not deleted. Raises NoSuchSchema, Corrupt, TryAgain."""
        for entry in await self._live(topic):
            if entry.version == version:
                return await self._store.read(schema_id(topic), entry)
        raise NoSuchSchema("the topic has no such schema version", topic=topic.short, version=version)

    async def locator(self, topic: TopicName) -> Locator | None:
        """Return the index of all versions, with those that were deleted; None: the topic never had a schema."""
        return (await self._store.locator(schema_id(topic)))[0]

    async def versions(self, topic: TopicName) -> list[int]:
        """Return the versions that were not deleted, ascending; none if the topic has no schema."""
        return [entry.version for entry in await self._live(topic)]

    async def register(
        self, topic: TopicName, schema: Schema, *, strategy: SchemaCompatibility, may_add: bool = True
    ) -> Registered:
        """Return the version of `schema`, and add it if the topic has no such version, durably.

        `may_add=False`: refuse a new version if the topic has a schema, as for a producer of a namespace that does not
        update schemas automatically. Raises InvalidSchema, IncompatibleSchema, TooLarge, NotSupported, Conflict at the
        maximum number of versions, Corrupt if an existing version cannot be read, TryAgain, OutcomeUnknown, and what
        `check_new` raises.
        """
        await self._check(schema)
        name = schema_id(topic)
        for _ in range(ATTEMPTS_MAX):
            locator, znode_version = await self._store.locator(name)
            live = () if locator is None else locator.live
            try:
                found = await self._compare(name, live, schema, strategy)
            except NoSuchSchema:  # removed since the locator was read
                continue
            if found.version is not None:
                return Registered(found.version, created=False)
            if live and not may_add:
                raise IncompatibleSchema("the namespace does not let producers add schemas", topic=topic.short)
            if found.problem is not None:
                raise IncompatibleSchema(
                    f"the schema is not compatible: {found.problem}", topic=topic.short, strategy=strategy.value
                )
            if locator is not None and len(locator.index) >= VERSIONS_MAX:
                raise Conflict(
                    "the topic has the maximum number of schema versions; delete its schema with force=true",
                    topic=topic.short,
                    max=VERSIONS_MAX,
                )
            await self.check_new(topic)
            version = 0 if locator is None else locator.newest.version + 1
            stored = StoredSchema(version, schema, self._store.clock())
            if await self._store.append(name, stored, locator, znode_version):
                await self._check_added(topic)
                return Registered(version, created=True)
        raise _too_busy(topic)

    async def _check_added(self, topic: TopicName) -> None:
        """Check the topic again, because it may have been deleted meanwhile. Then its schema is removed."""
        try:
            await self.check_new(topic)
        except Conflict:
            await self.remove(topic.partitioned_topic)
            raise

    async def compare(self, topic: TopicName, schema: Schema, *, strategy: SchemaCompatibility) -> Comparison:
        """Return what `register` would decide. Raises InvalidSchema, TooLarge, NotSupported, Corrupt, TryAgain."""
        await self._check(schema)
        return await self._compare(schema_id(topic), await self._live(topic), schema, strategy)

    async def delete(self, topic: TopicName, *, force: bool = False) -> int:
        """Delete all versions, durably: later ones continue the numbering. Returns the number of the deletion.

        Needs no version to be readable. `force`: also delete the stored definitions, of versions deleted before, too.
        Raises NoSuchSchema if there is nothing to delete.
        """
        name = schema_id(topic)
        for _ in range(ATTEMPTS_MAX):
            locator, znode_version = await self._store.locator(name)
            if locator is None or (not locator.live and not (force and len(locator.index) > 1)):
                raise NoSuchSchema("the topic has no schema", topic=topic.short)
            version = locator.newest.version + 1
            stored = StoredSchema(version, Schema(SchemaType.NONE), self._store.clock(), is_deletion=True)
            if await self._store.append(name, stored, locator, znode_version, only=force):
                if force:
                    for entry in locator.index:
                        await self._store.delete_ledger(entry.position.ledger_id)
                return version
        raise _too_busy(topic)

    async def remove(self, topic: TopicName) -> None:
        """Delete the schema of a topic that is deleted, with its numbering, because no message names a version then.

        A partition shares the schema of its topic, which stays. A missing schema is no error. Raises Corrupt, TryAgain.
        """
        if topic.partition >= 0:
            return
        name = schema_id(topic)
        for _ in range(ATTEMPTS_MAX):
            locator, znode_version = await self._store.locator(name)
            if locator is None or znode_version is None or await self._store.remove(name, locator, znode_version):
                return
        raise _too_busy(topic)

    async def _live(self, topic: TopicName) -> tuple[IndexEntry, ...]:
        locator, _ = await self._store.locator(schema_id(topic))
        return () if locator is None else locator.live

    async def _check(self, schema: Schema) -> None:
        if len(schema.definition) > DEFINITION_SIZE_MAX:
            raise TooLarge("the definition is too large", size=len(schema.definition), size_max=DEFINITION_SIZE_MAX)
        size = sum(len(key.encode()) + len(value.encode()) for key, value in schema.properties.items())
        if size > PROPERTIES_SIZE_MAX:
            raise TooLarge("the properties of the schema are too large", size=size, size_max=PROPERTIES_SIZE_MAX)
        if schema.type is SchemaType.KEY_VALUE:
            raise NotSupported("schemas of the type KEY_VALUE cannot be uploaded here", type=schema.type.name)
        await asyncio.to_thread(check_valid, schema)

    async def _compare(
        self, name: str, live: tuple[IndexEntry, ...], schema: Schema, strategy: SchemaCompatibility
    ) -> Comparison:
        """Compare `schema` with the versions `live`, of which one at a time is in memory."""
        for entry in reversed(live):
            if is_same((await self._store.read(name, entry)).schema, schema):
                return Comparison(entry.version, None)
        if strategy is not SchemaCompatibility.ALWAYS_COMPATIBLE:
            for entry in reversed(live if is_transitive(strategy) else live[-1:]):
                older = (await self._store.read(name, entry)).schema
                problem = await asyncio.to_thread(incompatibility, schema, older, strategy)
                if problem is not None:
                    return Comparison(None, f"version {entry.version}: {problem}")
        return Comparison(None, None)


async def _nothing(_topic: TopicName) -> None:
    pass


def _too_busy(topic: TopicName) -> TryAgain:
    return TryAgain("other brokers change the schema of the topic all the time; retry", topic=topic.short)
