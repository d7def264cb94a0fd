"""Check the role of a request before its operation runs, and what it may see in lists.

The role is that of `scope["state"]["principal"]`, which the authentication in front of the broker sets. A request that
another broker or a proxy passed on has two roles, which must both be allowed. Without `authorization.enabled` nothing
is checked.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Final, TypeVar

from bindery_core.errors import BadRequest, BinderyError, Forbidden, NoSuchTopic, TooLarge
from bindery_pulsar.topic_name import TopicName
from starlette.responses import Response

from bindery_broker.access.access import ALLOWED_KEY_SIZE_MAX, Access, Target
from bindery_broker.access.decision import Need, has_permission_of_a_topic
from bindery_broker.access.requirements import requirement
from bindery_broker.errors import NoSuchTenant
from bindery_broker.http.exchange import PARTITION_HEADER, Answered, Exchange, Reply
from bindery_broker.http.paths import topic_of
from bindery_broker.namespaces.names import Page
from bindery_broker.retries.names import retry_topic

WAITING: Final = frozenset(("receive", "stream"))
"""Operations that may wait for long, which end when their role loses its permission."""
PAGE_SIZE: Final = 1_000
"""Number of names that a list for a role with few permissions reads at a time."""
PAGES_MAX: Final = 20
"""Maximum number of such reads for one request."""
_CREATES_PART: Final = "createTopic"
_RETRIES: Final = "retries"
"""Beginning of the key with which it is remembered that a request may use a retry topic. No operation has this id."""
T = TypeVar("T")


def roles_of(exchange: Exchange) -> tuple[str | None, ...]:
    """Return the roles of the request: one, or that of the client and that of the proxy that passed it on."""
    principal = exchange.principal
    if principal is None:
        return (None,)
    if principal.original_role is not None:
        return (principal.original_role, principal.role)
    return (principal.role,)


def target_of(exchange: Exchange) -> Target:
    """Return what the path names. Raises BadRequest, TooLarge for names that nothing can have."""
    params = exchange.scope.get("path_params") or {}
    tenant, namespace = params.get("tenant"), params.get("namespace")
    local = params.get("topic", params.get("local"))
    topic = None
    if local is not None and tenant is not None and namespace is not None:
        topic = topic_of(tenant, namespace, local)
    subscription = params.get("subscription") or (params.get("name") if topic is None else None)
    return Target(tenant, namespace, topic, subscription)


async def run_allowed(exchange: Exchange, run: Callable[[], Awaitable[Response]]) -> Response:
    """Return the answer of the operation if the request may have it. Raises Forbidden, MetadataUnavailable, and
    LimitExceeded by the limits of the tenant and the namespace in its path.

    These count only requests that a permission allows, so that nobody else uses up the rates of a tenant. A waiting
    operation ends when the permission is lost: with 403, or with the end of a stream that has begun.
    """
    access = exchange.broker.access
    if access is None:
        await exchange.charge_resource()
        return await run()
    roles, since = roles_of(exchange), access.records.changes
    await _check(exchange, access, roles, since=since)
    if exchange.operation not in WAITING:
        if exchange.allowance is not None and requirement(exchange.operation) is not Need.ANYONE:
            await exchange.charge_resource()
        return await run()
    waiting = exchange.waiting = access.waiting(roles, exchange.operation, target_of(exchange), since=since)
    try:
        if exchange.allowance is not None:
            waiting.begin()
            await exchange.charge_resource()
        response = await run()
        if not isinstance(response, Reply):  # it may take as long as the client reads
            waiting.begin()
            await response(exchange.scope, exchange.receive, exchange.answer)
            response = Answered()
        if waiting.error is not None:
            await asyncio.sleep(0)  # the task is cancelled here, and not where the answer is sent
        return response
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if waiting.error is None or task is None or task.uncancel() > 0:
            raise
    finally:
        waiting.end()
        exchange.waiting = None
    if not exchange.is_answered:
        raise waiting.error
    await exchange.send_chunk(b"", more=False)
    return Answered()


async def check_topic(exchange: Exchange, need: Need, topic: TopicName, *, subscription: str | None = None) -> None:
    """Raise Forbidden unless the request may also use another topic than that in its path."""
    access = exchange.broker.access
    if access is not None:
        await access.check_need(roles_of(exchange), need, target_for(topic, subscription=subscription))


async def check_derived(exchange: Exchange, subscription: str, *derived: TopicName) -> None:
    """Raise Forbidden unless the request may use the retry or dead-letter topics of a subscription of its topic."""
    access = exchange.broker.access
    if access is not None:
        await access.check_derived(roles_of(exchange), _of_subscription(exchange, subscription), *derived)


async def may_use_derived(exchange: Exchange, subscription: str, *derived: TopicName) -> bool:
    """Return whether `check_derived` allows it. If the request waits, it ends when that is not allowed any more."""
    access = exchange.broker.access
    if access is None:
        return True
    roles, target = roles_of(exchange), _of_subscription(exchange, subscription)
    if not await access.may_use_derived(roles, target, *derived):
        return False
    if exchange.waiting is not None:
        exchange.waiting.also = partial(access.check_derived, roles, target, *derived)
    return True


async def may_use_retries(exchange: Exchange) -> bool:
    """Return whether the request may use the retry topic of the subscription in its path. True if it can have none.

    If the request waits, it ends when that is not allowed any more.
    """
    access = exchange.broker.access
    if access is None:
        return True
    roles, since = roles_of(exchange), access.records.changes
    key = _key_of(exchange, _RETRIES, roles)
    if key is not None and access.is_remembered(key):
        if exchange.waiting is not None:
            exchange.waiting.also = partial(_check_retries, exchange)
        return True
    name = _retry_topic(exchange)
    if name is None:
        return True
    if not await may_use_derived(exchange, exchange.path_params["subscription"], name):
        return False
    if key is not None:
        access.remember(key, since=since)
    return True


async def _check_retries(exchange: Exchange) -> None:
    name = _retry_topic(exchange)
    if name is not None:
        await check_derived(exchange, exchange.path_params["subscription"], name)


def _retry_topic(exchange: Exchange) -> TopicName | None:
    """Return the retry topic of the subscription in the path; None: it can have none."""
    try:
        return retry_topic(exchange.topic, exchange.path_params["subscription"])
    except BinderyError:
        return None


async def visible_page(
    exchange: Exchange,
    fetch: Callable[[str | None, int], Awaitable[Page]],
    visible: Callable[[Exchange, Sequence[str]], Awaitable[list[str]]],
    *,
    after: str | None,
    limit: int,
) -> Page:
    """Return up to `limit` of the names after `after` that the request may see.

    `fetch`: reads names after a name; `visible`: returns those of them that the request may see. `next` of the page is
    a name in it, because one that the request may not see would reveal what exists. Raises TooLarge if the request may
    see less than `limit` of very many names, TooManyRequests if too many lists are in progress.
    """
    if is_unlimited(exchange):
        return await fetch(after, limit)
    found: list[str] = []
    async with listing(exchange):
        for _ in range(PAGES_MAX):
            page = await fetch(after, PAGE_SIZE)
            found += await visible(exchange, page.names)
            if len(found) > limit:
                return Page(found[:limit], found[limit - 1])
            if page.next is None:
                return Page(found, None)
            after = page.next
    raise TooLarge("the role may see too few of very many names; list those of one namespace or tenant instead")


@contextlib.asynccontextmanager
async def listing(exchange: Exchange) -> AsyncIterator[None]:
    """The block filters a list of many names. Raises TooManyRequests if too many such lists are in progress."""
    access = exchange.broker.access
    async with contextlib.nullcontext() if access is None else access.listing(roles_of(exchange)):
        yield


async def visible_topics(exchange: Exchange, names: Sequence[str]) -> list[str]:
    """Return those of the topics, in their short form, that the request may use."""
    found: list[str] = []
    access, roles, reads = exchange.broker.access, roles_of(exchange), exchange.list_reads
    for space, some in groupby(names, key=_space_of):
        if await may_see_namespace(exchange, space):
            for name in some:
                target = target_for(TopicName.parse(name))
                if access is None or await access.may(roles, Need.LOOKUP, target, reads=reads):
                    found.append(name)
    return found


async def visible_namespaces(exchange: Exchange, names: Sequence[str]) -> list[str]:
    """Return those of the namespaces, as `tenant/namespace`, that the request may use."""
    return [name for name in names if await may_see_namespace(exchange, name)]


async def visible_tenants(exchange: Exchange, names: Sequence[str]) -> list[str]:
    """Return those of the tenants that the request may administer, or that have a namespace that it may use."""
    found = []
    for name in names:
        is_visible = await may_administer(exchange, name)
        if not is_visible:
            with contextlib.suppress(NoSuchTenant):
                for namespace in await exchange.broker.directory.namespaces(name):
                    if await may_see_namespace(exchange, f"{name}/{namespace}"):
                        is_visible = True
                        break
        if is_visible:
            found.append(name)
    return found


async def visible_subscriptions(exchange: Exchange, topic: TopicName, names: Iterable[str]) -> list[str]:
    """Return those of the subscriptions of a topic that the request may use."""
    access = exchange.broker.access
    if access is None:
        return list(names)
    roles = roles_of(exchange)
    return [name for name in names if await access.may(roles, Need.CONSUME, target_for(topic, subscription=name))]


async def of_visible_subscriptions(exchange: Exchange, topic: TopicName, values: Mapping[str, T]) -> dict[str, T]:
    """Return what belongs to those of the subscriptions of a topic that the request may use. `values`: by name."""
    return {name: values[name] for name in await visible_subscriptions(exchange, topic, values)}


def is_unlimited(exchange: Exchange) -> bool:
    """Return whether the request may see everything."""
    access = exchange.broker.access
    return access is None or access.is_super_user(roles_of(exchange))


async def may_see_namespace(exchange: Exchange, name: str) -> bool:
    """Return whether the request may use the namespace `tenant/namespace`, or one of its topics, or administer it."""
    access = exchange.broker.access
    if access is None:
        return True
    tenant, _, namespace = name.partition("/")
    target = Target(tenant, namespace)
    for role in roles_of(exchange):
        if role is None:
            return False
        if (await access.decide(role, Need.NAMESPACE_USE, target, reads=exchange.list_reads)).is_allowed:
            continue
        permissions = await access.records.permissions(tenant, namespace, reads=exchange.list_reads)
        if not has_permission_of_a_topic(role, permissions, access.rules):
            return False
    return True


async def may_administer(exchange: Exchange, tenant: str) -> bool:
    access = exchange.broker.access
    if access is None:
        return True
    return await access.may(roles_of(exchange), Need.TENANT_ADMIN, Target(tenant), reads=exchange.list_reads)


def target_for(topic: TopicName, *, subscription: str | None = None) -> Target:
    return Target(topic.tenant, topic.namespace, topic, subscription)


def _of_subscription(exchange: Exchange, subscription: str) -> Target:
    """Return the subscription of the topic in the path, also if the request is one for the owner of another topic."""
    topic = target_of(exchange).topic
    return target_for(exchange.topic if topic is None else topic, subscription=subscription)


def _space_of(name: str) -> str:
    return name.rpartition("/")[0]


async def _check(exchange: Exchange, access: Access, roles: tuple[str | None, ...], *, since: int) -> None:
    """Raise Forbidden unless the request may run. `since`: `AccessRecords.changes` now."""
    key = _key_of(exchange, exchange.operation, roles)
    if key is not None and access.is_remembered(key):
        return
    target = target_of(exchange)
    try:
        await access.check(roles, exchange.operation, target)
    except Forbidden:
        if not await _creates_part(exchange, access, roles, target):
            raise
        return
    if key is not None:
        access.remember(key, since=since)


def _key_of(exchange: Exchange, what: str, roles: tuple[str | None, ...]) -> tuple[object, ...] | None:
    """Return a key for `Access.remember`; None: the path is too long. The operation and the path determine the target
    of the request."""
    raw_path = exchange.raw_path
    return (what, raw_path, roles) if len(raw_path) <= ALLOWED_KEY_SIZE_MAX else None


async def _creates_part(exchange: Exchange, access: Access, roles: tuple[str | None, ...], target: Target) -> bool:
    """Return whether the request creates a partition of an existing topic, for a role that may use it.

    The broker makes such a request when it creates a topic for the first message. The role could as well send the
    message to the partition, which would create it.
    """
    topic = target.topic
    if exchange.operation != _CREATES_PART or not exchange.header(PARTITION_HEADER):
        return False
    if topic is None or topic.partition < 0 or not await access.may(roles, Need.LOOKUP, target):
        return False
    try:
        await exchange.broker.partitioned.check_partition(topic)
    except (NoSuchTopic, BadRequest):
        return False
    return True
