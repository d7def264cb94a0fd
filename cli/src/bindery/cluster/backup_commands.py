"""`bindery cluster backups`: scheduled backups of the metadata in a directory."""

from typing import Annotated

import typer

from bindery.common.options import DEFAULT_ZOOKEEPER, LEDGERS_ROOT, AsJson, LedgersRoot, ZooKeeper, group
from bindery.common.output import emit, print_json, print_lines

app = group("Create, list and restore scheduled backups of the metadata.")

Directory = Annotated[str, typer.Argument(metavar="DIRECTORY", show_default=False, help="Directory of the backups.")]


@app.command("create")
def create(
    directory: Directory,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=1, show_default=True, help="Number of newest backups to keep.")
    ] = 48,
    upload: Annotated[
        str | None,
        typer.Option(
            "--upload",
            metavar="FOLDER",
            show_default=False,
            help="Also send the backup to the store that the files of this folder describe: url, headers, ca.crt, "
            "access-key-id, secret-access-key, region.",
        ),
    ] = None,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Back up the metadata to a new file in a directory, verify it, and delete the oldest files.

    The files are compressed, and contain the passwords of ledgers. Backups of other clusters in the directory are kept.
    The result is recorded in ZooKeeper, from where auditors export it as metrics; `bindery recovery status` shows it.

    Example: bindery cluster backups create /backups --keep 48

    Exit codes: 0 success, 1 failed, 3 the new file cannot be read back.
    """
    import asyncio

    from bindery.cluster import backups
    from bindery.cluster.backup_upload import Store

    done = asyncio.run(
        backups.create(
            directory,
            keep=keep,
            store=None if upload is None else Store.of(upload),
            zookeeper=zookeeper,
            ledgers_root=ledgers_root,
            as_json=as_json,
        )
    )
    summary = done.summary
    lines = [f"{done.backup.path}: {summary.nodes} nodes, {summary.ledgers} of them ledgers, {done.backup.size} bytes"]
    if not summary.settled:
        lines.append(f"{summary.changed_count} nodes still changed during the last of {summary.passes} passes")
    if done.place:
        lines.append(f"sent to {done.place}")
    lines += [f"deleted {name}" for name in done.deleted]
    emit(
        {
            "file": str(done.backup.path),
            "bytes": done.backup.size,
            "nodes": summary.nodes,
            "ledgers": summary.ledgers,
            "settled": summary.settled,
            "sent_to": done.place or None,
            "deleted": list(done.deleted),
        },
        lines,
        as_json=as_json,
    )


@app.command("list")
def list_backups(directory: Directory, as_json: AsJson = False) -> None:
    """List the backups in a directory, the newest first.

    Example: bindery cluster backups list /backups
    """
    from bindery.cluster import backups
    from bindery.common.tables import size_text, table

    found = list(reversed(backups.stored(directory)))
    if as_json:
        for backup in found:
            print_json(
                {
                    "name": backup.path.name,
                    "at_ms": round(backup.time.timestamp() * 1000),
                    "cluster": backup.cluster,
                    "bytes": backup.size,
                }
            )
        return
    rows = [
        {
            "backup": backup.path.name,
            "time": f"{backup.time:%Y-%m-%d %H:%M:%SZ}",
            "cluster": backup.cluster,
            "size": size_text(backup.size),
        }
        for backup in found
    ]
    print_lines(table(rows) if rows else [f"there is no backup in {directory}"])


@app.command("restore")
def restore(
    directory: Directory,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="NAME",
            envvar="BINDERY_RESTORE_NAME",
            show_envvar=True,
            help="Name of the backup; default: the newest, if all are of one cluster.",
        ),
    ] = "",
    merge: Annotated[
        bool, typer.Option("--merge", help="Add only missing nodes to a ZooKeeper that is not empty.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file and ZooKeeper; write nothing.")] = False,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    as_json: AsJson = False,
) -> None:
    """Restore the metadata of a lost ZooKeeper from the newest backup. Stop all bookies and brokers first.

    `bindery cluster restore` describes the conditions, and restores files that are elsewhere.

    Example: bindery cluster backups restore /backups --dry-run

    Exit codes: 0 success, 1 refused or failed, 3 the file is damaged.
    """
    import asyncio

    from bindery_recovery.backup.restore import ID_MARGIN_DEFAULT

    from bindery.cluster import backups
    from bindery.cluster.cluster_backup import print_restore, run_restore

    file = str(backups.newest(directory, name).path)
    found, done = asyncio.run(
        run_restore(
            file,
            zookeeper=zookeeper,
            ledgers_root=None,
            merge=merge,
            dry_run=dry_run,
            id_margin=ID_MARGIN_DEFAULT,
            as_json=as_json,
        )
    )
    print_restore(file, found, done, as_json=as_json)
