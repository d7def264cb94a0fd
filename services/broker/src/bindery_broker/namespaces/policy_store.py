"""Keep the policies of the namespaces in use in memory, and change policies in the metadata store.

| znode                           | read                                        | watched                            |
|---------------------------------|---------------------------------------------|------------------------------------|
| /admin/policies/T/N             | before the first topic of the namespace     | while a topic of it is followed,   |
|                                 | opens, and for each check of its existence  | and NAMESPACES_IDLE_MAX others     |
| children of                     | with it: the names of topics that have      | the same                           |
| /bindery/topic-policies/T/N     | policies of their own                       |                                    |
| /bindery/topic-policies/T/N/<t> | before the topic opens, if it has policies  | while the topic or one of its      |
|                                 |                                             | partitions is followed             |

So a topic without policies of its own, as nearly all are, costs no request and no watch.

Invariants: `effective` answers from memory; the policies of a followed topic are those that were read last; a change
through this store is in force when the call returns, a change by another process when its watch has fired. If a znode
cannot be decoded, the values that were read before stay in force (at first: those of the next level), the path is in
`unreadable`, and the error is logged. Policies never keep a topic from opening, unless the metadata store is away.

Pulsar stores the policies of topics in the system topic `__change_events` of the namespace instead, which must be read
before any topic of the namespace can open; the JSON is the same (TopicPolicies).
"""

import asyncio
import contextlib
import copy
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from bindery_core.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    NoSuchTopic,
    VersionConflict,
)
from bindery_metadata.layout.layout import BINDERY_ROOT
from bindery_metadata.stores.followers import Followers
from bindery_metadata.stores.parents import prune_empty_parents
from bindery_metadata.stores.store import MetadataStore, Node, Watch
from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import NoSuchNamespace
from bindery_broker.namespaces import records
from bindery_broker.namespaces.permissions import without_topic
from bindery_broker.namespaces.policies import DEFAULTS, EffectivePolicies
from bindery_broker.namespaces.policy_codec import PolicySet, set_in_namespace, set_in_topic
from bindery_broker.namespaces.records import Json
from bindery_broker.namespaces.resolution import Resolved, effective, explain

TOPIC_POLICIES_ROOT: Final = f"{BINDERY_ROOT}/topic-policies"
NAMESPACES_IDLE_MAX: Final = 100
"""Maximum number of watched namespaces without a followed topic."""
READ_WAIT_S: Final = 10.0
"""Maximum seconds to wait for the first read of a namespace's policies."""
ATTEMPTS_MAX: Final = 20
"""Maximum number of compare-and-set attempts of one change."""

Mutate = Callable[[Json], Json]
"""Return the changed record. May change its argument, which is a copy. Is called again after a conflict."""


@dataclass(slots=True)
class _TopicLevel:
    policies: PolicySet = field(default_factory=dict)
    was_read: asyncio.Event = field(default_factory=asyncio.Event)
    stop: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Namespace:
    tenant: str
    name: str
    effective: EffectivePolicies
    """In force for topics without policies of their own."""
    record: Json | None = None
    """Policies JSON; None: the znode does not exist."""
    policies: PolicySet = field(default_factory=dict)
    was_read: asyncio.Event = field(default_factory=asyncio.Event)
    names_were_read: asyncio.Event = field(default_factory=asyncio.Event)
    with_policies: frozenset[str] = frozenset()
    """Encoded local names of the topics with policies of their own."""
    topics: dict[str, _TopicLevel] = field(default_factory=dict)
    """By encoded local name: those of `with_policies` that are followed."""
    users: dict[str, set[TopicName]] = field(default_factory=dict)
    """Followed topics, by the encoded local name of their partitioned topic."""
    stops: list[Callable[[], None]] = field(default_factory=list)
    waits: int = 0
    """Number of calls that wait for the first read."""


