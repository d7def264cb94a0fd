"""LevelDbHandle: an open LevelDB that is reopened after a failed write.

After a failed write LevelDB's log ends with an incomplete record. LevelDB appends further records after it, and these
acknowledged writes are lost at the next start, because the log is not read past the incomplete record (seen with 1.23:
"checksum mismatch"). After a failed compaction LevelDB refuses every write until it is reopened. The first write after
a failed one therefore reopens the store, which keeps the old log and begins a new one.

Reads continue with the old store in the meantime; it is closed only if there is space for the first files of the new
one. The old store must be closed before it is opened again, so the switch waits until there are no readers, and new
readers wait for the switch.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

SWITCH_WAIT_MAX_S: Final = 5.0
"""Maximum time in seconds to wait for readers. After that, a write fails again, and `close` leaves the store to its
last reader."""


class LevelDbHandle:
    """Thread-safe access to an open store.

    Invariants: a closed store is never used; after a failed write, no write is sent to the store until it is reopened.
    """

    def __init__(self, open_db: Callable[[], Any], *, has_room: Callable[[], bool]) -> None:
        """Open the store with `open_db`; raises its errors. `has_room`: returns True if there is space to reopen it."""
        self._open_db = open_db
        self._has_room = has_room
        self._changed = threading.Condition()
        self._users = 0
        self._is_awaited = False
        """True while a thread waits for `_users` to be 0."""
        self._has_failed = False
        """True if a write failed since the store was opened."""
        self._is_closed = False
        self._db: Any = open_db()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """Use the store for one read. If an earlier reopening failed, open it, and raise the errors of `open_db`."""
        with self._changed:
            if self._is_closed:
                raise OSError("index: closed")
            if self._db is None:
                self._db = self._open_db()
            db = self._db
            self._users += 1
        try:
            yield db
        finally:
            self._release()

    @contextlib.contextmanager
    def writing(self) -> Iterator[Any]:
        """Use the store for one write at a time. Raises OSError if the last write failed and it cannot be reopened."""
        if self._has_failed:
            self._reopen()
        with self.reading() as db:
            try:
                yield db
            except BaseException:
                self._has_failed = True
                raise

    def close(self) -> None:
        """Accept no more users, wait for the current ones, and close the store.

        LevelDB crashes if it is closed during a scan. If a scan takes too long, the store is closed when the scan ends
        and drops the last reference.
        """
        with self._changed:
            self._is_closed = True
            is_unused = self._wait_for_readers()
            db, self._db = self._db, None
        if db is not None and is_unused:
            db.close()

    def _release(self) -> None:
        with self._changed:
            self._users -= 1
            if self._is_awaited and not self._users:
                self._changed.notify_all()

    def _reopen(self) -> None:
        if not self._has_room():
            raise OSError("index: a write failed, and there is no disk space to reopen it")
        with self._changed:
            if not self._wait_for_readers():
                raise OSError("index: a write failed, and readers prevent it from being reopened")
            if self._is_closed:
                raise OSError("index: closed")
            if self._db is not None:
                self._db.close()
                self._db = None
            self._db = self._open_db()
            self._has_failed = False

    def _wait_for_readers(self) -> bool:
        """Wait, with `_changed` held, until the store has no users; return False after a timeout."""
        self._is_awaited = True
        try:
            return self._changed.wait_for(lambda: not self._users, SWITCH_WAIT_MAX_S)
        finally:
            self._is_awaited = False
