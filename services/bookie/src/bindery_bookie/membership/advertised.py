"""AdvertisedName: check that the host name which this bookie advertises resolves.

If it does not, clients cannot connect although the bookie is otherwise healthy. The process does not end then, because
a name service may resolve the name of a new pod late. The check is repeated until it succeeds; meanwhile /readyz has a
note and the log a warning.
"""

import asyncio
import contextlib
import socket
from typing import Final

from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import get_logger

RETRY_S: Final = 10.0
"""Seconds between two checks."""
_NOTE: Final = "advertised_host"

log = get_logger(__name__)


class AdvertisedName:
    """Call `run` as a task."""

    def __init__(self, host: str, health: Health) -> None:
        self._host = host
        self._health = health

    async def run(self) -> None:
        """Check until the name resolves, then wait until cancelled."""
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
                f"the name {self._host}, under which clients connect to this bookie, does not resolve here "
                f"({getattr(error, 'strerror', None) or error}); set BOOKIE_ADVERTISED_HOST to a name that does"
            )
            self._health.note(_NOTE, text)
            log.warning("advertised_host_not_resolved", host=self._host, reason=text)
            return False
        return True
