"""Check what roles may do. The HTTP API calls `check` before an operation looks at anything that exists.

A call that waits (a receive, a stream) is checked again when the permissions of its tenant change, and while ZooKeeper
does not confirm permissions. If it is not allowed any more, it is ended (`Waiting`).
"""

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from bindery_core.errors import Forbidden, MetadataUnavailable, TooManyRequests
from bindery_core.sources import MonotonicClock
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar.topic_name import TopicName

from bindery_broker.access.decision import (
    Decision,
    Need,
    Rule,
    Rules,
    decide_by_permissions,
    decide_by_settings,
    decide_by_tenant,
)
from bindery_broker.access.records import AccessRecords, ListReads
from bindery_broker.access.requirements import requirement
from bindery_broker.keyed_locks import KeyedLocks
from bindery_broker.namespaces.permissions import Action, Permissions

INCLUDES_DERIVED: Final = frozenset((Rule.SUPER_USER, Rule.TENANT_ADMIN, Rule.NAMESPACE))
"""Rules by which a role that may consume from a topic may also use the retry and dead-letter topics of its
subscriptions. They hold in the whole namespace. A permission of a single topic does not include those topics, because
the names of different topics and subscriptions can have the same retry topic."""
RECHECK_S: Final = 2.0
"""Seconds between checks of the waiting calls while ZooKeeper does not confirm the permissions."""
ALLOWED_MAX: Final = 8_192
"""Maximum number of remembered requests that are allowed."""
ALLOWED_KEY_SIZE_MAX: Final = 512
"""Maximum bytes of the path of a remembered request."""
LISTS_MAX: Final = 4
"""Maximum number of filtered lists at a time, each of which may read very many records from ZooKeeper."""
LIST_WAIT_S: Final = 5.0
"""Maximum seconds that a list waits for others, then TooManyRequests."""
_NEEDS: Final = {Action.PRODUCE: Need.PRODUCE, Action.CONSUME: Need.CONSUME}
_WHAT: Final = {
    Need.LOOKUP: "use the topic",
    Need.PRODUCE: "produce to the topic",
    Need.CONSUME: "consume from the topic",
    Need.NAMESPACE_USE: "use the namespace",
    Need.NAMESPACE_CONSUME: "consume from the namespace",
    Need.TENANT_ADMIN: "administer the tenant",
    Need.SUPER_USER: "do this: it requires a super-user",
}


class Target(NamedTuple):
    """What an operation is about."""

    tenant: str | None = None
    namespace: str | None = None
    topic: TopicName | None = None
    subscription: str | None = None

    def __str__(self) -> str:
        if self.topic is not None:
            return self.topic.short
        return "/".join(filter(None, (self.tenant, self.namespace)))


@dataclass(slots=True, eq=False)
class Waiting:
    """A call in progress that may wait. While it does, it ends when its roles lose their permission."""

    access: "Access"
    roles: Sequence[str | None]
    need: Need
    target: Target
    since: int
    """`AccessRecords.changes` before the call was checked."""
    task: "asyncio.Task[object]"
    also: Callable[[], Awaitable[None]] | None = field(default=None)
    """Another check that the call requires while it waits; raises Forbidden. None: there is none."""
    error: Forbidden | MetadataUnavailable | None = field(default=None)
    """Why the call was ended; None: it was not."""
    release: Callable[[], None] | None = field(default=None)
    """Ends that records are followed for the call; None: it does not wait yet, or not any more."""

    def begin(self) -> None:
        """The call waits from now on. Idempotent. Its task is cancelled when it is not allowed any more.

        The call is checked again if permissions have changed since its check.
        """
        if self.release is None:
            self.release = self.access.begin_waiting(self)

    def end(self) -> None:
        """The call is over."""
        self.also = None  # it refers to the request, which refers to this: no cyclic garbage
        if self.release is not None:
            release, self.release = self.release, None
            release()
            self.access.end_waiting(self)


