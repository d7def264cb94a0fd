"""`bindery ledgers`: commands on all ledgers of the cluster."""

from typing import TYPE_CHECKING, Annotated

import typer

from bindery.common.cluster_command import cluster_command
from bindery.common.operator import parse_duration
from bindery.common.options import AsJson, Yes, group

if TYPE_CHECKING:
    from bindery.common.operator import Cluster


app = group("Find and delete orphaned ledgers.")


@app.callback()
def ledgers() -> None:
    """Find and delete orphaned ledgers. `bindery ledger` has the commands on a single ledger."""


@cluster_command(app, "orphans")
async def orphans(
    cluster: "Cluster",
    delete: Annotated[
        bool, typer.Option("--delete", help="Fence and delete the orphaned ledgers; needs --yes.")
    ] = False,
    yes: Yes = False,
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than", metavar="TIME", show_default=True, help="Minimum age of a ledger: 90s, 10m, 1h, 2d."
        ),
    ] = "1h",
    everything: Annotated[
        bool, typer.Option("--all", help="Include ledgers of other applications, which may be in use.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """List the ledgers that no topic, subscription or schema refers to, and delete them on request.

    A broker that is killed while it creates a ledger leaves an orphan. Only ledgers that brokers created are listed,
    and none that may be in use. If the metadata of any topic cannot be read, the command fails. With --json the last
    line is the summary.

    Example: bindery ledgers orphans --delete --yes --older-than 1d

    Exit codes: 0 success, 1 a ledger was not deleted, or --delete without --yes found some.
    """
    from bindery.ledger.orphans import run_orphans

    return await run_orphans(
        cluster,
        delete=delete,
        yes=yes,
        older_than_s=parse_duration(older_than),
        everything=everything,
        as_json=as_json,
    )
