"""SharedRecovery: the RecoveryAdmin behind the admin API, imported and built for the first request that needs it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from bindery_core.errors import MetadataUnavailable
from bindery_core.sources import RandomBits
from bindery_kit.process.late_imports import in_thread
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient
    from bindery_recovery.admin.recovery_admin import RecoveryAdmin


class SharedRecovery:
    """`metadata` returns None until the bookie is connected. Invariant: at most one RecoveryAdmin exists."""

    def __init__(
        self,
        metadata: Callable[[], MetadataStore | None],
        layout: LedgersLayout,
        *,
        by: str,
        ledgers: "Callable[[], Awaitable[LedgerClient]]",
        randomness: RandomBits,
        clock_ms: Callable[[], int],
    ) -> None:
        """The arguments are those of RecoveryAdmin."""
        self._metadata = metadata
        self._layout = layout
        self._by = by
        self._ledgers = ledgers
        self._randomness = randomness
        self._clock_ms = clock_ms
        self._making = asyncio.Lock()
        self._admin: RecoveryAdmin | None = None
        self._is_closed = False

    async def get(self) -> "RecoveryAdmin":
        """Return the RecoveryAdmin, which the first call builds. Raises MetadataUnavailable."""
        async with self._making:
            if self._is_closed:
                raise MetadataUnavailable("the bookie is stopping")
            if self._admin is None:
                metadata = self._metadata()
                if metadata is None:
                    raise MetadataUnavailable("the bookie has no connection to the metadata store yet")
                recovery_admin = await in_thread(import_recovery_admin)
                self._admin = recovery_admin(
                    metadata,
                    self._layout,
                    by=self._by,
                    ledgers=self._ledgers,
                    randomness=self._randomness,
                    clock_ms=self._clock_ms,
                )
            return self._admin

    async def close(self) -> None:
        async with self._making:
            self._is_closed = True
            admin, self._admin = self._admin, None
        if admin is not None:
            await admin.close()


def import_recovery_admin() -> "type[RecoveryAdmin]":
    from bindery_recovery.admin.recovery_admin import RecoveryAdmin

    return RecoveryAdmin
