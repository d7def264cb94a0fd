"""Keep an unloaded bundle free for a while, so that a broker of another kind can take it.

Clients of Bindery ask again within milliseconds of an unload, and the first request would take the bundle back before a
client of a Pulsar broker asks. Therefore the broker that unloads a bundle creates a *hold* first:
`/bindery/holds/T/N/<bundle>`, ephemeral. While it exists no broker of Bindery takes the bundle: requests wait for the
next owner. It ends when its time is over, or with the session of its broker. Pulsar brokers do not know of holds. A
hold is a courtesy, not a lock: safety does not depend on it.

The record is `{"for": "host:port"}`, or `{}`. The broker of this name, the destination of an unload, may take the
bundle during the hold.
"""

import asyncio
from typing import Final

import msgspec
from bindery_core.errors import BinderyError
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.coordination.leases import Lease, Leases
from bindery_metadata.layout.layout import BINDERY_ROOT
from bindery_metadata.stores import json_node

from bindery_broker.ownership.bundles import Bundle

HOLD_S_DEFAULT: Final = 5.0
"""Seconds of a hold if a Pulsar broker is registered. Pulsar's clients that reconnect ask within a second or two."""
HOLD_S_MAX: Final = 60.0
"""Maximum seconds of a hold. Requests for the bundle's topics may wait that long."""
RELEASE_RETRY_S: Final = 0.5
"""Seconds before the release of a node is tried again."""
RELEASES_MAX: Final = 120
"""Maximum number of attempts to release a node. The session has expired before that if the store does not answer."""

log = get_logger(__name__)


async def release_surely(lease: Lease) -> None:
    """Release the lease, again if the store does not answer, until its node is gone or of another session.

    Raises the error of the last attempt.
    """
    for attempt in range(1, RELEASES_MAX + 1):
        try:
            await lease.release()
            return
        except BinderyError as error:
            if attempt == RELEASES_MAX:
                raise
            log.warning("node_not_released", path=lease.path, **error_fields(error))
            await asyncio.sleep(RELEASE_RETRY_S)


class Holds:
    """The holds of one broker, and what it sees of others."""

    def __init__(self, leases: Leases, *, broker: str) -> None:
        """`broker`: the name of this one, `host:port`."""
        self._leases = leases
        self._broker = broker
        self._ending: dict[asyncio.Task[None], Bundle] = {}

    async def begin(self, bundle: Bundle, seconds: float, *, destination: str = "") -> None:
        """Create a hold that ends after `seconds`. Errors are logged: the bundle is then free at once.

        `destination`: name of the broker that may take it meanwhile; empty: none.
        """
        assert seconds <= HOLD_S_MAX
        if seconds <= 0:
            return
        try:
            lease = await self._leases.acquire(
                _path(bundle), json_node.encode({"for": destination} if destination else {})
            )
        except BinderyError as error:
            log.warning("bundle_not_held", bundle=str(bundle), **error_fields(error))
            return
        if lease is not None:
            task = asyncio.get_running_loop().create_task(self._end(lease, seconds))
            self._ending[task] = bundle
            task.add_done_callback(lambda ended: self._ending.pop(ended, None))

    async def wait(self, bundle: Bundle, owner_changed: asyncio.Event) -> bool:
        """Wait until the hold of a bundle ends, or its owner changes. Returns False at once if there is none for this
        broker to respect."""
        ended = asyncio.Event()
        hold = await self._leases.owner(_path(bundle), on_change=ended.set)
        if hold is None or _destination(hold.value) == self._broker:
            return False
        waits = [asyncio.ensure_future(event.wait()) for event in (ended, owner_changed)]
        try:
            await asyncio.wait(waits, timeout=HOLD_S_MAX, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        return True

    async def end(self, bundle: Bundle) -> None:
        """End the hold of a bundle, because its next owner has taken it."""
        await self._stop([task for task, held in self._ending.items() if held == bundle])

    async def is_for_this_broker(self, bundle: Bundle) -> bool:
        """Return whether the bundle is held for this broker, the destination of its unload."""
        hold = await self._leases.owner(_path(bundle))
        return hold is not None and _destination(hold.value) == self._broker

    async def close(self) -> None:
        """End all holds of this broker."""
        await self._stop(list(self._ending))

    async def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end(self, lease: Lease, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            await lease.release()
            raise
        try:
            await release_surely(lease)
        except BinderyError as error:
            log.warning("hold_not_released", path=lease.path, **error_fields(error))


def _destination(value: bytes) -> str:
    try:
        return msgspec.json.decode(value, type=dict[str, str]).get("for", "")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


def _path(bundle: Bundle) -> str:
    return f"{BINDERY_ROOT}/holds/{bundle.tenant}/{bundle.namespace}/{bundle.name}"
