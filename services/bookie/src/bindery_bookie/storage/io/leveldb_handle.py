"""LevelDbHandle: an open LevelDB that survives a write that failed.

After a failed write LevelDB's log ends in half a record. It goes on writing behind it as if nothing had happened, and
what it acknowledges from then on is gone at the next start: the log is not read past the half record (seen with 1.23:
"checksum mismatch"). After a failed compaction it refuses every write until it is opened anew. So the first write after
a failed one opens the store again, which sets the old log aside and begins a new one.

Reads go on with the old store meanwhile; it is let go only when there is room for the new one's first files. Opening
needs the old one closed, so it waits for a moment in which nobody reads; who comes during the switch waits for it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

SWITCH_WAIT_MAX_S: Final = 5.0
"""Longest wait for a moment without readers; then the write fails once more, and a store to be closed is left to its
last reader."""


class LevelDbHandle:
    """`open_db` opens the store; `has_room` says whether the disk has room for that. Safe for several threads.

    Invariants: nobody uses a store that is closed; no write goes to a store after one that failed.
    """

    def __init__(self, open_db: Callable[[], Any], *, has_room: Callable[[], bool]) -> None:
        """Opens the store; raises what `open_db` raises."""
        self._open_db = open_db
        self._has_room = has_room
        self._changed = threading.Condition()
        self._users = 0
        self._is_wanted = False
        """Somebody waits for `_users` to be 0."""
        self._is_spoilt = False
        self._is_closed = False
        self._db: Any = open_db()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Any]:
        """The store, for one read. Raises what opening it raises, when it had to be let go and did not open."""
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
        """The store, for one write at a time. Raises OSError when the last write failed and it cannot be opened anew
        yet."""
        if self._is_spoilt:
            self._reopen()
        with self.reading() as db:
            try:
                yield db
            except BaseException:
                self._is_spoilt = True
                raise

    def close(self) -> None:
        """Take no more users, wait for those there are, and close the store. LevelDB crashes when it is closed during a
        scan, so that one that goes on for too long closes it itself by letting it go."""
        with self._changed:
            self._is_closed = True
            is_unused = self._wait_for_readers()
            db, self._db = self._db, None
        if db is not None and is_unused:
            db.close()

    def _release(self) -> None:
        with self._changed:
            self._users -= 1
            if self._is_wanted and not self._users:
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
            self._is_spoilt = False

    def _wait_for_readers(self) -> bool:
        """Whether nobody uses the store any more. `_changed` is held, but for the wait itself."""
        self._is_wanted = True
        try:
            return self._changed.wait_for(lambda: not self._users, SWITCH_WAIT_MAX_S)
        finally:
            self._is_wanted = False
