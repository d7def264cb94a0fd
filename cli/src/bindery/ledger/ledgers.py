"""`bindery ledgers`: all ledgers of the cluster at once."""

from typing import TYPE_CHECKING, Annotated

import typer

from bindery.cluster.commands import DEFAULT_ZOOKEEPER
from bindery.common.operator import LEDGERS_ROOT, AsJson, LedgersRoot, ZooKeeper, parse_duration, run_on

if TYPE_CHECKING:
    from bindery.common.operator import Cluster


app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="All ledgers at once: orphans.")


@app.callback()
def ledgers() -> None:
    """All ledgers of the cluster at once; a single one: `bindery ledger`."""


@app.command("orphans")
def orphans(
    delete: Annotated[bool, typer.Option("--delete", help="Delete them, with --yes; fenced first.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would be deleted.")] = False,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="Leave younger ledgers alone: 90s, 10m, 1h, 2d.")
    ] = "1h",
    everything: Annotated[
        bool, typer.Option("--all", help="Those of other applications too: they may be in use there!")
    ] = False,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """List the ledgers that no topic, subscription or schema refers to; delete them if told so.

    Brokers leave some when they are killed at the wrong moment. Only ledgers that brokers made are listed; where there
    is doubt whether one is in use it is not. If a single topic cannot be read nothing is called an orphan.

    Example: bindery ledgers orphans --delete --yes --older-than 1d

    Exit codes: 0 done, 1 not done, or --delete without --yes.
    """

    async def work(cluster: "Cluster") -> int:
        from bindery.ledger.orphans import run_orphans

        return await run_orphans(
            cluster, delete=delete, yes=yes, older_than_s=parse_duration(older_than), everything=everything,
            as_json=as_json,
        )  # fmt: skip

    if code := run_on(zookeeper, ledgers_root, work):
        raise typer.Exit(code)
