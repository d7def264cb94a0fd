"""Determine which broker serves a topic. A broker owns a namespace bundle through an ephemeral node.

The first broker that gets a request for an unowned bundle takes it. The record is Pulsar's, with a mark of ours:

    {"nativeUrl": "", "nativeUrlTls": "", "httpUrl": "http://10.0.0.7:8080", "httpUrlTls": "", "disabled": false,
     "advertisedListeners": {}, "bindery": true}

A bundle may belong to a broker of Apache Pulsar. Then `locate` raises OwnedByPulsar, because that broker does not serve
the requests of this one.

| step of an unload                        | what others see      | if this broker dies                              |
|------------------------------------------|----------------------|--------------------------------------------------|
| `is_mine` is false; `disabled` is stored | the owner changes    | the node ends with the session                   |
| topics are closed                        | the owner changes    | the same; the next owner recovers the ledgers    |
| a hold is created (see `holds`)          | the owner changes    | both nodes end with the session                  |
| the node is deleted                      | no owner, but a hold | the hold ends with the session                   |

A step that fails after the first one is logged and the next one follows, so that no bundle stays half unloaded. A topic
that cannot be closed is abandoned: the next owner fences it.

If the session ends, the node is lost and the bundle's topics are closed at once. Safety does not depend on this: a
broker that has not detected the loss is fenced by the new owner's recovery of the ledger and by the znode's version.
Source: Pulsar NamespaceEphemeralData, OwnershipCache.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from bindery_core.errors import BinderyError, Corrupt, MetadataOutcomeUnknown
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.coordination.leases import Lease, Leases

from bindery_broker.errors import NotOwner, OwnedByPulsar
from bindery_broker.keyed_locks import KeyedLocks
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.divisions import Divisions
from bindery_broker.ownership.holds import Holds, release_surely
from bindery_broker.ownership.records import OwnerRecord

ATTEMPTS_MAX = 3
"""Maximum number of attempts in one call to take a bundle that has no owner when it is read."""
REMOTE_REMEMBERED_MAX = 10_000
"""Maximum number of bundles whose remote owner is cached."""
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


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What an unload found."""

    bundle: Bundle
    owner: str | None
    """Address of the broker that owned the bundle; None: no broker did, and nothing was done."""


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
        self._http_url = record.http_url
        self._on_lost = on_lost
        self._held: dict[Bundle, Lease] = {}
        self._remote: dict[Bundle, RemoteOwner] = {}
        self._locks: KeyedLocks[Bundle] = KeyedLocks()
        self._leaving: set[Bundle] = set()
        """Held bundles that are being unloaded."""
        self._holds = Holds(leases)
        self._closing = False

    @property
    def held(self) -> list[Bundle]:
        return [bundle for bundle, lease in self._held.items() if lease.is_held]

    def is_mine(self, bundle: Bundle) -> bool:
        """Return whether this broker owns the bundle, as far as it knows. Its state may be outdated; see `proof`."""
        lease = self._held.get(bundle)
        return lease is not None and lease.is_held and bundle not in self._leaving

    def proof(self, bundle: Bundle) -> Callable[[], Awaitable[bool]] | None:
        """Return a function that checks whether this broker has owned the bundle without interruption since this call.

        Returns None if this broker does not own the bundle. The function reads the metadata store and raises
        MetadataUnavailable if the store does not answer.
        """
        lease = self._held.get(bundle)
        return lease.verify if lease is not None and self.is_mine(bundle) else None

    async def locate(self, bundle: Bundle) -> RemoteOwner | None:
        """Return the other broker that owns `bundle`; None: this broker owns it. An unowned bundle is taken.

        Raises NotOwner while the owner changes, OwnedByPulsar, MetadataUnavailable if ZooKeeper does not answer. While
        the bundle is unloaded, and as long as it is held then, the call waits.
        """
        if self.is_mine(bundle):
            return None
        remote = self._remote.get(bundle)
        if remote is None:
            async with self._locks.hold(bundle):
                if self.is_mine(bundle):
                    return None
                remote = self._remote.get(bundle) or await self._acquire(bundle)
        if remote is not None and remote.is_pulsar:
            raise OwnedByPulsar.of(bundle, http_url=remote.http_url, native_url=remote.native_url)
        return remote

    async def owner(self, bundle: Bundle) -> RemoteOwner | None:
        """Read which other broker owns the bundle; None: this one, or none. Takes nothing.

        Raises NotOwner while the owner changes, MetadataUnavailable.
        """
        if self.is_mine(bundle):
            return None
        owner = await self._leases.owner(bundle.owner_path)
        return None if owner is None or owner.mine else _decode_owner(bundle, owner.value)

    async def unload(self, bundle: Bundle, *, close: Callable[[], Awaitable[None]], hold_s: float) -> bool:
        """Give up a bundle; `close` closes its topics, and raises nothing. Other calls for it wait until the end.

        No broker of Bindery takes the bundle for `hold_s` seconds then. Returns False if this broker does not own the
        bundle. Raises MetadataUnavailable, with nothing changed, if the store does not answer at the begin.
        """
        async with self._locks.hold(bundle):
            lease = self._held.get(bundle)
            if lease is None or not lease.is_held:
                return False
            self._leaving.add(bundle)
            try:
                try:
                    await lease.replace(self._disabled)
                except MetadataOutcomeUnknown as error:  # `disabled` only makes others wait
                    log.warning("bundle_perhaps_not_disabled", bundle=str(bundle), **error_fields(error))
                await close()
                await self._holds.begin(bundle, hold_s)
                if self._held.pop(bundle, None) is not None:
                    await release_surely(lease)
                    log.info("bundle_unloaded", bundle=str(bundle), hold_s=hold_s)
                return True
            finally:
                self._leaving.discard(bundle)

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

    async def _acquire(self, bundle: Bundle) -> RemoteOwner | None:
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
            lease = await self._leases.acquire(bundle.owner_path, self._record)
            if lease is not None:
                if not await self._still_exists(bundle, lease):
                    break
                self._held[bundle] = lease
                lease.on_lost(lambda: self._lost(bundle))
                log.info("bundle_acquired", bundle=str(bundle))
                return None
        raise NotOwner("the bundle's owner is changing; retry", bundle=str(bundle))

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


def _decode_owner(bundle: Bundle, value: bytes) -> RemoteOwner:
    try:
        record = msgspec.json.decode(value, type=OwnerRecord)
    except msgspec.MsgspecError as error:
        raise Corrupt("the bundle's owner record cannot be read", bundle=str(bundle)) from error
    url = record.http_url or record.http_url_tls
    if record.disabled or not url:
        raise NotOwner("the bundle is being unloaded; retry", bundle=str(bundle))
    if record.is_pulsar:
        return RemoteOwner(url, record.native_url or record.native_url_tls, is_pulsar=True)
    return RemoteOwner(url)
