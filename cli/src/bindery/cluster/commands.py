"""`bindery cluster`: initialize, back up, restore, accept and protect the metadata of a cluster."""

from typing import TYPE_CHECKING, Annotated

import typer

from bindery.cluster import backup_commands
from bindery.common.cluster_command import cluster_command
from bindery.common.options import DEFAULT_ZOOKEEPER, LEDGERS_ROOT, AsJson, LedgersRoot, Yes, ZooKeeper, group
from bindery.common.output import emit

if TYPE_CHECKING:
    from bindery_metadata.cluster import ClusterInit

    from bindery.common.operator import Cluster

app = group("Initialize, back up, restore, accept and protect the metadata of a cluster.")
acls = group("Show and replace the access lists of the cluster's nodes in ZooKeeper.")
app.add_typer(acls, name="acls")
app.add_typer(backup_commands.app, name="backups")


async def initialize(zookeeper: str) -> "ClusterInit":
    """Create the metadata of a cluster that does not exist yet, and the chroot. Raises MetadataUnavailable."""
    import random

    from bindery_metadata.cluster import initialize_cluster
    from bindery_metadata.layout.layout import LedgersLayout

    from bindery.common.operator import connected_store, create_chroot

    await create_chroot(zookeeper)
    async with connected_store(zookeeper) as store:
        return await initialize_cluster(store, LedgersLayout(), randomness=random.SystemRandom())


@app.command("init")
def init(zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER, as_json: AsJson = False) -> None:
    """Create the metadata of a new cluster in ZooKeeper, and its chroot if it has one. Safe to repeat.

    Example: bindery cluster init --zookeeper zk-0:2181,zk-1:2181,zk-2:2181/messaging
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


NodesRate = Annotated[
    float,
    typer.Option(
        "--rate", metavar="NODES", min=0, show_default=True, help="Maximum number of nodes per second; 0: no limit."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would change; exit code 0.")]


@acls.command("show")
def acls_show(
    rate: NodesRate = 5000,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Count the nodes of the cluster by access list.

    open: all clients may change them. creator, shared: see `apply`. previous: as these, for another line of the
    credentials file than the first. other: they name other identities. unreadable: not with these credentials.

    Example: BINDERY_ZOOKEEPER_CREDENTIALS_FILE=zk-credentials bindery cluster acls show
    """
    import asyncio

    from bindery.cluster.access_lists import run_show

    raise typer.Exit(asyncio.run(run_show(zookeeper, ledgers_root, rate=rate, as_json=as_json)))


@acls.command("apply")
def acls_apply(
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            metavar="creator|shared",
            show_default=True,
            help="New access list: creator lets only clients with the credentials read and change nodes, shared lets "
            "all clients read.",
        ),
    ] = "creator",
    allow_open_sessions: Annotated[
        bool,
        typer.Option(
            "--allow-open-sessions",
            help="Continue although connected processes create open nodes. They must present the credentials.",
        ),
    ] = False,
    rate: NodesRate = 1000,
    dry_run: DryRun = False,
    yes: Yes = False,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Restrict all nodes of the cluster to the first credentials of BINDERY_ZOOKEEPER_CREDENTIALS_FILE.

    The cluster may be running if all its processes present these credentials. The command can be interrupted and run
    again. Nodes whose lists name other identities are reported and left as they are.

    Example: bindery cluster acls apply --mode creator --dry-run

    Exit codes: 0 all nodes have the list, or --dry-run, 1 nodes are left, refused, failed, or --yes is missing.
    """
    import asyncio

    from bindery_core.errors import BadRequest
    from bindery_metadata.stores.access_lists import NewNodes

    from bindery.cluster.access_lists import run_apply

    if mode not in (NewNodes.CREATOR.value, NewNodes.SHARED.value):
        raise BadRequest("option --mode must be one of creator, shared", given=mode)
    raise typer.Exit(
        asyncio.run(
            run_apply(
                zookeeper,
                ledgers_root,
                NewNodes(mode),
                rate=rate,
                dry_run=dry_run,
                yes=yes,
                allow_open_sessions=allow_open_sessions,
                as_json=as_json,
            )
        )
    )


@acls.command("open")
def acls_open(
    rate: NodesRate = 1000,
    dry_run: DryRun = False,
    yes: Yes = False,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Allow every client of ZooKeeper to read and change all nodes of the cluster: the way back from `apply`.

    Set new_nodes of all processes to `open` first; keep their credentials until this command is done.

    Example: bindery cluster acls open --dry-run

    Exit codes: 0 all nodes are open, or --dry-run, 1 nodes are left, failed, or --yes is missing.
    """
    import asyncio

    from bindery_metadata.stores.access_lists import NewNodes

    from bindery.cluster.access_lists import run_apply

    raise typer.Exit(
        asyncio.run(
            run_apply(
                zookeeper,
                ledgers_root,
                NewNodes.OPEN,
                rate=rate,
                dry_run=dry_run,
                yes=yes,
                allow_open_sessions=True,
                as_json=as_json,
            )
        )
    )
