"""SharedClient: the ledger client behind the admin API, connected for the first request that needs it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from bindery_core.errors import BinderyError, MetadataUnavailable

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient


class SharedClient:
    """`connect` connects a client; it returns None before there is a metadata store. Invariant: at most one exists."""

    def __init__(self, connect: "Callable[[], Awaitable[LedgerClient] | None]") -> None:
        self._connect = connect
        self._making = asyncio.Lock()
        self._client: LedgerClient | None = None
        self._is_closed = False

    async def get(self) -> "LedgerClient":
        """Return the client, which the first call connects.

        Raises MetadataUnavailable, and BadRequest if the settings lack credentials that the bookies require.
        """
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
        """Close the client. Idempotent; never raises."""
        async with self._making:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(BinderyError, OSError):
                await client.close()
