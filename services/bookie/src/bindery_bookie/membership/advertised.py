"""AdvertisedName: whether others can find this bookie by the name that it gives them.

A name that does not resolve makes a bookie that looks well and that nobody reaches. It is no reason to end: a cluster's
name service may learn of a new pod late. So it is asked again, and meanwhile a note stands on /readyz and a line in the
log.
"""

import asyncio
import contextlib
import socket
from typing import Final

from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import get_logger

RETRY_S: Final = 10.0
_NOTE: Final = "advertised_host"

log = get_logger(__name__)


class AdvertisedName:
    """`run` belongs to a task."""

    def __init__(self, host: str, health: Health) -> None:
        self._host = host
        self._health = health

    async def run(self) -> None:
        """Ask until it resolves, then do nothing, until cancelled."""
        never = asyncio.Event()
        while not await self._resolves():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(never.wait(), RETRY_S)
        self._health.note(_NOTE, None)
        await never.wait()

    async def _resolves(self) -> bool:
        try:
            await asyncio.get_running_loop().getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter: a part of the name is empty, or too long
            text = (
                f"the name {self._host}, by which clients are to reach this bookie, does not resolve here "
                f"({getattr(error, 'strerror', None) or error}); set BOOKIE_ADVERTISED_HOST to one that does"
            )
            self._health.note(_NOTE, text)
            log.warning("advertised_host_not_resolved", host=self._host, reason=text)
            return False
        return True
