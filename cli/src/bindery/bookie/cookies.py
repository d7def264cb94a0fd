"""`bindery bookie cookie`: compare the identity of disks with the settings of a bookie, adopt disks, retire a bookie.

Id, directories and cluster come from the same settings as the bookie's own: options, BOOKIE_... variables, defaults.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bindery.common import exit_codes
from bindery.common.options import AsJson, Yes, group
from bindery.common.output import confirm, emit

if TYPE_CHECKING:
    from bindery_bookie.settings import BookieSettings


app = group("Compare, adopt or retire the identity of the disks of a bookie.")

ZooKeeper = Annotated[
    str | None,
    typer.Option(
        "--zookeeper",
        metavar="HOST:PORT,...",
        envvar=["BOOKIE_ZOOKEEPER", "BINDERY_ZOOKEEPER"],
        show_envvar=True,
        help="ZooKeeper servers; default: 127.0.0.1:2181.",
    ),
]
LedgersRoot = Annotated[
    str | None, typer.Option("--ledgers-root", metavar="PATH", help="Root znode of the cluster; default: /ledgers.")
]
Id = Annotated[
    str | None, typer.Option("--bookie-id", metavar="ID", help="Bookie id, as in the settings of the bookie.")
]
JournalDir = Annotated[
    str | None,
    typer.Option("--journal-dir", metavar="DIR,...", help="Journal directories, as in the settings of the bookie."),
]
LedgerDir = Annotated[
    str | None,
    typer.Option("--ledger-dir", metavar="DIR,...", help="Ledger directories, as in the settings of the bookie."),
]


@app.command("show")
def show(
    zookeeper: ZooKeeper = None,
    ledgers_root: LedgersRoot = None,
    bookie_id: Id = None,
    journal_dir: JournalDir = None,
    ledger_dir: LedgerDir = None,
    as_json: AsJson = False,
) -> None:
    """Compare the cookie by settings and cluster with the one in ZooKeeper and those on the disks.

    Exit codes: 0 all are the same, 3 they differ or some are missing.
    """
    from bindery.bookie.identity_tools import run_show

    settings = _settings(zookeeper, ledgers_root, bookie_id, journal_dir, ledger_dir)
    _refuse_invented(settings)
    facts, lines = run_show(settings)
    emit(facts, lines, as_json=as_json)
    if not facts["same"]:
        raise typer.Exit(exit_codes.DAMAGE)


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
    """Assign these disks to this bookie: write its cookie to them and to ZooKeeper. The bookie must be stopped.

    Prints the differences first. If it is not certain that the disks hold everything that this bookie acknowledged,
    they go into limbo: the bookie denies no entry until it has compared with the other bookies. Disks of another
    cluster are refused, and so is another number or order of directories.

    Exit codes: 0 success, 1 refused, or --yes is missing.
    """
    from bindery.bookie.identity_tools import run_adopt

    settings = _settings(zookeeper, ledgers_root, bookie_id, journal_dir, ledger_dir)
    _refuse_invented(settings)
    facts, lines = run_adopt(settings, yes=yes)
    emit(facts, lines, as_json=as_json)
    if facts["plan"] and not facts["done"]:
        print("nothing was done; to do it, add --yes", file=sys.stderr)
        raise typer.Exit(exit_codes.FAILURE)


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
        bool, typer.Option("--force", help="Even if ledgers still have copies on it: these are lost.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --force: do not ask for confirmation.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the cookie of a bookie that is stopped for good, so that the cluster no longer has a bookie of that id.

    A draining or maintenance state is cleared too, unless a ledger still names the bookie; a removal stays recorded.

    Refused while the bookie is registered, and while the metadata of any ledger names it: such a ledger is
    under-replicated. --force removes the cookie of a bookie that ledgers name; it asks for confirmation, and without a
    terminal it needs --yes.

    Exit codes: 0 success, 1 refused or not confirmed, 2 --force without --yes and without a terminal.
    """
    from bindery.bookie.identity_tools import run_retire

    if force and not yes:
        _confirm_force(as_json=as_json)
    settings = _settings(zookeeper, ledgers_root, bookie_id, journal_dir, ledger_dir)
    facts, lines = run_retire(settings, wipe_version=wipe_version, force=force)
    emit(facts, lines, as_json=as_json)


def _confirm_force(*, as_json: bool) -> None:
    confirm(
        "Remove the cookie even if ledgers still name this bookie? Their copies on it are lost.",
        unattended="--force gives up copies of ledgers that still name the bookie: without a terminal, add --yes",
        as_json=as_json,
    )


def _refuse_invented(settings: "BookieSettings") -> None:
    """Raise BadRequest if default directories are used and do not exist: they are not the bookie's."""
    from pathlib import Path

    from bindery_core.errors import BadRequest

    by_setting = {"journal_dir": settings.journal_dirs, "ledger_dir": settings.ledger_dirs}
    left = [path for name, paths in by_setting.items() if name not in settings.model_fields_set for path in paths]
    for path in left:
        if not Path(path).is_dir():
            raise BadRequest(f"no such directory: {path}. Pass the bookie's own --journal-dir and --ledger-dir")


def _settings(
    zookeeper: str | None,
    ledgers_root: str | None,
    bookie_id: str | None,
    journal_dir: str | None,
    ledger_dir: str | None,
) -> "BookieSettings":
    """Settings as a bookie started with these options has them. Raises BadRequest."""
    from bindery_bookie.settings import BookieSettings

    given: dict[str, Any] = {
        "zookeeper": zookeeper,
        "ledgers_root": ledgers_root,
        "bookie_id": bookie_id,
        "journal_dir": journal_dir,
        "ledger_dir": ledger_dir,
    }
    return BookieSettings(**{name: value for name, value in given.items() if value is not None})
