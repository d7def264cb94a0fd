"""Options and arguments that several commands share, and the constructor of command groups."""

from typing import Annotated, Final

import typer

from bindery.common.url_options import UrlGroup

DEFAULT_ZOOKEEPER: Final = "127.0.0.1:2181"
LEDGERS_ROOT: Final = "/ledgers"
HELP_NAMES: Final = {"help_option_names": ["-h", "--help"]}

ZooKeeper = Annotated[
    str,
    typer.Option(
        "--zookeeper",
        metavar="HOST:PORT,...[/CHROOT]",
        envvar="BINDERY_ZOOKEEPER",
        show_envvar=True,
        show_default=True,
        help="ZooKeeper servers, and the chroot if the cluster has one.",
    ),
]
LedgersRoot = Annotated[
    str, typer.Option("--ledgers-root", metavar="PATH", show_default=True, help="Root znode of the cluster.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one value per line; errors too.")]
Yes = Annotated[bool, typer.Option("--yes", help="Make the changes; default: only print them.")]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason, shown to other operators.")]
LedgerArgument = Annotated[int, typer.Argument(metavar="LEDGER", min=0, show_default=False, help="Ledger id.")]


def group(summary: str, *, no_args_is_help: bool = True) -> typer.Typer:
    """Return an empty command group. `summary`: one line, shown by the parent's help."""
    return typer.Typer(
        cls=UrlGroup,
        no_args_is_help=no_args_is_help,
        rich_markup_mode=None,
        context_settings=HELP_NAMES,
        help=summary,
    )
