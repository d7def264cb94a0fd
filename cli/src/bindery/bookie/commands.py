"""`bindery bookie`: inspect one bookie. Each command imports what it needs when it runs."""

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from bindery.bookie import cookies, membership_commands, online, racks
from bindery.common import exit_codes
from bindery.common.credentials import PasswordFile, read_password
from bindery.common.options import AsJson, LedgerArgument, Yes, group
from bindery.common.output import emit, print_json, report_error

app = group("Inspect, check, repair and remove bookies.")
journal_app = group("Show the journal of a bookie.")
log_app = group("Show the entry logs of a bookie.")
index_app = group("Show the index of a bookie.")
app.add_typer(journal_app, name="journal")
app.add_typer(log_app, name="log")
app.add_typer(index_app, name="index")
app.add_typer(cookies.app, name="cookie")
app.add_typer(racks.app, name="rack")
online.add_to(app)
membership_commands.add_to(app)


@app.callback()
def bookie() -> None:
    """Inspect, check, repair and remove bookies.

    Commands with --url read from a running bookie over HTTP. Commands with DIR read the files of a stopped bookie, or
    a copy of them; only rebuild-index and salvage change files. DIR is a configured directory, its `current`, or the
    parent of several. Commands with BOOKIE read and change the metadata of the cluster.
    """


Directory = Annotated[str, typer.Argument(metavar="DIR", show_default=False, help="Directory of a bookie.")]
Directories = Annotated[
    list[str],
    typer.Argument(metavar="DIR...", show_default=False, help="Journal and ledger directories of a bookie."),
]
LedgerOption = Annotated[int | None, typer.Option("--ledger", metavar="LEDGER", min=0, help="Only this ledger.")]


@app.command("ledgers")
def ledgers(directories: Directories, as_json: AsJson = False) -> None:
    """List the ledgers in a directory: entries, last entry, LAC, fenced or not, limbo.

    If the journal directory is given too, the list includes entries that were not flushed yet. If the index is missing
    or damaged, the list is built from the entry logs.

    Example: bindery bookie ledgers data/bookie-0
    """
    from bindery_bookie.offline.places import find_ledgers
    from bindery_bookie.offline.views import opened_shard

    from bindery.bookie.offline_output import results_only, warn_if_running

    results_only()
    places = find_ledgers(directories)
    warn_if_running(places)
    count = 0
    for pair in places:
        with opened_shard(pair) as shard:
            _warn_about_index(shard)
            for ledger_id in shard.ledger_ids():
                facts = shard.ledger_facts(ledger_id)
                if facts is None:
                    continue
                count += 1
                if as_json:
                    print_json(facts)
                    continue
                if count == 1:
                    print(f"{'ledger':>10} {'entries':>10} {'last':>10} {'lac':>10} {'bytes':>14}  state")
                state = [name for name in ("fenced", "limbo") if facts[name]]
                if facts["entries_in_journal_only"]:
                    state.append(f"{facts['entries_in_journal_only']} in the journal only")
                numbers = f"{facts['ledger_id']:>10} {facts['entries']:>10} {facts['last_entry_id']:>10}"
                print(f"{numbers} {facts['lac']:>10} {facts['size']:>14}  {', '.join(state)}".rstrip())
    if not count and not as_json:
        print("no ledgers", file=sys.stderr)


