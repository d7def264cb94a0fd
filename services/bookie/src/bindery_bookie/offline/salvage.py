"""Salvage the shards of a stopped bookie. `storage.opening.salvage` describes the steps."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bindery_core.errors import BadRequest

from bindery_bookie.offline.places import INDEX, ShardPlaces, copy_index, find_ledgers, locked
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.kv import KV, LevelDbKV
from bindery_bookie.storage.opening.salvage import salvage


def run_salvage(directories: Sequence[str], *, yes: bool, now_ms: int) -> Iterator[dict[str, Any]]:
    """Yield each step of each shard as facts for JSON. Without `yes` nothing is changed.

    All locks are taken first: if a bookie runs on one of the shards, nothing is changed. `now_ms`: milliseconds since
    1970. Raises BookieMayRun, BadRequest, OSError.
    """
    pairs = find_ledgers(directories)
    for pair in pairs:
        if pair.journal is None and pair.ledgers is not None:
            raise BadRequest(
                "no journal was found for these ledgers: pass its directory, too (a shard whose journals are all lost "
                "needs no salvage: its next start goes into limbo)",
                ledgers=pair.ledgers.path,
            )
    with contextlib.ExitStack() as locks:
        for pair in pairs:
            assert pair.ledgers is not None
            locks.enter_context(locked(pair.ledgers))
        for pair in pairs:
            yield from _salvage(pair, yes=yes, now_ms=now_ms)


def _salvage(pair: ShardPlaces, *, yes: bool, now_ms: int) -> Iterator[dict[str, Any]]:
    assert pair.ledgers is not None
    assert pair.journal is not None
    with tempfile.TemporaryDirectory(prefix="bindery-index-") as temporary:

        def open_copy(path: str) -> KV:
            """Open a copy of the index, so that its own files do not change."""
            target = Path(temporary) / INDEX
            shutil.rmtree(target, ignore_errors=True)
            copy_index(Path(path), target)
            return LevelDbKV(str(target))

        has_index = Path(pair.ledgers.path, INDEX, "CURRENT").exists()
        steps = salvage(
            RealDisk(),
            journal_directory=pair.journal.path,
            ledger_directory=pair.ledgers.path,
            now_ms=now_ms,
            apply=yes,
            open_kv=open_copy if has_index else None,
        )
    for step in steps:
        yield {
            "path": step.path,
            "offset": step.offset,
            "problem": step.problem,
            "moved_to": step.moved_to,
            "is_copy": step.is_copy,
            "done": yes,
        }
