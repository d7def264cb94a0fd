"""Rebuild the index of a stopped bookie from its entry logs, next to the old index, then replace the old one.

| step                                             | after a crash here                                             |
|--------------------------------------------------|----------------------------------------------------------------|
| take LevelDB's lock of the old index             | nothing has changed                                            |
| create `index.new` from the entry logs           | `index.new`, removed by the next rebuild                       |
| a shard in limbo goes back to phase listing      | more ledgers than necessary go into limbo: safe                |
| rename `index` to `index.old-<time>`             | no index: a start builds it from the entry logs                |
| rename `index.new` to `index`, sync directory    | done                                                           |

The third step is necessary because only the index stores which ledgers are in limbo.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bindery_core.errors import DamagedStorage, NotThere

from bindery_bookie.offline.places import INDEX, Place, find_ledgers, locked
from bindery_bookie.storage.corruption import limbo
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.kv import LevelDbKV
from bindery_bookie.storage.journal.mark import read_mark
from bindery_bookie.storage.opening import opening
from bindery_bookie.storage.opening.rebuild import IndexRebuild

NEW_NAME: Final = "index.new"
"""Name of the index while it is rebuilt."""
OLD_PREFIX: Final = "index.old-"
"""Start of the name of a replaced index."""


def rebuild(directory: str, *, discard: bool, now_ms: int) -> Iterator[dict[str, Any]]:
    """Rebuild the index of every shard of `directory`. Raises BookieMayRun, DamagedStorage, OSError.

    All locks are taken before anything is written: if a bookie runs on one of the shards, nothing is changed.
    `now_ms`: wall clock, milliseconds since 1970.
    """
    places = [pair.ledgers for pair in find_ledgers([directory]) if pair.ledgers is not None]
    with contextlib.ExitStack() as locks:
        for place in places:
            locks.enter_context(locked(place))
        for place in places:
            yield _rebuild(place, discard=discard, now_ms=now_ms)


def _rebuild(place: Place, *, discard: bool, now_ms: int) -> dict[str, Any]:
    disk = RealDisk()
    mark = read_mark(disk, place.path)
    if mark is None:
        raise NotThere("no LastLogMark here, so the ends of the entry logs are unknown", path=place.path)
    current = Path(place.path)
    new, old = current / NEW_NAME, current / INDEX
    if new.exists():
        shutil.rmtree(new)
    is_limbo = limbo.read_marker(disk, place.path) is not None
    index = Index(LevelDbKV(str(new)))
    try:
        # The shard is in limbo and lists its ledgers again, so it answers "unknown" for entries of damaged logs.
        work = IndexRebuild(disk, place.path, index, mark, may_be_partial=is_limbo)
        work.run()
        ledgers = sum(1 for _ in index.ledger_ids())
    except DamagedStorage as error:
        raise DamagedStorage(
            f"{error.message}; an index without these entries would deny them. Start the bookie: it rebuilds what can "
            "be read, goes into limbo, and copies the rest from other bookies",
            **error.facts,
        ) from error
    finally:
        index.close()
    if is_limbo:
        limbo.write_marker(disk, place.path, "the index was rebuilt", now_ms)
    kept = _swap(disk, current, old=old, new=new, now_ms=now_ms)
    if opening.REBUILD_REQUEST in disk.list_names(place.path):
        disk.remove(f"{place.path}/{opening.REBUILD_REQUEST}")  # the request is fulfilled
        disk.sync_directory(place.path)
    if discard and kept is not None:
        shutil.rmtree(kept)
        kept = None
    return {
        "path": str(old),
        "ledgers": ledgers,
        "entries": work.entries_count,
        "kept": str(kept) if kept else None,
    }


def _swap(disk: RealDisk, current: Path, *, old: Path, new: Path, now_ms: int) -> Path | None:
    """Put the new index in place. Return the path that the old one was renamed to, None if there was none."""
    kept = None
    disk.sync_directory(str(new))
    if old.exists():
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now_ms / 1000))
        names = (f"{OLD_PREFIX}{stamp}{suffix}" for suffix in ("", *(f"-{count}" for count in range(1, 1000))))
        kept = next(current / name for name in names if not (current / name).exists())
        os.rename(old, kept)
    os.rename(new, old)
    disk.sync_directory(str(current))
    return kept