@app.command("entry")
def entry(
    directory: Directory,
    ledger: LedgerArgument,
    entry_id: Annotated[int, typer.Argument(metavar="ENTRY", min=0, show_default=False, help="Entry id.")],
    journal: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Journal directory, which has the entries that are not flushed yet."),
    ] = None,
    as_raw: Annotated[
        bool, typer.Option("--raw", help="Write the bytes of the entry, with header and digest.")
    ] = False,
    as_hex: Annotated[bool, typer.Option("--hex", help="Print the bytes of the entry as hex.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Decode the payload as messages of a topic.")] = False,
    password_file: PasswordFile = None,
    as_json: AsJson = False,
) -> None:
    """Show one entry: location, digests, header and payload.

    Two digests are verified: the digest of the bookie and the digest of the writer. A digest of type mac is verified
    with the password of the ledger.

    Example: bindery bookie entry data/bookie-0 7 12 --decode

    Exit codes: 0 the entry is good, 1 the entry does not exist, 3 it is damaged.
    """
    from bindery_core.errors import NoSuchEntry

    if as_raw + as_hex + (as_json or decode) > 1:
        raise typer.BadParameter("--raw, --hex, and --json or --decode exclude each other")

    from bindery_bookie.offline.places import find_ledgers
    from bindery_bookie.offline.views import opened_shard

    from bindery.bookie.entries import entry_facts, entry_lines
    from bindery.bookie.offline_output import results_only, warn_if_running

    results_only()
    places = find_ledgers([directory] if journal is None else [directory, journal])
    warn_if_running(places)
    for pair in places:
        with opened_shard(pair) as shard:
            _warn_about_index(shard)
            found = shard.find(ledger, entry_id)
        if found is None:
            continue
        if as_raw:
            sys.stdout.buffer.write(found.body)
            sys.stdout.buffer.flush()
        elif as_hex:
            print(found.body.hex())
        else:
            facts = entry_facts(found, password=read_password(password_file), decode=decode)
            emit(facts, [] if as_json else entry_lines(facts), as_json=as_json)
        if found.problem:
            report_error(
                f"the entry is damaged: {found.problem}", code="damaged", exit_code=exit_codes.DAMAGE, as_json=as_json
            )
            raise typer.Exit(exit_codes.DAMAGE)
        return
    raise NoSuchEntry("no such entry in these directories", ledger_id=ledger, entry_id=entry_id)