class PolicyStore:
    """A PolicySource. It belongs to one event loop."""

    def __init__(self, store: MetadataStore, *, cluster: str, defaults: EffectivePolicies = DEFAULTS) -> None:
        """`cluster`: name of the cluster, by which Pulsar stores rates. `defaults`: the broker's level."""
        self.cluster = cluster
        self.defaults = defaults
        self.unreadable: set[str] = set()
        """Paths of watched znodes that cannot be decoded at present."""
        self.check_topic: Callable[[TopicName], Awaitable[None]] = _nothing
        """Called after policies of a topic were stored. They are removed again if it raises NoSuchTopic or Conflict."""
        self.on_stored: Callable[[str, Json], None] = _ignore
        """Called with the path and the Policies of a namespace after they were changed through this store."""
        self._store = store
        self._followers = Followers()
        self._namespaces: dict[tuple[str, str], _Namespace] = {}
        """The least recently used one first, among those without a followed topic."""
        self._effective: dict[TopicName, EffectivePolicies] = {}
        """By followed topic."""
        self._listeners: list[Callable[[TopicName], None]] = []

    # -- what is in force ----------------------------------------------------------------------------------------

    def effective(self, name: TopicName) -> EffectivePolicies:
        found = self._effective.get(name)
        if found is not None:
            return found
        space = self._namespaces.get((name.tenant, name.namespace))
        return self.defaults if space is None else self._resolve(space, name)

    def explain(self, name: TopicName) -> dict[str, Resolved]:
        """Return each policy in force for a topic with its source. Its namespace must be watched: see `follow`."""
        space = self._namespaces.get((name.tenant, name.namespace))
        if space is None:
            return explain(self.defaults, {}, {})
        return explain(self.defaults, space.policies, _topic_level(space, name))

    async def resolve(self, name: TopicName) -> dict[str, Resolved]:
        """Return each policy in force for a topic, also of one that is not followed or of another broker, with its
        source. Raises MetadataUnavailable, Corrupt."""
        space = self._watched(name.tenant, name.namespace)
        await _read_once(space.was_read, space)
        return explain(self.defaults, space.policies, set_in_topic(await self.read_topic(name)))

    def on_change(self, listener: Callable[[TopicName], None]) -> None:
        """Call `listener` after the policies in force for a followed topic have changed."""
        self._listeners.append(listener)

    async def follow(self, name: TopicName) -> None:
        """Read the policies of a topic, and follow their changes until `forget`. Raises MetadataUnavailable.

        Must be undone by `forget` also if it raises.
        """
        space = self._watched(name.tenant, name.namespace)
        key = name.partitioned_topic.encoded_local
        space.users.setdefault(key, set()).add(name)
        await _read_once(space.was_read, space)
        await _read_once(space.names_were_read, space)
        if key in space.with_policies:
            await _read_once(self._follow_topic(space, key).was_read, space)
        self._effective[name] = self._resolve(space, name)

    def forget(self, name: TopicName) -> None:
        """End following a topic, for example because it was closed. Idempotent."""
        self._effective.pop(name, None)
        space = self._namespaces.get((name.tenant, name.namespace))
        key = name.partitioned_topic.encoded_local
        if space is None or key not in space.users:
            return
        space.users[key].discard(name)
        if not space.users[key]:
            del space.users[key]
            level = space.topics.pop(key, None)
            if level is not None:
                level.stop()
                self.unreadable.discard(f"{_topics_path(space.tenant, space.name)}/{key}")
        self._drop_idle()

    async def namespace(self, tenant: str, namespace: str) -> Json | None:
        """Return the Policies of a namespace; None: it does not exist. The caller must not change them.

        From memory if the namespace exists. Otherwise they are read again, because it may have just been created.
        Raises MetadataUnavailable.
        """
        space = self._watched(tenant, namespace)
        await _read_once(space.was_read, space)
        if space.record is None or records.is_deleted(space.record):
            try:
                self._apply(space, await self.read_namespace(tenant, namespace))
            except NoSuchNamespace:
                self._apply(space, None)
            except Corrupt:  # reported by the task that watches it
                return space.record or {}
        return space.record

    # -- changes -------------------------------------------------------------------------------------------------

    async def read_namespace(self, tenant: str, namespace: str) -> Json:
        """Return the Policies as stored now. Raises NoSuchNamespace, Corrupt."""
        path = znode_layout.namespace_policies(tenant=tenant, namespace=namespace)
        try:
            return records.decode((await self._store.get(path)).data, path=path)
        except NoSuchNode as error:
            raise NoSuchNamespace.of(tenant, namespace) from error

    async def update_namespace(self, tenant: str, namespace: str, mutate: Mutate) -> Json:
        """Change the Policies of a namespace by compare-and-set. Return them as stored.

        Raises NoSuchNamespace, Corrupt if the stored ones or those that `mutate` returned cannot be read, and what
        `mutate` raises; nothing was changed then.
        """
        path = znode_layout.namespace_policies(tenant=tenant, namespace=namespace)
        for _ in range(ATTEMPTS_MAX):
            try:
                node = await self._store.get(path)
            except NoSuchNode as error:
                raise NoSuchNamespace.of(tenant, namespace) from error
            before = records.decode(node.data, path=path)
            changed = mutate(copy.deepcopy(before))
            set_in_namespace(changed, cluster=self.cluster)
            try:
                if changed != before:
                    await self._store.set(path, records.encode(changed), version=node.stat.version)
            except (VersionConflict, NoSuchNode):
                continue
            except MetadataOutcomeUnknown:
                await self._store.sync(path)
                continue
            space = self._namespaces.get((tenant, namespace))
            if space is not None:
                self._apply(space, changed)
            self.on_stored(path, changed)
            return changed
        raise MetadataUnavailable("the policies of the namespace keep changing", path=path, attempts=ATTEMPTS_MAX)

    async def read_topic(self, name: TopicName) -> Json:
        """Return the TopicPolicies of a topic, or of the topic that it is a partition of. Raises Corrupt."""
        path = topic_policies_path(name)
        try:
            return records.decode((await self._store.get(path)).data, path=path)
        except NoSuchNode:
            return {}

    async def update_topic(self, name: TopicName, mutate: Mutate) -> Json:
        """Change the TopicPolicies of a topic, or of the topic that it is a partition of, by compare-and-set. Return
        them as stored. An empty record is not stored. Raises the errors of `update_namespace`, but NoSuchNamespace, and
        those of `check_topic`."""
        path = topic_policies_path(name)
        for _ in range(ATTEMPTS_MAX):
            node = None
            with contextlib.suppress(NoSuchNode):
                node = await self._store.get(path)
            before = {} if node is None else records.decode(node.data, path=path)
            changed = mutate(copy.deepcopy(before))
            policies = set_in_topic(changed)
            try:
                await self._store_topic(path, node, changed, before)
            except (AlreadyExists, NoSuchNode, VersionConflict):
                continue
            except MetadataOutcomeUnknown:
                await self._store.sync(path)
                continue
            if changed:
                await self._check_kept(name.partitioned_topic)
            space = self._namespaces.get((name.tenant, name.namespace))
            if space is not None:
                self._apply_topic(space, name.partitioned_topic.encoded_local, policies)
            return changed
        raise MetadataUnavailable("the policies of the topic keep changing", path=path, attempts=ATTEMPTS_MAX)

    async def _check_kept(self, name: TopicName) -> None:
        """Remove policies that were stored while their topic was deleted, and raise the error of `check_topic`."""
        try:
            await self.check_topic(name)
        except (NoSuchTopic, Conflict):
            await self.remove_topic(name)
            raise

    async def remove_topic(self, name: TopicName) -> None:
        """Remove the policies of a topic that is deleted. A partition has none of its own."""
        if name.partition >= 0:
            return
        await self._remove_permissions(name)
        try:
            await self._store.delete(topic_policies_path(name), version=None)
        except NoSuchNode:
            return
        await prune_empty_parents(self._store, topic_policies_path(name), up_to=TOPIC_POLICIES_ROOT)

    async def _remove_permissions(self, name: TopicName) -> None:
        """Remove the permissions of a topic and its partitions, so that a new topic of this name does not have them.

        What is in memory may lack a permission that another broker has just granted, so the record is read again. Only
        a record with such permissions is written, because each write costs work for all topics of the namespace.
        """
        try:
            await self._store.sync(znode_layout.namespace_policies(tenant=name.tenant, namespace=name.namespace))
            stored = await self.read_namespace(name.tenant, name.namespace)
            if without_topic(stored, name.full) is not stored:
                await self.update_namespace(name.tenant, name.namespace, lambda found: without_topic(found, name.full))
        except (NoSuchNamespace, Corrupt):  # there is nothing that could grant anything
            return

    async def close(self) -> None:
        """End all watching. What is in memory stays."""
        await self._followers.close()

    # -- watching ------------------------------------------------------------------------------------------------

    async def _store_topic(self, path: str, node: Node | None, changed: Json, before: Json) -> None:
        if node is None:
            if changed:
                await self._store.create(path, records.encode(changed), make_parents=True)
        elif not changed:
            await self._store.delete(path, version=node.stat.version)
        elif changed != before:
            await self._store.set(path, records.encode(changed), version=node.stat.version)

    def _watched(self, tenant: str, namespace: str) -> _Namespace:
        key = (tenant, namespace)
        space = self._namespaces.pop(key, None)
        if space is not None:
            self._namespaces[key] = space  # most recently used
            return space
        path = znode_layout.namespace_policies(tenant=tenant, namespace=namespace)
        space = self._namespaces[key] = _Namespace(tenant, namespace, self.defaults)

        async def look(changed: Watch) -> None:
            try:
                node = await _get(self._store, path, changed)
                self._apply(space, None if node is None else records.decode(node.data, path=path))
            except Corrupt:
                self.unreadable.add(path)
                if space.record is None:
                    space.record = {}  # the namespace exists
                space.was_read.set()
                raise

        async def look_at_names(changed: Watch) -> None:
            self._apply_names(space, await _children(self._store, _topics_path(tenant, namespace), changed))

        space.stops = [
            self._followers.follow("namespace_policies", look, path=path),
            self._followers.follow("topic_policies", look_at_names, path=_topics_path(tenant, namespace)),
        ]
        self._drop_idle()
        return space

    def _follow_topic(self, space: _Namespace, key: str) -> _TopicLevel:
        if key in space.topics:
            return space.topics[key]
        path = f"{_topics_path(space.tenant, space.name)}/{key}"
        level = space.topics[key] = _TopicLevel()

        async def look(changed: Watch) -> None:
            try:
                node = await _get(self._store, path, changed)
                policies = {} if node is None else set_in_topic(records.decode(node.data, path=path))
            except Corrupt:
                self.unreadable.add(path)
                level.was_read.set()
                raise
            if space.topics.get(key) is level:
                self.unreadable.discard(path)
                self._apply_topic(space, key, policies)

        level.stop = self._followers.follow("topic_policies", look, path=path)
        return level

    def _drop_idle(self) -> None:
        idle = [key for key, space in self._namespaces.items() if not space.users and not space.waits]
        for key in idle[: max(0, len(idle) - NAMESPACES_IDLE_MAX)]:
            space = self._namespaces.pop(key)
            for stop in space.stops:
                stop()
            self.unreadable.discard(znode_layout.namespace_policies(tenant=space.tenant, namespace=space.name))

    def _apply(self, space: _Namespace, record: Json | None) -> None:
        policies = {} if record is None else set_in_namespace(record, cluster=self.cluster)
        space.record = record
        space.policies = policies
        space.effective = effective(self.defaults, policies, {})
        self.unreadable.discard(znode_layout.namespace_policies(tenant=space.tenant, namespace=space.name))
        space.was_read.set()
        for names in list(space.users.values()):
            self._changed(space, names)

    def _apply_names(self, space: _Namespace, names: list[str]) -> None:
        space.with_policies = frozenset(names)
        space.names_were_read.set()
        for key in space.with_policies & space.users.keys():
            self._follow_topic(space, key)

    def _apply_topic(self, space: _Namespace, key: str, policies: PolicySet) -> None:
        if key not in space.users:
            return
        level = space.topics.get(key)
        if level is None:
            level = self._follow_topic(space, key)
        level.policies = policies
        level.was_read.set()
        self._changed(space, space.users[key])

    def _changed(self, space: _Namespace, names: set[TopicName]) -> None:
        for name in list(names):
            before = self._effective.get(name)
            if before is None:
                continue  # `follow` still reads
            after = self._effective[name] = self._resolve(space, name)
            if after != before:
                for listener in self._listeners:
                    listener(name)

    def _resolve(self, space: _Namespace, name: TopicName) -> EffectivePolicies:
        own = _topic_level(space, name)
        return effective(self.defaults, space.policies, own) if own else space.effective


