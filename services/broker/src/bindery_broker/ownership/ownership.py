"""Determine which broker serves a topic. A broker owns a namespace bundle through an ephemeral node.

A broker that gets a request for an unowned bundle asks the broker with the least load to take it (`Assigner`), and
takes it itself if that does not. Creating the node decides, so that there is one owner whatever brokers choose. The
record is Pulsar's, with a mark of ours:

    {"nativeUrl": "", "nativeUrlTls": "", "httpUrl": "http://10.0.0.7:8080", "httpUrlTls": "", "disabled": false,
     "advertisedListeners": {}, "bindery": true}

A bundle may belong to a broker of Apache Pulsar. Then `locate` raises OwnedByPulsar, because that broker does not serve
the requests of this one.

| step of an unload                        | what others see      | if this broker dies                              |
|------------------------------------------|----------------------|--------------------------------------------------|
| `is_mine` is false; `disabled` is stored | the owner changes    | the node ends with the session                   |
| what waits is ended, operations finish   | the owner changes    | the same; the next owner recovers the ledgers    |
| topics are closed                        | the owner changes    | the same                                         |
| a hold is created (see `holds`)          | the owner changes    | both nodes end with the session                  |
| the node is deleted                      | no owner, but a hold | the hold ends with the session                   |
| in a hand-over, the next owner is asked  | the next owner       | nothing is left to lose but the hold             |
| to take the bundle; the hold ends        |                      |                                                  |

From the first step on, requests for the topics wait in this broker or in the one that would pass them on (`running`).

| step of a split                          | what others see      | if this broker dies                              |
|------------------------------------------|----------------------|--------------------------------------------------|
| nodes of the parts are created           | the bundle, ours     | all nodes end with the session; the bundle stays |
| the new boundaries are stored            | the parts, ours      | all nodes end; the parts have no owner           |
| the node of the bundle is deleted        | the parts, ours      | the same                                         |

The topics stay open during a split: this broker owns them at each moment, first by the bundle, then by a part.

A step that fails after the first one is logged and the next one follows, so that no bundle stays half unloaded. A topic
that cannot be closed is abandoned: the next owner fences it.

If the session ends, the node is lost and the bundle's topics are closed at once. Safety does not depend on this: a
broker that has not detected the loss is fenced by the new owner's recovery of the ledger and by the znode's version.
Source: Pulsar NamespaceEphemeralData, OwnershipCache.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import msgspec
from bindery_core.errors import BinderyError, Corrupt, MetadataOutcomeUnknown
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.coordination.leases import Lease, Leases
from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import NotOwner, OwnedByPulsar
from bindery_broker.keyed_locks import KeyedLocks
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.divisions import Divisions
from bindery_broker.ownership.holds import Holds, release_surely
from bindery_broker.ownership.listeners import Listeners, listeners_of
from bindery_broker.ownership.records import OwnerRecord, broker_id, http_url_of

ATTEMPTS_MAX = 3
"""Maximum number of attempts in one call to take a bundle that has no owner when it is read."""
REMOTE_REMEMBERED_MAX = 10_000
"""Maximum number of bundles whose remote owner is cached."""
CHANGE_WAIT_S = 5.0
"""Maximum seconds that one task waits for another owner of a bundle. Callers wait less, or ask again."""
PREDECESSOR_WAIT_S = 10.0
"""Maximum seconds to wait until the session of an earlier process at the same address ends and its node is removed."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteOwner:
    """Another broker that serves a bundle."""

    http_url: str
    native_url: str = field(default="", compare=False)
    """Address of a Pulsar broker for Pulsar's clients; empty for a broker of Bindery."""
    is_pulsar: bool = False
    listeners: Listeners = field(default_factory=dict, compare=False)
    """Its addresses for clients in other networks."""


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What an unload found."""

    bundle: Bundle
    owner: str | None
    """Address of the broker that owned the bundle; None: no broker did, and nothing was done."""


class Assigner(Protocol):
    """Gives bundles without owner to brokers."""

    def is_elsewhere(self, bundle: Bundle) -> bool:
        """Return whether another broker should take the bundle. Does not wait, and changes nothing."""
        ...

    async def assign(self, bundle: Bundle) -> None:
        """Ask other brokers to take the bundle, the best one first. If none does, this broker is to take it. Raises
        nothing, and ends in bounded time."""
        ...


class Ownership:
    def __init__(
        self, leases: Leases, *, record: OwnerRecord, on_lost: Callable[[Bundle], None], divisions: Divisions
    ) -> None:
        """`on_lost` is called in the loop when this broker loses a bundle, but not when it releases the bundle."""
        self.divisions = divisions
        self._leases = leases
        record = msgspec.structs.replace(record, bindery=True)
        self._record = msgspec.json.encode(record)
        self._disabled = msgspec.json.encode(msgspec.structs.replace(record, disabled=True))
        self._http_url = record.url
        self._on_lost = on_lost
        self._held: dict[Bundle, Lease] = {}
        self._remote: dict[Bundle, RemoteOwner] = {}
        self._locks: KeyedLocks[Bundle] = KeyedLocks()
        self._leaving: dict[Bundle, float] = {}
        """Bundles that are being unloaded, with the seconds for which they are held then."""
        self._awaited: dict[tuple[Bundle, str], asyncio.Task[None]] = {}
        """Tasks that wait until a bundle has another owner than the broker at a URL."""
        self._heirs: WeakKeyDictionary[Lease, dict[Bundle, Lease]] = WeakKeyDictionary()
        """By the lease of a bundle that was split: the leases of its parts."""
        self._holds = Holds(leases, broker=broker_id(record.url))
        self.assigner: Assigner | None = None
        """None: this broker takes each bundle without owner for which it is asked."""
        self._assigning: dict[Bundle, asyncio.Task[None]] = {}
        self._closing = False

    @property
    def held(self) -> list[Bundle]:
        return [bundle for bundle, lease in self._held.items() if lease.is_held]

    def is_mine(self, bundle: Bundle) -> bool:
        """Return whether this broker owns the bundle, as far as it knows. Its state may be outdated; see `proof`."""
        lease = self._held.get(bundle)
        return lease is not None and lease.is_held and bundle not in self._leaving

    def leaving_s(self, topic: TopicName) -> float | None:
        """Return the seconds for which the topic's bundle is held after its unload, which is in progress; None: the
        bundle is not being unloaded."""
        return self._leaving.get(self.divisions.known(topic)) if self._leaving else None

    def proof(self, topic: TopicName) -> Callable[[], Awaitable[bool]] | None:
        """Return a function that checks whether this broker has owned the topic without interruption since this call:
        its bundle, and after a split the part that the topic is in.

        Returns None if this broker does not own the bundle. The function reads the metadata store and raises
        MetadataUnavailable if the store does not answer.
        """
        bundle = self.divisions.known(topic)
        first = self._held.get(bundle)
        if first is None or not self.is_mine(bundle):
            return None

        async def is_owned(lease: Lease = first) -> bool:
            while not await lease.verify():
                parts = self._heirs.get(lease)
                if parts is None:
                    return False
                lease = next(heir for part, heir in parts.items() if part.contains(topic))
            return True

        return is_owned

    async def locate(self, bundle: Bundle, *, take: bool = False) -> RemoteOwner | None:
        """Return the other broker that owns `bundle`; None: this broker owns it.

        An unowned bundle is given to the broker that the assigner chooses. `take`: this broker takes it, for example
        because another one has chosen it.

        Raises NotOwner while the owner changes, OwnedByPulsar, MetadataUnavailable if ZooKeeper does not answer. While
        the bundle is unloaded, and as long as it is held then, the call waits.
        """
        if self.is_mine(bundle):
            return None
        remote = self._remote.get(bundle)
        if remote is None:
            try:
                remote = await self._locate_now(bundle, take=take)
            except _Elsewhere:
                await self._assign(bundle)
                remote = await self._locate_now(bundle, take=True)
        if remote is not None and remote.is_pulsar:
            raise OwnedByPulsar.of(bundle, http_url=remote.http_url, native_url=remote.native_url)
        return remote

    async def _locate_now(self, bundle: Bundle, *, take: bool) -> RemoteOwner | None:
        async with self._locks.hold(bundle):
            if self.is_mine(bundle):
                return None
            return self._remote.get(bundle) or await self._acquire(bundle, take=take)

    async def _assign(self, bundle: Bundle) -> None:
        """Ask other brokers to take the bundle, once for all requests that wait for it. The lock of the bundle must not
        be held: the other broker may be asking this one."""
        assert self.assigner is not None
        task = self._assigning.get(bundle)
        if task is None:
            task = asyncio.get_running_loop().create_task(self.assigner.assign(bundle))
            self._assigning[bundle] = task
            task.add_done_callback(lambda _: self._assigning.pop(bundle, None))
        await asyncio.shield(task)

    async def owner(self, bundle: Bundle) -> RemoteOwner | None:
        """Read which other broker owns the bundle; None: this one, or none. Takes nothing.

        Raises NotOwner while the owner changes, MetadataUnavailable.
        """
        if self.is_mine(bundle):
            return None
        owner = await self._leases.owner(bundle.owner_path)
        return None if owner is None or owner.mine else _decode_owner(bundle, owner.value)

    async def next_owner(self, bundle: Bundle, *, former: str, timeout_s: float) -> None:
        """Return once the bundle has another owner than the broker at `former`, or none, or after `timeout_s`."""
        key = bundle, former
        task = self._awaited.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._until_changed(bundle, former))
            self._awaited[key] = task
            task.add_done_callback(lambda _: self._awaited.pop(key, None))
        await asyncio.wait({task}, timeout=timeout_s)

    async def _until_changed(self, bundle: Bundle, former: str) -> None:
        """See `next_owner`. One task for all that wait, so that they cause few reads."""
        with contextlib.suppress(BinderyError, TimeoutError):
            async with asyncio.timeout(CHANGE_WAIT_S):
                while True:
                    changed = asyncio.Event()
                    owner = await self._leases.owner(bundle.owner_path, on_change=changed.set)
                    if owner is None or owner.mine or http_url_of(owner.value) != former:
                        return
                    await changed.wait()

    async def unload(
        self,
        bundle: Bundle,
        *,
        close: Callable[[], Awaitable[None]],
        hold_s: float,
        destination: str = "",
        bring: Callable[[], Awaitable[bool]] | None = None,
    ) -> bool:
        """Give up a bundle; `close` closes its topics, and raises nothing. Other calls for it wait until the end.

        No broker of Bindery takes the bundle for `hold_s` seconds then, except `destination` (`host:port`). `bring`
        makes the destination take it, and returns whether it did, so that the hold can end; it raises nothing. Returns
        False if this broker does not own the bundle. Raises MetadataUnavailable, with nothing changed, if the store
        does not answer at the begin.
        """
        async with self._locks.hold(bundle):
            lease = self._held.get(bundle)
            if lease is None or not lease.is_held:
                return False
            self._leaving[bundle] = hold_s
            try:
                try:
                    await lease.replace(self._disabled)
                except MetadataOutcomeUnknown as error:  # `disabled` only makes others wait
                    log.warning("bundle_perhaps_not_disabled", bundle=str(bundle), **error_fields(error))
                await close()
                await self._holds.begin(bundle, hold_s, destination=destination)
                if self._held.pop(bundle, None) is not None:
                    await release_surely(lease)
                    log.info("bundle_unloaded", bundle=str(bundle), hold_s=hold_s)
                if bring is not None and await bring():
                    await self._holds.end(bundle)
                return True
            finally:
                del self._leaving[bundle]

    async def split(self, bundle: Bundle, points: Sequence[int]) -> bool:
        """Divide a bundle at `points` (see `Bundle.parts`). This broker then owns the parts, whose topics stay open.

        Returns False if this broker does not own the bundle. Raises NotOwner if a part still belongs to a broker that
        died during a split (retry), and the errors of `Divisions.split`; nothing was changed then. Do not cancel it.
        """
        async with self._locks.hold(bundle):
            lease = self._held.get(bundle)
            if lease is None or not lease.is_held or self._closing:
                return False
            parts: dict[Bundle, Lease] = {}
            try:
                for part in bundle.parts(points):
                    own = await self._leases.acquire(part.owner_path, self._record)
                    if own is None:
                        raise NotOwner("a part of the bundle has another owner; retry", bundle=str(part))
                    parts[part] = own
                await self.divisions.split(bundle, points)
            except BinderyError:
                for own in parts.values():
                    await release_surely(own)
                raise
            self._heirs[lease] = parts
            for part, own in parts.items():
                self._take_part(part, own)
            log.info("bundle_split", bundle=str(bundle), parts=[part.name for part in parts])
            if self._held.pop(bundle, None) is not None:
                try:
                    await release_surely(lease)
                except BinderyError as error:  # the end of the session releases it
                    log.warning("bundle_not_released", bundle=str(bundle), **error_fields(error))
            return True

    def _take_part(self, part: Bundle, lease: Lease) -> None:
        if not lease.is_held:
            self._on_lost(part)
        elif part not in self._held:  # else a request took it as soon as the boundaries were stored
            self._held[part] = lease
            lease.on_lost(lambda: self._lost(part))

    def forget_remote(self, bundle: Bundle) -> None:
        """Discard the cached owner, which did not answer or no longer owns the bundle.

        The next `locate` reads the owner again.
        """
        self._remote.pop(bundle, None)

    async def release(self, bundle: Bundle) -> None:
        """Release a bundle. Its topics must be closed already."""
        lease = self._held.pop(bundle, None)
        if lease is not None:
            await lease.release()
            log.info("bundle_released", bundle=str(bundle))

    async def close(self) -> None:
        """Release all bundles, and take no more."""
        self._closing = True
        await self._holds.close()
        for bundle in list(self._held):
            try:
                await self.release(bundle)
            except BinderyError as error:  # the end of the session releases the bundle
                log.warning("bundle_not_released", bundle=str(bundle), **error_fields(error))

    async def _acquire(self, bundle: Bundle, *, take: bool) -> RemoteOwner | None:
        """Return the other broker that owns the bundle; None: this one has taken it. Raises _Elsewhere, unless `take`,
        if another broker should take it."""
        attempts = 0
        while attempts < ATTEMPTS_MAX and not self._closing:
            attempts += 1
            changed = asyncio.Event()

            def on_change(changed: asyncio.Event = changed) -> None:
                self.forget_remote(bundle)
                changed.set()

            owner = await self._leases.owner(bundle.owner_path, on_change=on_change)
            if owner is not None and not owner.mine:
                remote = _decode_owner(bundle, owner.value)
                if remote.http_url == self._http_url:  # an earlier process at this address, which was killed
                    await self._predecessor_gone(bundle, changed)
                    continue
                if len(self._remote) >= REMOTE_REMEMBERED_MAX:
                    self._remote.clear()
                self._remote[bundle] = remote
                return remote
            if owner is None and await self._holds.wait(bundle, changed):
                attempts -= 1  # bounded by the end of the hold
                continue
            if owner is None and not take and await self._is_elsewhere(bundle):
                raise _Elsewhere
            lease = await self._leases.acquire(bundle.owner_path, self._record)
            if lease is not None:
                if not await self._still_exists(bundle, lease):
                    break
                self._held[bundle] = lease
                lease.on_lost(lambda: self._lost(bundle))
                log.info("bundle_acquired", bundle=str(bundle))
                return None
        raise NotOwner("the bundle's owner is changing; retry", bundle=str(bundle))

    async def _is_elsewhere(self, bundle: Bundle) -> bool:
        if self.assigner is None or not self.assigner.is_elsewhere(bundle):
            return False
        return not await self._holds.is_for_this_broker(bundle)

    async def _still_exists(self, bundle: Bundle, lease: Lease) -> bool:
        """Return whether the namespace still has the bundle; release the lease if not."""
        try:
            if await self.divisions.is_current(bundle):
                return True
        except BinderyError:
            await release_surely(lease)
            raise
        log.warning("bundle_no_longer_exists", bundle=str(bundle))
        await release_surely(lease)
        return False

    async def _predecessor_gone(self, bundle: Bundle, changed: asyncio.Event) -> None:
        log.info("bundle_awaits_end_of_earlier_session", bundle=str(bundle))
        try:
            async with asyncio.timeout(PREDECESSOR_WAIT_S):
                await changed.wait()
        except TimeoutError:
            raise NotOwner(
                "an earlier broker at this address still holds the topic's bundle; its session ends soon; retry",
                bundle=str(bundle),
            ) from None

    def _lost(self, bundle: Bundle) -> None:
        self._held.pop(bundle, None)
        log.warning("bundle_lost", bundle=str(bundle))
        self._on_lost(bundle)


class _Elsewhere(Exception):
    """The bundle has no owner, and another broker should take it."""


def _decode_owner(bundle: Bundle, value: bytes) -> RemoteOwner:
    try:
        record = msgspec.json.decode(value, type=OwnerRecord)
    except msgspec.MsgspecError as error:
        raise Corrupt("the bundle's owner record cannot be read", bundle=str(bundle)) from error
    url = record.url
    if record.disabled or not url:
        raise NotOwner("the bundle is being unloaded; retry", bundle=str(bundle))
    return RemoteOwner(
        url,
        (record.native_url or record.native_url_tls) if record.is_pulsar else "",
        is_pulsar=record.is_pulsar,
        listeners=listeners_of(record.advertised_listeners),
    )
