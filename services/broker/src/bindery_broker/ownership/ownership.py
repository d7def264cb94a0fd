"""Determine which broker serves a topic. A broker owns a namespace bundle through an ephemeral node.

The first broker that gets a request for an unowned bundle takes it. The record is Pulsar's:

    {"nativeUrl": "", "nativeUrlTls": "", "httpUrl": "http://10.0.0.7:8080", "httpUrlTls": "", "disabled": false,
     "advertisedListeners": {}}

If the session ends, the node is lost and the bundle's topics are closed at once. Safety does not depend on this: a
broker that has not detected the loss is fenced by the new owner's recovery of the ledger and by the znode's version.
Source: Pulsar NamespaceEphemeralData, OwnershipCache.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from bindery_core.errors import BinderyError, Corrupt
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.coordination.leases import Lease, Leases

from bindery_broker.errors import NotOwner
from bindery_broker.keyed_locks import KeyedLocks
from bindery_broker.ownership.bundles import Bundle

ATTEMPTS_MAX = 3
"""Maximum number of attempts in one call to take a bundle that has no owner when it is read."""
REMOTE_REMEMBERED_MAX = 10_000
"""Maximum number of bundles whose remote owner is cached."""
PREDECESSOR_WAIT_S = 10.0
"""Maximum seconds to wait until the session of an earlier process at the same address ends and its node is removed."""

log = get_logger(__name__)


class OwnerRecord(msgspec.Struct, rename="camel", frozen=True):
    http_url: str
    native_url: str = ""
    native_url_tls: str = ""
    http_url_tls: str = ""
    disabled: bool = False
    advertised_listeners: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class RemoteOwner:
    """Another broker that serves a bundle."""

    http_url: str


class Ownership:
    def __init__(self, leases: Leases, *, record: OwnerRecord, on_lost: Callable[[Bundle], None]) -> None:
        """`on_lost` is called in the loop when this broker loses a bundle, but not when it releases the bundle."""
        self._leases = leases
        self._record = msgspec.json.encode(record)
        self._http_url = record.http_url
        self._on_lost = on_lost
        self._held: dict[Bundle, Lease] = {}
        self._remote: dict[Bundle, RemoteOwner] = {}
        self._locks: KeyedLocks[Bundle] = KeyedLocks()
        self._closing = False

    @property
    def held(self) -> list[Bundle]:
        return [bundle for bundle, lease in self._held.items() if lease.is_held]

    def is_mine(self, bundle: Bundle) -> bool:
        """Return whether this broker owns the bundle, as far as it knows. Its state may be outdated; see `proof`."""
        lease = self._held.get(bundle)
        return lease is not None and lease.is_held

    def proof(self, bundle: Bundle) -> Callable[[], Awaitable[bool]] | None:
        """Return a function that checks whether this broker has owned the bundle without interruption since this call.

        Returns None if this broker does not own the bundle. The function reads the metadata store and raises
        MetadataUnavailable if the store does not answer.
        """
        lease = self._held.get(bundle)
        return lease.verify if lease is not None and lease.is_held else None

    async def locate(self, bundle: Bundle) -> RemoteOwner | None:
        """Return the other broker that owns `bundle`; None: this broker owns it. An unowned bundle is taken.

        Raises NotOwner while the owner changes, MetadataUnavailable if ZooKeeper does not answer.
        """
        if self.is_mine(bundle):
            return None
        remote = self._remote.get(bundle)
        if remote is not None:
            return remote
        async with self._locks.hold(bundle):
            if self.is_mine(bundle):
                return None
            return self._remote.get(bundle) or await self._acquire(bundle)

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
        for bundle in list(self._held):
            try:
                await self.release(bundle)
            except BinderyError as error:  # the end of the session releases the bundle
                log.warning("bundle_not_released", bundle=str(bundle), **error_fields(error))

    async def _acquire(self, bundle: Bundle) -> RemoteOwner | None:
        for _ in range(ATTEMPTS_MAX):
            if self._closing:
                break
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
            lease = await self._leases.acquire(bundle.owner_path, self._record)
            if lease is not None:
                self._held[bundle] = lease
                lease.on_lost(lambda: self._lost(bundle))
                log.info("bundle_acquired", bundle=str(bundle))
                return None
        raise NotOwner("the bundle's owner is changing; retry", bundle=str(bundle))

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
    if record.disabled or not record.http_url:
        raise NotOwner("the bundle is being unloaded; retry", bundle=str(bundle))
    return RemoteOwner(record.http_url)
