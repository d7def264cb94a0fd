"""SharedClient: the ledger client behind the admin API, made when somebody first needs it and then kept."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from bindery_core.errors import BinderyError, MetadataUnavailable

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient


class SharedClient:
    """`connect` makes a client; None from it: there is no metadata store yet. Invariant: at most one is made."""

    def __init__(self, connect: Callable[[], Awaitable[Any] | None]) -> None:
        self._connect = connect
        self._making = asyncio.Lock()
        self._client: LedgerClient | None = None
        self._is_closed = False

    async def get(self) -> "LedgerClient":
        """Raises MetadataUnavailable, BadRequest for settings that do not say how to get past the bookies."""
        async with self._making:
            if self._is_closed:
                raise MetadataUnavailable("the bookie is stopping")
            if self._client is None:
                making = self._connect()
                if making is None:
                    raise MetadataUnavailable("the bookie has no connection to the metadata store yet")
                self._client = await making
            return self._client

    async def close(self) -> None:
        """Idempotent; never raises."""
        async with self._making:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(BinderyError, OSError):
                await client.close()
