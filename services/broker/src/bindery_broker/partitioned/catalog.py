"""Which topics are partitioned, as the metadata store says.

Requests ask for a topic that is not loaded here; those of loaded topics never do. What was found is kept:

| found                | kept                                                                                        |
|----------------------|---------------------------------------------------------------------------------------------|
| a partitioned topic  | until its znode changes, which a watch reports                                              |
| no partitioned topic | for ABSENT_S seconds, because watches for names that do not exist would be without limit    |

A broker can thus regard a topic as not partitioned although another one has just created it. That does no harm: the
owner of its name reads the znode before it creates a topic, and before it answers that there is none.

While the store does not answer, what was found last is used. All writes are by compare-and-set. The number of
partitions only grows. Pulsar regards a record with 0 partitions as a topic that is not partitioned.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    BinderyError,
    Conflict,
    MetadataUnavailable,
    NoSuchNode,
    NoSuchTopic,
    VersionConflict,
)
from bindery_core.sources import MonotonicClock
from bindery_kit.observability.logs import get_logger
from bindery_metadata.layout.layout import BINDERY_ROOT
from bindery_metadata.stores.cached_children import CachedChildren
from bindery_metadata.stores.parents import make_path
from bindery_metadata.stores.store import Create, Delete, MetadataStore, Set
from bindery_metadata.stores.versioned import Versioned
from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import TopicIsPartitioned
from bindery_broker.partitioned.record import PartitionedRecord

DELETIONS_ROOT: Final = f"{BINDERY_ROOT}/partitioned-deletions"
"""Parent of empty nodes with the names of topics that are being deleted, written and removed with their records."""
ABSENT_S: Final = 5.0
"""Seconds for which it is remembered that a topic is not partitioned."""
KNOWN_MAX: Final = 10_000
"""Maximum number of topics that are remembered."""
READS_IN_FLIGHT_MAX: Final = 64
"""Maximum number of records that one list reads at once."""
ATTEMPTS_MAX: Final = 10
"""Maximum number of attempts to change a record that others change, too."""

log = get_logger(__name__)


class PartitionedTopics:
    def __init__(self, store: MetadataStore, *, now: MonotonicClock, partitions_max: int) -> None:
        """`partitions_max`: maximum number of partitions of a topic that is created or enlarged."""
        self.partitions_max = partitions_max
        self.on_removal: Callable[[TopicName], Awaitable[None]] = _nothing
        """Called before the record of a deleted topic is removed. It removes what others store about the topic."""
        self.admit_new: Callable[[TopicName, int], Awaitable[None]] | None = None
        """Called with a partitioned topic and a number of partitions before they are created. It raises an error if a
        limit forbids them."""
        self._store = store
        self._deletions = CachedChildren(store, lists_max=1)
        self._now = now
        self._known: OrderedDict[TopicName, PartitionedRecord] = OrderedDict()
        self._absent: OrderedDict[TopicName, float] = OrderedDict()
        """Topics that are not partitioned, and until when that is not read again; monotonic seconds."""
        self._turns: OrderedDict[TopicName, int] = OrderedDict()
        self._listeners: dict[TopicName, dict[Callable[[], None], None]] = {}

    async def find(self, name: TopicName) -> PartitionedRecord | None:
        """Return the record of a partitioned topic; None: it is not partitioned. Mostly without a read.

        Raises Corrupt, or MetadataUnavailable if it was never read.
        """
        if name.partition >= 0:
            return None
        known = self._known.get(name)
        if known is not None:
            return known
        until = self._absent.get(name)
        if until is not None and self._now() < until:
            return None
        try:
            return await self._look(name)
        except MetadataUnavailable:
            if until is None:
                raise
            return None

    async def find_now(self, name: TopicName) -> PartitionedRecord | None:
        """As `find`, but never from memory that a topic is not partitioned."""
        self._absent.pop(name, None)
        return await self.find(name)

    async def read(self, name: TopicName) -> Versioned[PartitionedRecord] | None:
        """Return the record as it is stored now, for a change of it."""
        path = _path(name)
        try:
            node = await self._store.get(path)
        except NoSuchNode:
            return None
        record = PartitionedRecord.decode(node.data, path=path)
        return Versioned(record, node.stat.version, node.stat.ctime_ms) if record.partitions else None

    async def list_names(self, tenant: str, namespace: str) -> list[TopicName]:
        """Return the partitioned topics of a namespace, sorted."""
        try:
            children = await self._store.children(znode_layout.partitioned_topics(tenant=tenant, namespace=namespace))
        except NoSuchNode:
            return []
        names = []
        for child in children:
            try:
                names.append(TopicName.of(tenant=tenant, namespace=namespace, local=znode_layout.decode_name(child)))
            except (BinderyError, UnicodeDecodeError):
                log.warning("odd_partitioned_topic_node", tenant=tenant, namespace=namespace, node=child)
        return sorted(names, key=lambda name: name.local)

    async def check_new(self, name: TopicName) -> None:
        """Raise an error if no topic of this name may be created: TopicIsPartitioned for the name of a partitioned
        topic, Conflict for a partition of one that is being deleted."""
        if name.partition < 0:
            if await self.read(name) is not None:
                self._absent.pop(name, None)
                raise TopicIsPartitioned("the topic is partitioned", topic=name.short)
            return
        whole = await self.read(name.partitioned_topic)
        if whole is not None and whole.value.is_deleted:
            raise Conflict("the partitioned topic is being deleted", topic=name.partitioned_topic.short)

    async def check_partition(self, name: TopicName) -> None:
        """Raise NoSuchTopic if `name` is not a partition of an existing partitioned topic, by its stored metadata."""
        whole = await self.read(name.partitioned_topic)
        if whole is None or whole.value.is_deleted or name.partition >= whole.value.partitions:
            raise NoSuchTopic("no such partition", topic=name.short)

    async def check_implicit(self, name: TopicName) -> None:
        """Raise NoSuchTopic if `name` is a partition that a partitioned topic does not have (yet).

        Such a topic is created only explicitly, because a larger topic would later get what is stored in it.
        """
        if name.partition < 0:
            return
        whole = await self.find(name.partitioned_topic)
        if whole is not None and not whole.is_deleted and name.partition >= whole.partitions:
            raise NoSuchTopic(
                "the partitioned topic has fewer partitions; PUT .../partitions adds some",
                topic=name.short,
                partitions=whole.partitions,
            )

    def next_turn(self, name: TopicName) -> int:
        """Return 0, 1, 2, ... for the requests to a topic, which are served by its partitions in turn."""
        turn = self._turns.pop(name, 0)
        self._turns[name] = turn + 1
        if len(self._turns) > KNOWN_MAX:
            self._turns.popitem(last=False)
        return turn

    # -- changes -------------------------------------------------------------------------------------------------

    async def create(self, name: TopicName, partitions: int, *, properties: Mapping[str, str] | None = None) -> bool:
        """Store the record of a new partitioned topic. Returns False if there is a record.

        Raises Conflict if there is an ordinary topic of this name, whose messages would be hidden.
        """
        if name.partition >= 0:
            raise BadRequest("a partition cannot be partitioned", topic=name.short)
        self.check_count(partitions)
        await self._check_not_ordinary(name)
        if self.admit_new is not None and await self.read(name) is None:
            await self.admit_new(name, partitions)
        path = _path(name)
        data = PartitionedRecord(partitions, members={"properties": dict(properties)} if properties else {}).encode()
        try:
            await self._store.create(path, data, make_parents=True)
        except AlreadyExists:
            stored = await self._store.get(path)
            if PartitionedRecord.decode(stored.data, path=path).partitions:
                return False
            await self._store.set(path, data, version=stored.stat.version)
        self.forget(name)
        try:
            await self._check_not_ordinary(name)  # its owner may have created it before it could see the record
        except Conflict:
            await self._store.delete(path, version=None)
            self.forget(name)
            raise
        log.info("partitioned_topic_created", topic=name.short, partitions=partitions)
        return True

    async def enlarge(self, name: TopicName, partitions: int) -> PartitionedRecord:
        """Store a larger number of partitions; a topic that has as many is unchanged. The partitions must exist.

        Raises Conflict for a smaller number, or if the topic is being deleted; NoSuchTopic.
        """

        def change(record: PartitionedRecord) -> PartitionedRecord:
            if record.is_deleted:
                raise Conflict("the topic is being deleted", topic=name.short)
            self.check_grows(name, record, partitions)
            return PartitionedRecord(partitions, members=record.members)

        record = await self._change(name, change)
        log.info("partitioned_topic_enlarged", topic=name.short, partitions=partitions)
        return record

    async def change_properties(
        self, name: TopicName, change: Callable[[Mapping[str, str]], Mapping[str, str]]
    ) -> None:
        """Store other properties of the topic. `change`: returns them from the present ones; called again after a
        conflict. Raises NoSuchTopic, Conflict if the topic is being deleted, and what `change` raises."""

        def changed(record: PartitionedRecord) -> PartitionedRecord:
            if record.is_deleted:
                raise Conflict("the topic is being deleted", topic=name.short)
            properties = dict(change(record.members.get("properties") or {}))
            return PartitionedRecord(record.partitions, members={**record.members, "properties": properties})

        await self._change(name, changed)

    async def mark_deleted(self, name: TopicName) -> PartitionedRecord:
        """Store the intent to delete the topic. It is not usable any more. Raises NoSuchTopic."""
        await make_path(self._store, DELETIONS_ROOT)
        path, node = _path(name), deletion_path(name)
        for _ in range(ATTEMPTS_MAX):
            stored = await self.read(name)
            if stored is None:
                raise NoSuchTopic("no such partitioned topic", topic=name.short)
            record = PartitionedRecord(stored.value.partitions, is_deleted=True, members=stored.value.members)
            is_noted = await self._store.exists(node) is not None
            if stored.value.is_deleted and is_noted:
                return record
            try:
                await self._store.multi(
                    [Set(path, record.encode(), stored.version), Set(node, b"", None) if is_noted else Create(node)]
                )
            except (VersionConflict, NoSuchNode, AlreadyExists):
                continue
            self.forget(name)
            return record
        raise Conflict("the metadata of the topic is being changed by others; retry", topic=name.short)

    async def deletions(self) -> list[TopicName]:
        """Return the topics whose deletion was begun and is not complete. Without a request if nothing changed."""
        try:
            nodes = await self._deletions.children(DELETIONS_ROOT)
        except NoSuchNode:
            return []
        names = []
        for node in nodes:
            try:
                names.append(TopicName.parse(znode_layout.decode_name(node)))
            except (BinderyError, UnicodeDecodeError):
                log.warning("odd_deletion_node", node=node)
        return names

    async def remove(self, name: TopicName) -> None:
        """Delete the record of a topic that is marked as deleted. A missing one, or one of a new topic, is no error."""
        stored = await self.read(name)
        if stored is None or not stored.value.is_deleted:
            return
        await self.on_removal(name)
        record, node = Delete(_path(name), stored.version), Delete(deletion_path(name), None)
        is_noted = await self._store.exists(node.path) is not None
        with suppress(NoSuchNode, VersionConflict):  # another broker has completed it
            await self._store.multi([record, node] if is_noted else [record])
        self.forget(name)
        log.info("partitioned_topic_deleted", topic=name.short, partitions=stored.value.partitions)

    async def drop_stale_deletion(self, name: TopicName) -> None:
        """Forget a deletion whose topic is not marked as deleted, for example because its namespace was deleted."""
        node = await self._store.exists(deletion_path(name))
        stored = await self.read(name)
        if node is not None and (stored is None or not stored.value.is_deleted):
            with suppress(NoSuchNode, VersionConflict):  # the version changes if the topic is deleted again
                await self._store.delete(deletion_path(name), version=node.version)

    def check_count(self, partitions: int) -> None:
        """Raise BadRequest for a number of partitions that no topic can have."""
        if not 1 <= partitions <= self.partitions_max:
            raise BadRequest(
                "not a number of partitions; BROKER_PARTITIONS_PER_TOPIC_MAX sets the maximum",
                partitions=partitions,
                partitions_min=1,
                partitions_max=self.partitions_max,
            )

    def check_grows(self, name: TopicName, record: PartitionedRecord, partitions: int) -> None:
        """Raise Conflict if the topic would lose partitions, and BadRequest if it would have too many."""
        if partitions < record.partitions:
            raise Conflict(
                "the number of partitions can only grow, because a partition that is removed would take its messages "
                "along",
                topic=name.short,
                partitions=record.partitions,
                wanted=partitions,
            )
        if partitions != record.partitions:
            self.check_count(partitions)

    async def counts(self, names: Iterable[TopicName]) -> dict[str, int]:
        """Return the numbers of partitions of those topics that are partitioned, by their short names."""
        found: dict[str, int] = {}
        left = list(dict.fromkeys(names))
        while left:
            some, left = left[:READS_IN_FLIGHT_MAX], left[READS_IN_FLIGHT_MAX:]
            records = await asyncio.gather(*(self.find(name) for name in some))
            found |= {
                name.short: record.partitions for name, record in zip(some, records, strict=True) if record is not None
            }
        return found

    async def _change(
        self, name: TopicName, change: Callable[[PartitionedRecord], PartitionedRecord]
    ) -> PartitionedRecord:
        for _ in range(ATTEMPTS_MAX):
            stored = await self.read(name)
            if stored is None:
                raise NoSuchTopic("no such partitioned topic", topic=name.short)
            changed = change(stored.value)
            if changed == stored.value:
                return changed
            try:
                await self._store.set(_path(name), changed.encode(), version=stored.version)
            except (VersionConflict, NoSuchNode):
                continue
            self.forget(name)
            return changed
        raise Conflict("the metadata of the topic is being changed by others; retry", topic=name.short)

    async def _check_not_ordinary(self, name: TopicName) -> None:
        path = znode_layout.managed_ledger(tenant=name.tenant, namespace=name.namespace, topic=name.local)
        if await self._store.exists(path) is not None:
            raise Conflict(
                "a topic of this name exists and is not partitioned; delete it, or choose another name",
                topic=name.short,
            )

    # -- memory --------------------------------------------------------------------------------------------------

    @contextmanager
    def watched(self, name: TopicName, changed: Callable[[], None]) -> Iterator[None]:
        """Call `changed` in the block when the record may have changed."""
        listeners = self._listeners.setdefault(name, {})
        listeners[changed] = None
        try:
            yield
        finally:
            del listeners[changed]
            if not listeners:
                self._listeners.pop(name, None)

    def forget(self, name: TopicName) -> None:
        """Read the record again when it is needed."""
        self._known.pop(name, None)
        self._absent.pop(name, None)
        for changed in list(self._listeners.get(name, ())):
            changed()

    async def _look(self, name: TopicName) -> PartitionedRecord | None:
        path = _path(name)
        has_changed = False

        def changed() -> None:
            nonlocal has_changed
            has_changed = True
            self.forget(name)

        try:
            node = await self._store.get(path, watch=changed)
        except NoSuchNode:
            self._absent[name] = self._now() + ABSENT_S
            self._absent.move_to_end(name)
            if len(self._absent) > KNOWN_MAX:
                self._absent.popitem(last=False)
            return None
        record = PartitionedRecord.decode(node.data, path=path)
        if not record.partitions:
            self._absent[name] = self._now() + ABSENT_S
            return None
        if has_changed:  # before its answer was read
            return record
        self._known[name] = record
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return record


def deletion_path(name: TopicName) -> str:
    """Return the node that says that the topic is being deleted."""
    return f"{DELETIONS_ROOT}/{znode_layout.encode_name(name.short)}"


async def _nothing(_name: TopicName) -> None:
    pass


def _path(name: TopicName) -> str:
    return znode_layout.partitioned_topic(tenant=name.tenant, namespace=name.namespace, topic=name.local)