class Access:
    """Belongs to one event loop."""

    def __init__(self, store: MetadataStore, rules: Rules, *, now: MonotonicClock) -> None:
        self.rules = rules
        self.records = AccessRecords(store, now=now)
        self.records.on_change = self._changed
        self._waiting: dict[str, set[Waiting]] = {}
        """By tenant."""
        self._allowed: set[tuple[object, ...]] = set()
        """Keys of requests that are allowed by the records as they were at `_allowed_at`."""
        self._allowed_at = 0
        self._checks: set[asyncio.Task[None]] = set()
        self._outage: asyncio.Task[None] | None = None
        self._lists = asyncio.Semaphore(LISTS_MAX)
        self._lists_of: KeyedLocks[Sequence[str | None]] = KeyedLocks()
        """By roles, each of which may have one list in progress: one client must not delay the lists of all others."""

    def is_remembered(self, key: tuple[object, ...]) -> bool:
        """Return whether the request with this key is allowed, as `remember` was told, and no record has changed since.

        Clients repeat their requests, and each would need several decisions.
        """
        if self._allowed_at != self.records.changes:
            self._allowed.clear()
            self._allowed_at = self.records.changes
        return key in self._allowed

    def remember(self, key: tuple[object, ...], *, since: int) -> None:
        """A request with this key is allowed. `since`: `records.changes` before that was decided.

        The key must determine the roles, the operation and its target. While ZooKeeper does not confirm some records,
        nothing is remembered: they are valid for a limited time.
        """
        if since != self.records.changes or self.records.has_stale or self.is_remembered(key):
            return
        if len(self._allowed) >= ALLOWED_MAX:
            self._allowed.clear()
        self._allowed.add(key)

    async def check(self, roles: Sequence[str | None], operation: str, target: Target) -> None:
        """Raise Forbidden unless all `roles` may do the operation, MetadataUnavailable if that cannot be decided.

        `roles`: that of the client, and that of the proxy if it passed the request on; None: the client has no role.
        """
        await self.check_need(roles, requirement(operation), target)

    async def check_need(self, roles: Sequence[str | None], need: Need, target: Target) -> None:
        """Raise as `check`."""
        for role in roles:
            if not (await self.decide(role, need, target)).is_allowed:
                raise refusal(role, need, target)

    async def may(
        self, roles: Sequence[str | None], need: Need, target: Target, *, reads: ListReads | None = None
    ) -> bool:
        """Return whether all `roles` have what is needed. `reads`: see AccessRecords. Raises MetadataUnavailable."""
        for role in roles:
            if not (await self.decide(role, need, target, reads=reads)).is_allowed:
                return False
        return True

    async def check_derived(self, roles: Sequence[str | None], target: Target, *derived: TopicName) -> None:
        """Raise Forbidden unless all `roles` may use topics that belong to the subscription of `target` by their names.

        A role needs consume on the topic and the subscription by one of the rules INCLUDES_DERIVED, or produce and
        consume on each of `derived`.
        """
        for role in roles:
            lacking = await self._lacking(role, target, derived)
            if lacking is not None:
                raise _refusal_of_derived(role, lacking)

    async def may_use_derived(self, roles: Sequence[str | None], target: Target, *derived: TopicName) -> bool:
        """Return whether `check_derived` allows it. Raises MetadataUnavailable."""
        for role in roles:
            if await self._lacking(role, target, derived) is not None:
                return False
        return True

    async def _lacking(self, role: str | None, target: Target, derived: Sequence[TopicName]) -> TopicName | None:
        """Return the first of the topics that the role may not use; None: it may use all."""
        own = await self.decide(role, Need.CONSUME, target)
        if own.is_allowed and own.rule in INCLUDES_DERIVED:
            return None
        for name in derived:
            there = Target(name.tenant, name.namespace, name)
            for need in (Need.CONSUME, Need.PRODUCE):
                if not own.is_allowed or not (await self.decide(role, need, there)).is_allowed:
                    return name
        return None

    async def decide(self, role: str | None, need: Need, target: Target, *, reads: ListReads | None = None) -> Decision:
        """Return the decision for one role. Raises MetadataUnavailable, BadRequest for a name that nothing can have."""
        found = self._decide_now(role, need, target)
        if found is not None:
            return found
        assert role is not None
        assert target.tenant is not None, need
        found = decide_by_tenant(role, need, await self.records.admins(target.tenant, reads=reads))
        if found is not None:
            return found
        assert target.namespace is not None, need
        permissions = await self.records.permissions(target.tenant, target.namespace, reads=reads)
        return self._decide_by(permissions, role, need, target)

    def _decide_now(self, role: str | None, need: Need, target: Target) -> Decision | None:
        """Return the decision if the records that it needs are in memory; None: one has to be read."""
        found = decide_by_settings(role, need, self.rules)
        if found is not None:
            return found
        assert role is not None
        assert target.tenant is not None, need
        admins = self.records.known_admins(target.tenant)
        if admins is None or (found := decide_by_tenant(role, need, admins)) is not None:
            return found
        assert target.namespace is not None, need
        permissions = self.records.known_permissions(target.tenant, target.namespace)
        return None if permissions is None else self._decide_by(permissions, role, need, target)

    def _decide_by(self, permissions: Permissions, role: str, need: Need, target: Target) -> Decision:
        topic = None if need in (Need.NAMESPACE_USE, Need.NAMESPACE_CONSUME) else target.topic
        return decide_by_permissions(role, need, permissions, self.rules, topic=topic, subscription=target.subscription)

    def is_super_user(self, roles: Sequence[str | None]) -> bool:
        return all(role in self.rules.super_users for role in roles)

    @contextlib.asynccontextmanager
    async def listing(self, roles: tuple[str | None, ...]) -> AsyncIterator[None]:
        """The block filters a list. Raises TooManyRequests if others do for too long."""
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(LIST_WAIT_S):
                    await turn.enter_async_context(self._lists_of.hold(roles))
                    await turn.enter_async_context(self._lists)
            except TimeoutError:
                raise TooManyRequests(
                    "too many lists are being filtered by permissions; retry, or list one namespace or tenant",
                    lists_max=LISTS_MAX,
                ) from None
            yield

    def waiting(self, roles: Sequence[str | None], operation: str, target: Target, *, since: int) -> Waiting:
        """Return a call of the current task that was allowed and may wait. Its `end` must be called.

        `since`: `records.changes` before the call was checked. If the task is cancelled, `Waiting.error` tells whether
        a lost permission is the reason.
        """
        task = asyncio.current_task()
        assert task is not None
        return Waiting(self, roles, requirement(operation), target, since, task)

    def begin_waiting(self, one: Waiting) -> Callable[[], None]:
        """For `Waiting.begin`. Returns a function that ends that the records are followed."""
        tenant = one.target.tenant
        self._waiting.setdefault(tenant or "", set()).add(one)
        release = self.records.hold(tenant, one.target.namespace) if tenant else _nothing
        if self.records.changes != one.since:
            self._start(self._check_one(one))
        if self._outage is None:
            self._outage = asyncio.create_task(self._check_in_outages(), name="permissions-in-outages")
        return release

    def end_waiting(self, one: Waiting) -> None:
        """For `Waiting.end`."""
        tenant = one.target.tenant or ""
        same = self._waiting.get(tenant, set())
        same.discard(one)
        if not same:
            self._waiting.pop(tenant, None)

    async def close(self) -> None:
        """End all checks of waiting calls, and all watching."""
        tasks = [*self._checks, *([] if self._outage is None else [self._outage])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.records.close()

    def _changed(self, tenant: str) -> None:
        if tenant in self._waiting:
            self._start(self._check_waiting(tenant))

    def _start(self, check: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(check)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check_waiting(self, tenant: str) -> None:
        for one in list(self._waiting.get(tenant, ())):
            await self._check_one(one)

    async def _check_one(self, one: Waiting) -> None:
        if one.error is not None:
            return
        try:
            await self.check_need(one.roles, one.need, one.target)
            if one.also is not None:
                await one.also()
        except (Forbidden, MetadataUnavailable) as error:
            if one.error is None and one in self._waiting.get(one.target.tenant or "", ()):
                one.error = error
                one.task.cancel()

    async def _check_in_outages(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_S)
            if self.records.has_stale:
                for tenant in list(self._waiting):
                    await self._check_waiting(tenant)


def refusal(role: str | None, need: Need, target: Target) -> Forbidden:
    """Return the error for a role. It does not depend on what exists."""
    what = _WHAT[need]
    if role is None:
        return Forbidden(f"the request has no role, so it may not {what}; send credentials", requires=need.value)
    facts: Mapping[str, str] = {"role": role, "requires": need.value}
    name = str(target)
    if name:
        facts = {**facts, "resource": name}
    if need is Need.SUPER_USER:
        advice = "ask an operator of the cluster"
    elif need is Need.TENANT_ADMIN:
        advice = "ask an administrator of the tenant"
    else:
        advice = "an administrator of the tenant can grant it: `bindery permissions grant`"
    return Forbidden(f"the role may not {what}; {advice}", **facts)


def _refusal_of_derived(role: str | None, derived: TopicName) -> Forbidden:
    """Return the error for a role that has a permission of the topic only."""
    if role is None:
        return Forbidden("the request has no role; send credentials", requires=Need.CONSUME.value)
    command = f"bindery permissions grant {shlex.quote(derived.short)} --role {shlex.quote(role)}"
    return Forbidden(
        "the role may not use the retry or dead-letter topic of the subscription, because it has the permission of a "
        f"single topic; an administrator of the tenant can grant it: `{command} --action produce --action consume`",
        role=role,
        requires="produce and consume on the topic",
        resource=derived.short,
    )


def _nothing() -> None:
    pass


def need_of(action: Action) -> Need:
    """Return what an action on a topic requires."""
    return _NEEDS[action]


__all__ = ["Access", "Decision", "Rule", "Rules", "Target", "Waiting", "need_of", "refusal"]
