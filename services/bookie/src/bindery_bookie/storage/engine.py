"""StorageEngine: journal, write caches, entry logs and index joined into an EntryStore."""

from collections.abc import Callable

from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats


class StorageEngine:
    """An EntryStore on disk."""

    @classmethod
    def on_real_disk(
        cls, settings: StorageSettings, *, wall_clock_ms: Callable[[], int], stats: StorageStats | None = None
    ) -> "StorageEngine":
        """The engine as a bookie runs it: real files, LevelDB, its own threads. Call `open` in the event loop."""
        raise NotImplementedError
