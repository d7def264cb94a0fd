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
    from bindery_metadata.layout import LedgersLayout
    from bindery_metadata.zookeeper import ZooKeeperStore

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
