"""Implement `bindery cluster backup|restore`: write and read the file whose format `bindery_recovery.backup` defines.

A backup is written to a temporary file, which is renamed when it is complete and durable. It contains the passwords of
ledgers, so only its owner may read it. A file whose name ends in `.gz` is compressed; a restore recognizes compression
by the content.
"""

import gzip
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from bindery_core.errors import AlreadyExists, BadRequest, Corrupt
from bindery_metadata.layout.layout import LedgersLayout
from bindery_recovery.backup.backup import Backup, BackupSummary, verify_backup, write_backup
from bindery_recovery.backup.restore import RestoreSummary, restore_backup

from bindery.common.operator import connected_store, create_chroot, now_ms, time_text
from bindery.common.output import print_json
from bindery.common.progress import Progress

COMPRESSED: Final = b"\x1f\x8b"
"""First bytes of a compressed file."""


async def run_backup(
    file: str, *, zookeeper: str, ledgers_root: str, overwrite: bool, as_json: bool
) -> tuple[BackupSummary, int]:
    """Return (summary, bytes). Raises AlreadyExists if the file exists, BadRequest if it cannot be written."""
    path = Path(file)
    if path.exists() and not overwrite:  # noqa: ASYNC240 - a command's only task
        raise AlreadyExists("the file exists; pass --overwrite to replace it", file=file)
    partial = path.with_name(path.name + ".partial")
    live = Progress(is_quiet=as_json)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, stat.S_IRUSR | stat.S_IWUSR)
    except OSError as error:
        raise BadRequest(f"cannot write {file}: {error.strerror or error}") from error
    try:
        with os.fdopen(descriptor, "wb", buffering=2**20) as out:
            with ExitStack() as layers:
                write = out.write
                if path.suffix == ".gz":
                    write = layers.enter_context(gzip.GzipFile("", "wb", fileobj=out, mtime=0)).write
                async with connected_store(zookeeper) as store:
                    summary = await write_backup(
                        store,
                        LedgersLayout(ledgers_root),
                        write,
                        now_ms=now_ms(),
                        progress=lambda count: live.show(f"reading: {count} nodes"),
                    )
            out.flush()
            os.fsync(out.fileno())
            size = out.tell()
        os.replace(partial, path)
        _sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise BadRequest(f"cannot write {file}: {error.strerror or error}") from error
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    finally:
        live.clear()
    return summary, size


async def run_restore(
    file: str, *, zookeeper: str, ledgers_root: str | None, merge: bool, dry_run: bool, id_margin: int, as_json: bool
) -> tuple[Backup, RestoreSummary]:
    """Verify and restore a backup. Return its description and what was restored.

    Raises BadRequest (not a backup), Corrupt (damaged), CannotRestore (nothing was written).
    """
    live = Progress(is_quiet=as_json)
    backup = verify_backup(backup_lines(file))
    layout = LedgersLayout(backup.ledgers_root if ledgers_root is None else ledgers_root)
    try:
        if not dry_run:
            await create_chroot(zookeeper)
        async with connected_store(zookeeper) as store:
            done = await restore_backup(
                store,
                layout,
                backup,
                backup_lines(file),
                merge=merge,
                dry_run=dry_run,
                id_margin=id_margin,
                progress=lambda count: live.show(f"restoring: {count} of {backup.summary.nodes} nodes"),
            )
    finally:
        live.clear()
    return backup, done


def print_backup(file: str, summary: BackupSummary, size: int, *, as_json: bool) -> None:
    if as_json:
        facts: dict[str, Any] = {
            "file": file,
            "bytes": size,
            "nodes": summary.nodes,
            "ledgers": summary.ledgers,
            "passes": summary.passes,
            "settled": summary.settled,
            "changed_count": summary.changed_count,
            "changed": list(summary.changed),
            "sha256": summary.sha256,
        }
        print_json(facts)
        return
    print(f"{file}: {summary.nodes} nodes, {summary.ledgers} of them ledgers, {size} bytes")
    if summary.settled:
        print(f"no node changed during the last pass ({summary.passes})")
    else:
        print(
            f"{summary.changed_count} nodes changed during the last of {summary.passes} passes; the backup has the "
            "values that this pass read:",
            *summary.changed,
            sep="\n  ",
        )
    print("the file contains the passwords of ledgers; only its owner may read it", file=sys.stderr)


def print_restore(file: str, backup: Backup, done: RestoreSummary, *, as_json: bool) -> None:
    if as_json:
        facts: dict[str, Any] = {
            "file": file,
            "instance_id": backup.instance_id,
            "backup_at_ms": backup.at_ms,
            "created": done.created,
            "kept": done.kept,
            "differing": done.differing,
            "next_ledger_id": done.next_ledger_id,
            "dry_run": done.dry_run,
            "left_out": done.left_out,
        }
        print_json(facts)
        return
    verb = "would create" if done.dry_run else "created"
    print(f"cluster {backup.instance_id} as of {time_text(backup.at_ms)}: {verb} {done.created} nodes")
    if done.kept:
        print(f"{done.kept} nodes existed and are unchanged, {done.differing} of them differ from the backup")
    if done.left_out:
        print(
            f"{done.left_out} nodes were not restored, because the cluster exists: administrative states of bookies, "
            "whether recovery is paused, marks. Set again what still applies (`bindery bookie members`, "
            "`bindery recovery status`)"
        )
    print(f"the next ledger id is {done.next_ledger_id}")


def backup_lines(file: str) -> Iterator[bytes]:
    """Yield the lines of a backup, compressed or not. Raises BadRequest if it cannot be read, Corrupt."""
    try:
        with open(file, "rb", buffering=2**20) as lines:
            is_compressed = lines.read(len(COMPRESSED)) == COMPRESSED
            lines.seek(0)
            yield from gzip.GzipFile("", "rb", fileobj=lines) if is_compressed else lines
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Corrupt(f"{file} is damaged: {error}") from error
    except OSError as error:
        raise BadRequest(f"cannot read {file}: {error.strerror or error}") from error


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
