"""`bindery bookie salvage`: what a start refuses is put aside, in limbo. What is done, and why: `storage.salvage`."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.kv import KV, LevelDbKV
from bindery_bookie.storage.opening.salvage import salvage
from bindery_core.errors import BadRequest

from bindery.bookie.places import INDEX, ShardPlaces, copy_index, find_ledgers, locked


def run_salvage(directories: Sequence[str], *, yes: bool) -> Iterator[dict[str, Any]]:
    """Each step of each shard as JSON. Nothing is changed without `yes`. Raises BookieMayRun, BadRequest, OSError.

    All locks are taken first: a bookie that runs on one of the shards stops all of it.
    """
    pairs = find_ledgers(directories)
    for pair in pairs:
        if pair.journal is None and pair.ledgers is not None:
            raise BadRequest(
                "no journal was found for these ledgers: name its directory too (one whose journals are all gone needs "
                "no salvage: a start goes into limbo by itself)",
                ledgers=pair.ledgers.path,
            )
    with contextlib.ExitStack() as locks:
        for pair in pairs:
            assert pair.ledgers is not None
            locks.enter_context(locked(pair.ledgers))
        for pair in pairs:
            yield from _salvage(pair, yes=yes)


def _salvage(pair: ShardPlaces, *, yes: bool) -> Iterator[dict[str, Any]]:
    assert pair.ledgers is not None
    assert pair.journal is not None
    with tempfile.TemporaryDirectory(prefix="bindery-index-") as temporary:

        def open_copy(path: str) -> KV:
            """The index as it is, without a change to its own files."""
            target = Path(temporary) / INDEX
            shutil.rmtree(target, ignore_errors=True)
            copy_index(Path(path), target)
            return LevelDbKV(str(target))

        has_index = Path(pair.ledgers.path, INDEX, "CURRENT").exists()
        steps = salvage(
            RealDisk(),
            journal_directory=pair.journal.path,
            ledger_directory=pair.ledgers.path,
            now_ms=time.time_ns() // 1_000_000,
            apply=yes,
            open_kv=open_copy if has_index else None,
        )
    for step in steps:
        yield {
            "path": step.path, "offset": step.offset, "problem": step.problem, "moved_to": step.moved_to,
            "is_copy": step.is_copy, "done": yes,
        }  # fmt: skip


def step_lines(facts: dict[str, Any]) -> list[str]:
    """One step as text."""
    lines = [f"{facts['path']} at {facts['offset']}: {facts['problem']}"]
    if facts["moved_to"] is not None:
        did = "copied" if facts["is_copy"] else "moved"
        lines.append(f"  {did if facts['done'] else 'to be ' + did} to {facts['moved_to']}")
    lines.append(f"  the shard {'is' if facts['done'] else 'goes'} in{'' if facts['done'] else 'to'} limbo")
    return lines
