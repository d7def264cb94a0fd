"""`bindery bookie cookie`: whether these disks are this bookie's, and how they become so.

Id, directories and cluster come from the same settings as the bookie's own: options, BOOKIE_... variables, defaults.
"""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

if TYPE_CHECKING:
    from bindery_bookie.settings import BookieSettings

EXIT_PROBLEM: Final = 1
EXIT_USAGE: Final = 2

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Which bookie these disks are: show, adopt, retire."
)

ZooKeeper = Annotated[
    str | None,
    typer.Option(
        "--zookeeper",
        metavar="HOST:PORT",
        envvar=["BOOKIE_ZOOKEEPER", "BINDERY_ZOOKEEPER"],
        help="ZooKeeper servers. [127.0.0.1:2181]",
    ),
]
LedgersRoot = Annotated[
    str | None, typer.Option("--ledgers-root", metavar="PATH", help="The cluster's root znode. [/ledgers]")
]
Id = Annotated[str | None, typer.Option("--bookie-id", metavar="ID", help="As the bookie's own option.")]
JournalDir = Annotated[
    str | None, typer.Option("--journal-dir", metavar="DIR,..", help="As the bookie's own option; several: by commas.")
]
LedgerDir = Annotated[
    str | None, typer.Option("--ledger-dir", metavar="DIR,..", help="As the bookie's own option; several: by commas.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would be done.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("show")
def show(
    zookeeper: ZooKeeper = None,
    ledgers_root: LedgersRoot = None,
    bookie_id: Id = None,
    journal_dir: JournalDir = None,
    ledger_dir: LedgerDir = None,
    as_json: AsJson = False,
) -> None:
    """Show the cookie that settings and cluster call for, the one in ZooKeeper, and those on the disks, side by side.

    Exit codes: 0 all are the same, 1 they differ or some are missing.
    """
    from bindery.bookie.identity_tools import run_show

    settings = _settings(zookeeper, ledgers_root, bookie_id, journal_dir, ledger_dir)
    _refuse_invented(settings)
    facts, lines = run_show(settings)
    print(json.dumps(facts) if as_json else "\n".join(lines))
    if not facts["same"]:
        raise typer.Exit(EXIT_PROBLEM)


@app.command("adopt")
def adopt(
    zookeeper: ZooKeeper = None,
    ledgers_root: LedgersRoot = None,
    bookie_id: Id = None,
    journal_dir: JournalDir = None,
    ledger_dir: LedgerDir = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make these disks this bookie's: write the cookie to them and to ZooKeeper. The bookie must be stopped.

    Shows what differs first. Where it is not certain that the disks hold all that this bookie ever acknowledged, they
    go into limbo: the bookie denies nothing until it asked the others. Disks of another cluster are refused, and so is
    another number or order of directories. Exit code 1: not done.
    """
    from bindery.bookie.identity_tools import run_adopt

    settings = _settings(zookeeper, ledgers_root, bookie_id, journal_dir, ledger_dir)
    _refuse_invented(settings)
    facts, lines = run_adopt(settings, yes=yes)
    print(json.dumps(facts) if as_json else "\n".join(lines))
    if facts["plan"] and not facts["done"]:
        print("nothing was done; --yes does it", file=sys.stderr)
        raise typer.Exit(EXIT_PROBLEM)


@app.command("retire")
def retire(
    zookeeper: ZooKeeper = None,
    ledgers_root: LedgersRoot = None,
    bookie_id: Id = None,
    journal_dir: JournalDir = None,
    ledger_dir: LedgerDir = None,
    wipe_version: Annotated[
        bool, typer.Option("--wipe-version", help="Remove the VERSION files from the directories too.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Even if ledgers still name it: their copies here are lost.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --force: do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a bookie's cookie: the cluster no longer knows it. For one that is stopped for good.

    That it was draining or in maintenance is forgotten too, unless a ledger still names it; that it was removed is not.

    Refused while it is registered, and while the metadata of any ledger still name it: those have fewer copies than
    they should. With --force the latter is no hindrance; it asks first, and where nobody can be asked it needs --yes.
    Exit codes: 1 refused, or answered no; 2 --force without --yes and nobody to ask.
    """
    from bindery.bookie.identity_tools import run_retire

    if force and not yes:
        _ask_for_force()
    settings = _settings(zookeeper, ledgers_root, bookie_id, journal_dir, ledger_dir)
    facts, lines = run_retire(settings, wipe_version=wipe_version, force=force)
    print(json.dumps(facts) if as_json else "\n".join(lines))


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _ask_for_force() -> None:
    if not _is_terminal():
        print("--force gives up copies of ledgers that still name the bookie: say --yes too", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
    question = "Remove the cookie even if ledgers still name this bookie? Their copies here are given up."
    if not typer.confirm(question, err=True):
        raise typer.Exit(EXIT_PROBLEM)


def _refuse_invented(settings: "BookieSettings") -> None:
    """Raises BadRequest when directories were left to their defaults and are not there: nobody meant those."""
    from pathlib import Path

    from bindery_core.errors import BadRequest

    by_setting = {"journal_dir": settings.journal_dirs, "ledger_dir": settings.ledger_dirs}
    left = [path for name, paths in by_setting.items() if name not in settings.model_fields_set for path in paths]
    for path in left:
        if not Path(path).is_dir():
            raise BadRequest(f"no such directory; give --journal-dir and --ledger-dir, as the bookie has them: {path}")


def _settings(
    zookeeper: str | None,
    ledgers_root: str | None,
    bookie_id: str | None,
    journal_dir: str | None,
    ledger_dir: str | None,
) -> "BookieSettings":
    """Those that a bookie started with these options would have. Raises BadRequest."""
    from bindery_bookie.settings import BookieSettings

    given: dict[str, Any] = {
        "zookeeper": zookeeper,
        "ledgers_root": ledgers_root,
        "bookie_id": bookie_id,
        "journal_dir": journal_dir,
        "ledger_dir": ledger_dir,
    }
    return BookieSettings(**{name: value for name, value in given.items() if value is not None})
