"""`bindery cluster`: what concerns the cluster as a whole."""

import json
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from bindery_metadata.cluster import ClusterInit

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The cluster as a whole.")
DEFAULT_ZOOKEEPER: Final = "127.0.0.1:2181"


async def initialize(zookeeper: str) -> "ClusterInit":
    """Make what a new cluster lacks; harmless where nothing lacks. Raises MetadataUnavailable."""
    import random

    from bindery_metadata.cluster import initialize_cluster
    from bindery_metadata.layout.layout import LedgersLayout
    from bindery_metadata.stores.zookeeper import ZooKeeperStore

    store = await ZooKeeperStore.connect(zookeeper)
    try:
        return await initialize_cluster(store, LedgersLayout(), randomness=random.SystemRandom())
    finally:
        await store.close()


async def init_cluster(zookeeper: str) -> None:
    """The same for `bindery standalone`."""
    await initialize(zookeeper)


@app.command("init")
def init(
    zookeeper: Annotated[
        str, typer.Option(metavar="HOST:PORT", envvar="BINDERY_ZOOKEEPER", help="ZooKeeper servers, comma-separated.")
    ] = DEFAULT_ZOOKEEPER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make the metadata of a new cluster in ZooKeeper. Safe to repeat."""
    import asyncio

    result = asyncio.run(initialize(zookeeper))
    if as_json:
        print(json.dumps({"instance_id": result.instance_id, "created": result.created, "found": result.found}))
        return
    print(f"cluster {result.instance_id}: made {len(result.created)} nodes, found {len(result.found)}")
    for path in result.created:
        print(f"  made {path}")


File = Annotated[str, typer.Argument(metavar="FILE", help="The backup.")]
Servers = Annotated[
    str, typer.Option("--zookeeper", metavar="HOST:PORT", envvar="BINDERY_ZOOKEEPER", help="ZooKeeper servers.")
]


@app.command("backup")
def backup(
    file: File,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file when it is there.")] = False,
    zookeeper: Servers = DEFAULT_ZOOKEEPER,
    ledgers_root: Annotated[
        str, typer.Option("--ledgers-root", metavar="PATH", help="The cluster's root znode.")
    ] = "/ledgers",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write all metadata of the cluster to a file: ledgers, cookies, topics, policies, marks. No entries.

    While the cluster works, what changed during the reading is read again, and what never came to rest is told. Keep
    the file where ZooKeeper's disks are not.

    Example: bindery cluster backup metadata-$(date +%F).jsonl

    Exit codes: 0 written, 1 not.
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
        bool, typer.Option("--merge", help="Into a ZooKeeper that holds something: add only what is missing.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file and the place; write nothing.")] = False,
    id_margin: Annotated[
        int, typer.Option("--id-margin", metavar="N", min=0, help="Ledger ids to skip behind the highest known one.")
    ] = 10_000,
    zookeeper: Servers = DEFAULT_ZOOKEEPER,
    ledgers_root: Annotated[
        str | None,
        typer.Option("--ledgers-root", metavar="PATH", help="The root znode; default: the backup's."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make the metadata of a lost ZooKeeper anew from a backup. Stop all bookies and brokers before.

    Refused where there is something already. Ledgers made after the backup are unknown then, and bookies remove what
    they hold of them: if that matters, copy the bookies' disks first. Their ids are not given again (--id-margin).

    Example: bindery cluster restore metadata-2026-01-31.jsonl --dry-run

    Exit codes: 0 done, 1 refused or not done.
    """
    import asyncio

    from bindery.cluster.cluster_backup import print_restore, run_restore

    found, done = asyncio.run(
        run_restore(
            file, zookeeper=zookeeper, ledgers_root=ledgers_root, merge=merge, dry_run=dry_run, id_margin=id_margin,
            as_json=as_json,
        )
    )  # fmt: skip
    print_restore(file, found, done, as_json=as_json)
