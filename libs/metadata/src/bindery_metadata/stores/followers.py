"""Followers: read nodes again after each change, also after outages and session losses. Each node has one task."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from bindery_core.backoff import Backoff
from bindery_core.errors import BadRequest, BadVersion, BinderyError, Corrupt, Forbidden, Unauthorized

from bindery_metadata.stores.store import Watch

WATCH_RETRY_S: Final = 0.5
"""Delay in seconds before a failed read is repeated."""
REFUSED_RETRY_S_MAX: Final = 60.0
"""Maximum delay in seconds before a refused read is repeated. The delays begin with WATCH_RETRY_S and double."""
REFUSALS: Final = (BadRequest, Unauthorized, Forbidden)
"""Errors that last until somebody changes something, such as an access list or the files of credentials."""

_log = logging.getLogger(__name__)


class End(Exception):
    """Raised by `look` to stop following a node, for example because the node was deleted."""


class Followers:
    """The tasks of one owner. `close` ends all of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, what: str, look: Callable[[Watch], Awaitable[None]], **fields: object) -> Callable[[], None]:
        """Call `look` now and after each change that its watch reports, until it raises End. Return a function to stop.

        If `look` cannot decode the data (Corrupt, BadVersion), it is called again after the next change. After one of
        REFUSALS, it is called again after a delay that grows to REFUSED_RETRY_S_MAX, after another BinderyError after
        WATCH_RETRY_S. `what` and `fields` are for the log.
        """
        task = asyncio.create_task(_follow(what, look, fields))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def stop() -> None:
            task.cancel()

        return stop

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(what: str, look: Callable[[Watch], Awaitable[None]], fields: dict[str, object]) -> None:
    backoff = Backoff(WATCH_RETRY_S, REFUSED_RETRY_S_MAX)
    with contextlib.suppress(End):
        while True:
            changed = asyncio.Event()
            try:
                await look(changed.set)
            except (Corrupt, BadVersion) as error:
                _log.error(f"{what}_unreadable", extra={**fields, "error": str(error)})
            except REFUSALS as error:
                delay_s = backoff.next_delay_s()
                _log.error(f"{what}_watch_refused", extra={**fields, "error": str(error), "retry_in_s": delay_s})
                await asyncio.sleep(delay_s)
                continue
            except BinderyError as error:
                _log.info(f"{what}_watch_waits", extra={**fields, "error": str(error)})
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            else:
                backoff.reset()
            await changed.wait()