def topic_policies_path(name: TopicName) -> str:
    """Return the znode with the policies of a topic; those of a partition are those of its partitioned topic."""
    return f"{_topics_path(name.tenant, name.namespace)}/{name.partitioned_topic.encoded_local}"


def _topics_path(tenant: str, namespace: str) -> str:
    return f"{TOPIC_POLICIES_ROOT}/{tenant}/{namespace}"


def _topic_level(space: _Namespace, name: TopicName) -> PolicySet:
    if not space.topics:
        return {}
    level = space.topics.get(name.partitioned_topic.encoded_local)
    return {} if level is None else level.policies


def _ignore(_path: str, _policies: Json) -> None:
    pass


async def _nothing(_topic: TopicName) -> None:
    pass


async def _read_once(was_read: asyncio.Event, space: _Namespace) -> None:
    if was_read.is_set():
        return
    space.waits += 1
    try:
        async with asyncio.timeout(READ_WAIT_S):
            await was_read.wait()
    except TimeoutError:
        raise MetadataUnavailable(
            "the policies of the namespace could not be read", namespace=f"{space.tenant}/{space.name}"
        ) from None
    finally:
        space.waits -= 1


async def _get(store: MetadataStore, path: str, watch: Watch) -> Node | None:
    """Return the node, or None, with a watch of its next change or of its creation."""
    while True:
        try:
            return await store.get(path, watch=watch)
        except NoSuchNode:
            if await store.exists(path, watch=watch) is None:
                return None


async def _children(store: MetadataStore, path: str, watch: Watch) -> list[str]:
    """Return the children, [] if the node is missing, with a watch of their next change or of the node's creation."""
    while True:
        try:
            return await store.children(path, watch=watch)
        except NoSuchNode:
            if await store.exists(path, watch=watch) is None:
                return []
