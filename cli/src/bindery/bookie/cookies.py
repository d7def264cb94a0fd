"""`bindery bookie cookie`: compare the identity of disks with the settings of a bookie, adopt disks, retire a bookie.

The bookie id, directories and cluster come from the settings of the bookie: options, BOOKIE_... variables, defaults.
"""

import random
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from bindery.common import exit_codes, operator
from bindery.common.options import AsJson, Yes, group
from bindery.common.output import confirm, emit

if TYPE_CHECKING:
    from bindery_bookie.offline.disk_identity import Comparison, DiskIdentity
    from bindery_bookie.settings import BookieSettings
    from bindery_core.formats.cookie import Cookie

T = TypeVar("T")

app = group("Compare, adopt or retire the identity of the disks of a bookie.")

ZooKeeper = Annotated[
    str | None,
    typer.Option(
        "--zookeeper",
        metavar="HOST:PORT,...[/CHROOT]",
        envvar=["BOOKIE_ZOOKEEPER", "BINDERY_ZOOKEEPER"],
        show_envvar=True,
        help="ZooKeeper servers, with a chroot if the cluster has one; default: 127.0.0.1:2181.",
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
    """Compare the cookie that the settings of the bookie require with those in ZooKeeper and on the disks.

    Exit codes: 0 all are the same, 3 they differ or some are missing.
    """
    settings = _settings(zookeeper, ledgers_root, bookie_id, journal_dir, ledger_dir)
    _refuse_invented(settings)
    comparison = _run(settings, lambda identity: identity.compare())
    lines = _lines(comparison)
    if comparison.differences():
        lines.append(f"to assign these disks to this bookie: {comparison.claim.command('adopt')}")
    emit(_facts(comparison), lines, as_json=as_json)
    if comparison.differences():
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
    they go into limbo: the bookie does not report an entry as missing until it has compared its entries with the other
    bookies. Refused for disks of another cluster, and for another number or order of directories.

    Exit codes: 0 success, 1 refused, or --yes is missing.
    """
    settings = _settings(zookeeper, ledgers_root, bookie_id, journal_dir, ledger_dir)
    _refuse_invented(settings)
    adoption = _run(settings, lambda identity: identity.adopt(apply=yes))
    plan = adoption.plan
    did = "done" if yes else "would be done"
    steps = [f"{did}: {step}" for step in plan] or ["nothing to do: the cookies of these disks are as expected"]
    facts = _facts(adoption.comparison) | {"plan": list(plan), "done": yes and bool(plan)}
    emit(facts, [*_lines(adoption.comparison), *steps], as_json=as_json)
    if plan and not yes:
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
        bool, typer.Option("--force", help="Retire it even if ledgers still have copies on it, which are lost.")
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
    if force and not yes:
        _confirm_force(as_json=as_json)
    settings = _settings(zookeeper, ledgers_root, bookie_id, journal_dir, ledger_dir)
    done = _run(settings, lambda identity: identity.retire(wipe_version=wipe_version, force=force))
    intent = done.cleared_intent and done.cleared_intent.value
    lines = [f"{done.bookie_id}: {'cookie removed' if done.had_cookie else 'it had no cookie'}"]
    if intent:
        lines.append(f"its state {intent} was cleared: a later bookie with this id starts as an ordinary one")
    lines += [f"removed {directory}/current/VERSION" for directory in done.wiped]
    if done.ledgers_count:
        lines.append(f"{done.ledgers_count} ledgers still name it")
    facts = {
        "bookie_id": done.bookie_id,
        "removed": done.had_cookie,
        "ledgers": done.ledgers_count,
        "wiped": list(done.wiped),
        "forgotten_intent": intent,
    }
    emit(facts, lines, as_json=as_json)


def _run(settings: "BookieSettings", work: "Callable[[DiskIdentity], Awaitable[T]]") -> T:
    """Connect to ZooKeeper and return the result of `work`. Raises BadRequest, MetadataUnavailable."""
    import asyncio

    from bindery_bookie.offline.disk_identity import DiskIdentity
    from bindery_metadata.layout.layout import LedgersLayout
    from bindery_metadata.ledgers.ledger_manager import LedgerManager

    from bindery.bookie.offline_output import results_only

    async def main() -> T:
        async with operator.connected_store(settings.zookeeper) as store:
            results_only()
            layout = LedgersLayout(settings.ledgers_root)
            ledgers = LedgerManager(store, layout, randomness=random.SystemRandom())
            return await work(DiskIdentity(settings, store, layout, ledgers, clock_ms=operator.now_ms))

    return asyncio.run(main())


def _facts(comparison: "Comparison") -> dict[str, Any]:
    wrong = comparison.differences()
    return {
        "same": not wrong,
        "expected": _cookie_json(comparison.expected),
        "found": {
            found.where: _cookie_json(found.cookie) if found.cookie else {"problem": found.problem or "none"}
            for found in comparison.found.values()
        },
        "differences": {
            comparison.found[name].where: [
                {"field": each.field, "expected": each.expected, "found": each.found} for each in problems
            ]
            for name, problems in wrong.items()
        },
    }


def _lines(comparison: "Comparison") -> list[str]:
    from bindery_core.formats.cookie import describe

    lines = ["expected, by settings and cluster:"]
    expected = _cookie_json(comparison.expected)
    lines += [f"  {name:<20} {value}" for name, value in expected.items() if value is not None]
    wrong = comparison.differences()
    for name, found in comparison.found.items():
        if name not in wrong:
            lines.append(f"{found.where}: the same")
        else:
            lines += [f"{found.where}:", *(f"  {line}" for line in describe(wrong[name]).splitlines())]
    return lines


def _cookie_json(cookie: "Cookie") -> dict[str, Any]:
    return {
        "bookie_id": cookie.bookie_id,
        "journal_dirs": ",".join(cookie.journal_dirs),
        "ledger_dirs": ",".join(cookie.ledger_dirs),
        "index_dirs": None if cookie.index_dirs is None else ",".join(cookie.index_dirs),
        "instance_id": cookie.instance_id,
    }


def _confirm_force(*, as_json: bool) -> None:
    confirm(
        "Remove the cookie even if ledgers still name this bookie? Their copies on it are lost.",
        unattended="--force gives up copies of ledgers that still name the bookie: without a terminal, add --yes",
        as_json=as_json,
    )


def _refuse_invented(settings: "BookieSettings") -> None:
    """Raise BadRequest if a default directory is used and does not exist: the bookie then uses another one."""
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
    """Return the settings of a bookie that is started with these options. Raises BadRequest."""
    from bindery_bookie.settings import BookieSettings

    given: dict[str, Any] = {
        "zookeeper": zookeeper,
        "ledgers_root": ledgers_root,
        "bookie_id": bookie_id,
        "journal_dir": journal_dir,
        "ledger_dir": ledger_dir,
    }
    return BookieSettings(**{name: value for name, value in given.items() if value is not None})
