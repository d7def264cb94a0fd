"""`bindery cluster`: initialize, back up, restore and accept the metadata of a cluster."""

from typing import TYPE_CHECKING, Annotated

import typer

from bindery.common.cluster_command import cluster_command
from bindery.common.options import DEFAULT_ZOOKEEPER, LEDGERS_ROOT, AsJson, LedgersRoot, Yes, ZooKeeper, group
from bindery.common.output import emit

if TYPE_CHECKING:
    from bindery_metadata.cluster import ClusterInit

    from bindery.common.operator import Cluster

app = group("Initialize, back up, restore and accept the metadata of a cluster.")


async def initialize(zookeeper: str) -> "ClusterInit":
    """Create the metadata of a cluster that does not exist yet. Raises MetadataUnavailable."""
    import random

    from bindery_metadata.cluster import initialize_cluster
    from bindery_metadata.layout.layout import LedgersLayout

    from bindery.common.operator import connected_store

    async with connected_store(zookeeper) as store:
        return await initialize_cluster(store, LedgersLayout(), randomness=random.SystemRandom())


@app.command("init")
def init(zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER, as_json: AsJson = False) -> None:
    """Create the metadata of a new cluster in ZooKeeper. Safe to repeat.

    Example: bindery cluster init --zookeeper zk-0:2181,zk-1:2181,zk-2:2181
    """
    import asyncio

    result = asyncio.run(initialize(zookeeper))
    emit(
        {"instance_id": result.instance_id, "created": result.created, "found": result.found},
        [
            f"cluster {result.instance_id}: created {len(result.created)} nodes, found {len(result.found)}",
            *(f"  created {path}" for path in result.created),
        ],
        as_json=as_json,
    )


File = Annotated[str, typer.Argument(metavar="FILE", show_default=False, help="Backup file.")]


@app.command("backup")
def backup(
    file: File,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Back up the metadata of the cluster to a file: ledgers, cookies, topics, policies, marks; no entries.

    The cluster may be running: nodes that change during the backup are read again, and the command reports those that
    still changed during the last pass. The file contains the passwords of ledgers. Store it on other disks than those
    of ZooKeeper.

    Example: bindery cluster backup metadata-$(date +%F).jsonl
    """
    import asyncio

    from bindery.cluster.cluster_backup import print_backup, run_backup

    summary, size = asyncio.run(
        run_backup(file, zookeeper=zookeeper, ledgers_root=ledgers_root, overwrite=overwrite, as_json=as_json)
    )
    print_backup(file, summary, size, as_json=as_json)


@app.command("restore")
def restore(
    file: File,
    merge: Annotated[
        bool, typer.Option("--merge", help="Add only missing nodes to a ZooKeeper that is not empty.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file and ZooKeeper; write nothing.")] = False,
    id_margin: Annotated[
        int,
        typer.Option(
            "--id-margin",
            metavar="N",
            min=0,
            show_default=True,
            help="Number of ledger ids to skip after the highest in the backup.",
        ),
    ] = 10_000,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: Annotated[
        str | None,
        typer.Option(
            "--ledgers-root", metavar="PATH", help="Root znode of the cluster; default: the one in the backup."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Restore the metadata of a lost ZooKeeper from a backup. Stop all bookies and brokers first.

    Refused if ZooKeeper already holds a cluster. Ledgers created after the backup are unknown to the restored cluster.
    Bookies that store such ledgers report them and delete nothing until `bindery cluster accept-metadata`. --id-margin
    prevents the reuse of the ids of those ledgers.

    Example: bindery cluster restore metadata-2026-01-31.jsonl --dry-run

    Exit codes: 0 success, 1 refused or failed, 3 the file is damaged.
    """
    import asyncio

    from bindery.cluster.cluster_backup import print_restore, run_restore

    found, done = asyncio.run(
        run_restore(
            file,
            zookeeper=zookeeper,
            ledgers_root=ledgers_root,
            merge=merge,
            dry_run=dry_run,
            id_margin=id_margin,
            as_json=as_json,
        )
    )
    print_restore(file, found, done, as_json=as_json)


@cluster_command(app, "accept-metadata")
async def accept_metadata(
    cluster: "Cluster",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print which ledgers would be deleted; exit code 0.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
    """Accept the metadata as it is after a suspected rollback of ZooKeeper, and give the newer ledgers up.

    Bookies that store ledgers that this metadata never knew report them, and no bookie deletes ledgers until then. This
    command removes the reports: all bookies then delete the ledgers that the metadata does not contain, for good. If
    you have newer metadata, restore it instead.

    Example: bindery cluster accept-metadata --dry-run

    Exit codes: 0 accepted, or nothing is reported, 1 refused, failed, or --yes is missing.
    """
    from bindery.cluster.accept_metadata import run_accept

    return await run_accept(cluster, dry_run=dry_run, yes=yes, as_json=as_json)