@journal_app.command("dump")
def journal_dump(
    target: Annotated[str, typer.Argument(metavar="DIR|FILE", help="Directory of a journal, or one of its files.")],
    groups: Annotated[bool, typer.Option("--groups", help="Print groups only, without their records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a journal: files, groups and records, and damaged regions. One fdatasync makes one group durable.

    A torn end is not damage, because it was never acknowledged.

    Example: bindery bookie journal dump data/bookie-0/journal --groups

    Exit codes: 0 success, 3 damage found.
    """
    from bindery_bookie.offline.dumps import dump_journal, journal_files
    from bindery_bookie.offline.places import ReadOnlyDisk

    from bindery.bookie.offline_output import results_only

    results_only()
    disk = ReadOnlyDisk()
    files = journal_files(target, disk)
    _dump((facts for path, at in files for facts in dump_journal(path, at, disk, records=not groups)), as_json)


@log_app.command("dump")
def log_dump(
    target: Annotated[str, typer.Argument(metavar="DIR|FILE", help="Ledger directory, or an entry log.")],
    log: Annotated[
        str | None, typer.Argument(metavar="[LOG]", show_default=False, help="Log id in hex; default: all logs.")
    ] = None,
    ledger: LedgerOption = None,
    as_map: Annotated[bool, typer.Option("--map", help="Print only the number of bytes of each ledger.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the records of entry logs in the order of their offsets, and the damaged regions between them.

    Example: bindery bookie log dump data/bookie-0/ledgers 1f --ledger 7

    Exit codes: 0 success, 3 damage found.
    """
    from bindery_bookie.offline.dumps import dump_log, dump_log_map, log_files
    from bindery_bookie.offline.places import ReadOnlyDisk

    from bindery.bookie.offline_output import results_only

    results_only()
    disk = ReadOnlyDisk()
    files = log_files(target, log)
    if as_map:
        _dump((facts for directory, at in files for facts in dump_log_map(directory, at, disk)), as_json)
    else:
        _dump((facts for directory, at in files for facts in dump_log(directory, at, disk, ledger_id=ledger)), as_json)


@index_app.command("dump")
def index_dump(
    directory: Directory,
    ledger: LedgerOption = None,
    runs: Annotated[
        bool,
        typer.Option("--runs/--no-runs", show_default=True, help="Print the runs of entries with their locations."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Print the index: the ledgers, and runs of entries with their locations in the entry logs.

    The index is not verified; `bindery bookie check` does that.
    """
    from bindery_bookie.offline.dumps import dump_index
    from bindery_bookie.offline.places import find_ledgers, opened_index
    from bindery_core.errors import NotThere
    from bindery_core.ids import LedgerId

    from bindery.bookie.offline_output import results_only, warn_if_running

    results_only()
    places = find_ledgers([directory])
    warn_if_running(places)
    is_known = ledger is None
    for pair in places:
        assert pair.ledgers is not None
        with opened_index(pair.ledgers, verify=False) as index:
            if index is None:
                raise NotThere(
                    f"no index: the bookie builds it when it starts, or run `bindery bookie rebuild-index {directory}`"
                )
            is_known = is_known or index.ledger_row(LedgerId(ledger or 0)) is not None
            _dump(dump_index(index, ledger_id=ledger, runs=runs), as_json)
    if not is_known:
        raise NotThere("no such ledger in this index", ledger_id=ledger)


@app.command("check")
def check(directories: Directories, as_json: AsJson = False) -> None:
    """Check the files of a stopped bookie: journal, LastLogMark, entry logs, index, and their consistency.

    Changes no file. Also checks a copy of the files, and files without an index. Damaged bytes of an entry log that
    hold no live entry are reported as `dead` and do not change the exit code. With --json the last line is the summary.

    Example: bindery bookie check data/bookie-0

    Exit codes: 0 sound, 1 the files cannot be checked, 3 damage found.
    """
    from bindery.bookie.check_command import run_check

    if not run_check(directories, as_json=as_json):
        raise typer.Exit(exit_codes.DAMAGE)


@app.command("rebuild-index")
def rebuild_index(
    directory: Directory,
    discard: Annotated[
        bool, typer.Option("--discard", help="Delete the old index; default: keep it as index.old-TIME.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the index of a stopped bookie from its entry logs.

    The new index replaces the old one when it is complete. A bookie does the same when it starts with an index that is
    lost or older than LastLogMark. The lock of LevelDB protects the index of a bookie that is running.

    Example: bindery bookie rebuild-index data/bookie-0
    """
    from bindery_bookie.offline.rebuild_index import rebuild

    from bindery.bookie.offline_output import results_only
    from bindery.common.operator import now_ms

    results_only()
    for facts in rebuild(directory, discard=discard, now_ms=now_ms()):
        if as_json:
            print_json(facts)
        else:
            kept = f", the old one is {facts['kept']}" if facts["kept"] else ""
            print(f"{facts['path']}: {facts['ledgers']} ledgers, from {facts['entries']} entries in the logs{kept}")


@app.command("salvage")
def salvage(
    directories: Directories,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Move damaged files aside that prevent a bookie from starting: LastLogMark, or a journal damaged in the middle.

    The bookie must be stopped. Files are moved to `quarantine` in the ledger directory and none is deleted. The shard
    enters limbo: after the next start the bookie fetches the lost entries from other bookies, and until then it does
    not report entries as missing. Restore the files instead if you have a copy of them.

    Example: bindery bookie salvage data/bookie-0 --yes

    Exit codes: 0 success or nothing to salvage, 1 there are files to salvage, and --yes is missing.
    """
    from bindery_bookie.offline.salvage import run_salvage

    from bindery.bookie.offline_output import results_only, step_lines
    from bindery.common.operator import now_ms

    results_only()
    count = 0
    for facts in run_salvage(directories, yes=yes, now_ms=now_ms()):
        count += 1
        emit(facts, step_lines(facts), as_json=as_json)
    if count and not yes:
        print("nothing was changed; pass --yes to make the changes", file=sys.stderr)
        raise typer.Exit(exit_codes.FAILURE)
    if not count and not as_json:
        print("nothing to salvage: no file prevents a start")


def _dump(items: Iterable[dict[str, Any]], as_json: bool) -> None:
    """Print each item. Raises typer.Exit(DAMAGE) at the end if there was damage."""
    from bindery.bookie.offline_output import dump_line

    damaged = 0
    for facts in items:
        damaged += "problem" in facts
        if as_json:
            print_json(facts)
        else:
            print(dump_line(facts))
    if damaged:
        report_error(f"damaged in {damaged} places", code="damaged", exit_code=exit_codes.DAMAGE, as_json=as_json)
        raise typer.Exit(exit_codes.DAMAGE)


def _warn_about_index(shard: Any) -> None:
    if shard.index_problem:
        print(f"{shard.ledgers_path}: {shard.index_problem}; using the entry logs instead", file=sys.stderr)
