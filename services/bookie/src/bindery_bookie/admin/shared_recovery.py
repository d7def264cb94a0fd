"""SharedRecovery: the RecoveryAdmin behind the admin API, imported and made when somebody first needs it."""

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from bindery_core.errors import MetadataUnavailable
from bindery_core.sources import RandomBits
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore

if TYPE_CHECKING:
    from bindery_recovery.admin.recovery_admin import RecoveryAdmin


class SharedRecovery:
    """`metadata` None: not connected yet. Invariant: at most one is made."""

    def __init__(
        self,
        metadata: Callable[[], MetadataStore | None],
        layout: LedgersLayout,
        *,
        by: str,
        ledgers: Callable[[], Awaitable[Any]],
        randomness: RandomBits,
        clock_ms: Callable[[], int],
    ) -> None:
        """As for RecoveryAdmin."""
        self._metadata = metadata
        self._layout = layout
        self._by = by
        self._ledgers = ledgers
        self._randomness = randomness
        self._clock_ms = clock_ms
        self._making = asyncio.Lock()
        self._admin: RecoveryAdmin | None = None

    async def get(self) -> "RecoveryAdmin":
        """Raises MetadataUnavailable."""
        async with self._making:
            if self._admin is None:
                metadata = self._metadata()
                if metadata is None:
                    raise MetadataUnavailable("the bookie has no connection to the metadata store yet")
                loop = asyncio.get_running_loop()
                module = await loop.run_in_executor(
                    None, importlib.import_module, "bindery_recovery.admin.recovery_admin"
                )
                self._admin = module.RecoveryAdmin(
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
            admin, self._admin = self._admin, None
        if admin is not None:
            await admin.close()
