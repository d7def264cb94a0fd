"""Keep scheduled backups of the metadata in a directory: create, list, delete old ones, and restore the newest.

A backup is the file of `bindery cluster backup`, compressed, and named by its time and its cluster:

    metadata-<time in UTC, 20261130T051200Z>-<first 8 characters of the instance id>.jsonl.gz

Each new file is read back and verified before an older one is deleted. Only files of the same cluster are deleted: if
ZooKeeper has lost its data and somebody has initialized a new cluster in it, the backups of the old one remain, however
many the new one has.

The result of each attempt is recorded in the metadata (`bindery_metadata.recovery.last_backup`), from which auditors
and bookies make metrics.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bindery_core.errors import BadRequest, BinderyError, NotThere
from bindery_metadata.recovery.last_backup import LastBackup, LastBackupStore
from bindery_recovery.backup.backup import BackupSummary, verify_backup

from bindery.cluster.backup_upload import Store
from bindery.cluster.cluster_backup import backup_lines, run_backup
from bindery.common.operator import connected_store, now_ms

NAME: Final = re.compile(r"metadata-(\d{8}T\d{6}Z)-([0-9a-f]{8})\.jsonl\.gz")
"""Names of backups: time in UTC, and the beginning of the cluster's instance id."""
TIME: Final = "%Y%m%dT%H%M%SZ"
UNFINISHED: Final = "unfinished.jsonl.gz"
"""Name of a backup until it is verified."""


class NoBackup(NotThere):
    """There is no backup, or more than one cluster has backups."""

    code = "no_backup"


@dataclass(frozen=True, slots=True, order=True)
class StoredBackup:
    """A file in the directory; they sort by time."""

    time: datetime
    cluster: str
    """The first 8 characters of the instance id."""
    path: Path
    size: int

    @classmethod
    def of(cls, path: Path) -> "StoredBackup | None":
        """Return the backup in a file; None if the file has another name."""
        if not (match := NAME.fullmatch(path.name)):
            return None
        try:
            time = datetime.strptime(match[1], TIME).replace(tzinfo=UTC)
        except ValueError:
            return None
        return cls(time, match[2], path, path.stat().st_size)


@dataclass(frozen=True, slots=True)
class Created:
    """The result of `create`."""

    backup: StoredBackup
    summary: BackupSummary
    deleted: tuple[str, ...]
    """Names of the older backups that were deleted."""
    place: str
    """Where the backup was sent to; empty: nowhere."""


def stored(directory: str) -> list[StoredBackup]:
    """Return the backups, the oldest first. Raises BadRequest if the directory cannot be read."""
    try:
        return sorted(one for path in Path(directory).iterdir() if (one := StoredBackup.of(path)) is not None)
    except OSError as error:
        raise BadRequest(f"cannot read {directory}: {error.strerror or error}") from error


def newest(directory: str, name: str = "") -> StoredBackup:
    """Return the backup called `name`; without a name the newest one.

    Raises NoBackup if there is none, and without a name also if there are backups of more than one cluster: the newest
    one may be that of a cluster that was initialized by mistake.
    """
    found = stored(directory)
    if name:
        for backup in found:
            if backup.path.name == name:
                return backup
        raise NoBackup(
            f"there is no backup {name} in {directory}; `bindery cluster backups list` shows all", count=len(found)
        )
    if not found:
        raise NoBackup(f"there is no backup in {directory}")
    if len({backup.cluster for backup in found}) > 1:
        last = {backup.cluster: backup.path.name for backup in found}
        raise NoBackup(
            f"{directory} has backups of {len(last)} clusters; name the one to restore. The newest ones: "
            f"{', '.join(last.values())}"
        )
    return found[-1]


async def create(
    directory: str, *, keep: int, store: Store | None, zookeeper: str, ledgers_root: str, as_json: bool
) -> Created:
    """Write a backup, send it to `store`, and delete all but the `keep` newest ones of the same cluster.

    The result is recorded, also a failure. Raises BadRequest (cannot be written), Corrupt (cannot be read back),
    NotUploaded, MetadataUnavailable.
    """
    began_ms = now_ms()
    try:
        done = await _create(
            directory, keep=keep, store=store, zookeeper=zookeeper, ledgers_root=ledgers_root, as_json=as_json
        )
    except BinderyError as error:
        with suppress(BinderyError):  # ZooKeeper may be the reason; the age of the last backup tells it then
            async with connected_store(zookeeper) as metadata:
                await LastBackupStore(metadata).failed(max(began_ms, now_ms()), str(error))
        raise
    last = LastBackup(
        ended_ms=now_ms(),
        name=done.backup.path.name,
        size=done.backup.size,
        nodes=done.summary.nodes,
        ledgers=done.summary.ledgers,
        settled=done.summary.settled,
        is_uploaded=bool(done.place),
    )
    async with connected_store(zookeeper) as metadata:
        await LastBackupStore(metadata).succeeded(last)
    return done


async def _create(
    directory: str, *, keep: int, store: Store | None, zookeeper: str, ledgers_root: str, as_json: bool
) -> Created:
    unfinished = Path(directory) / UNFINISHED
    at = datetime.fromtimestamp(now_ms() / 1000, UTC)
    summary, _ = await run_backup(
        str(unfinished), zookeeper=zookeeper, ledgers_root=ledgers_root, overwrite=True, as_json=as_json
    )
    instance_id = verify_backup(backup_lines(str(unfinished))).instance_id
    path = unfinished.with_name(f"metadata-{at:{TIME}}-{instance_id[:8]}.jsonl.gz")
    try:
        unfinished.rename(path)
    except OSError as error:
        raise BadRequest(f"cannot write {path}: {error.strerror or error}") from error
    backup = StoredBackup.of(path)
    if backup is None:
        raise BadRequest("the instance id of the cluster is not a UUID", instance_id=instance_id)
    place = "" if store is None else store.put(path)
    return Created(backup, summary, _delete_old(directory, backup, keep=keep), place)


def _delete_old(directory: str, newest_one: StoredBackup, *, keep: int) -> tuple[str, ...]:
    """Delete all but the `keep` newest backups of this cluster. Return the names of those that were deleted."""
    same: Sequence[StoredBackup] = [one for one in stored(directory) if one.cluster == newest_one.cluster]
    deleted = []
    for one in same[:-keep]:
        try:
            one.path.unlink(missing_ok=True)
        except OSError as error:
            raise BadRequest(f"cannot delete the old backup {one.path}: {error.strerror or error}") from error
        deleted.append(one.path.name)
    return tuple(deleted)
