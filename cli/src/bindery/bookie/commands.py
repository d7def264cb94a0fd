"""`bindery bookie`: the verbs. Each imports what it needs when it runs."""

import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer

from bindery.bookie import cookies, membership_commands, online

EXIT_DAMAGED: Final = 1

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="One bookie: its files, identity, state, membership."
)
journal_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The journal's files.")
log_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The entry logs.")
index_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The index.")
app.add_typer(journal_app, name="journal")
app.add_typer(log_app, name="log")
app.add_typer(index_app, name="index")
app.add_typer(cookies.app, name="cookie")
online.add_to(app)
membership_commands.add_to(app)


@app.callback()
def bookie() -> None:
    """One bookie: its files, its identity, its state, its membership.

    Verbs that take BOOKIE ask the cluster's metadata. Verbs that take DIR read files, of a bookie that is stopped, or a
    copy of them, and change nothing (only rebuild-index and salvage do); DIR is a configured directory, its `current`,
    or the parent of several. Verbs that take --url ask a running bookie.
    """


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Directory = Annotated[str, typer.Argument(metavar="DIR", help="A bookie's directory.")]
Directories = Annotated[list[str], typer.Argument(metavar="DIR...", help="A bookie's journal and ledger directories.")]
LedgerArgument = Annotated[int, typer.Argument(metavar="LEDGER", min=0, help="Ledger id.")]
LedgerOption = Annotated[int | None, typer.Option("--ledger", metavar="LEDGER", min=0, help="Only this ledger.")]


@app.command("ledgers")
def ledgers(directories: Directories, as_json: AsJson = False) -> None:
    """List the ledgers of a directory: entries, last entry, LAC, fence, limbo.

    With the journal's directory given too, entries count that were not flushed yet. Without an index, or with a damaged
    one, the list is made from the entry logs.
    """
    from bindery.bookie.places import find_ledgers, warn_if_running
    from bindery.bookie.views import opened_shard

    places = find_ledgers(directories)
    warn_if_running(places)
    count = 0
    for pair in places:
        with opened_shard(pair) as shard:
            _say_of_index(shard)
            for ledger_id in shard.ledger_ids():
                facts = shard.ledger_facts(ledger_id)
                if facts is None:
                    continue
                count += 1
                if as_json:
                    print(json.dumps(facts))
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
    entry_id: Annotated[int, typer.Argument(metavar="ENTRY", min=0, help="Entry id.")],
    journal: Annotated[
        str | None, typer.Option(metavar="DIR", help="The journal's directory: entries not flushed yet are there.")
    ] = None,
    as_raw: Annotated[bool, typer.Option("--raw", help="Write the entry's bytes, header and digest included.")] = False,
    as_hex: Annotated[bool, typer.Option("--hex", help="Print these bytes as hex.")] = False,
    decode: Annotated[bool, typer.Option("--decode", help="Take the payload apart as messages of a topic.")] = False,
    password: Annotated[
        str, typer.Option(metavar="TEXT", envvar="BINDERY_LEDGER_PASSWORD", help="The ledger's password, for mac.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show one entry: where it is, whether it is sound, what it says.

    Two digests are checked: the bookie's own, and the one its writer made. Exit code 1: it is damaged, or not there.
    """
    from bindery_core.errors import NoSuchEntry

    if as_raw + as_hex + (as_json or decode) > 1:
        raise typer.BadParameter("--raw, --hex, and --json or --decode exclude one another")

    from bindery.bookie.entries import entry_facts, entry_lines
    from bindery.bookie.places import find_ledgers, warn_if_running
    from bindery.bookie.views import opened_shard

    places = find_ledgers([directory] if journal is None else [directory, journal])
    warn_if_running(places)
    for pair in places:
        with opened_shard(pair) as shard:
            _say_of_index(shard)
            found = shard.find(ledger, entry_id)
        if found is None:
            continue
        if as_raw:
            sys.stdout.buffer.write(found.body)
            sys.stdout.buffer.flush()
        elif as_hex:
            print(found.body.hex())
        else:
            facts = entry_facts(found, password=password.encode(), decode=decode)
            print(json.dumps(facts) if as_json else "\n".join(entry_lines(facts)))
        if found.problem:
            print(f"bindery: the entry is damaged: {found.problem}", file=sys.stderr)
            raise typer.Exit(EXIT_DAMAGED)
        return
    raise NoSuchEntry("no such entry in these directories", ledger_id=ledger, entry_id=entry_id)


@journal_app.command("dump")
def journal_dump(
    target: Annotated[str, typer.Argument(metavar="DIR|FILE", help="A journal's directory, or one of its files.")],
    groups: Annotated[bool, typer.Option("--groups", help="Groups only, without their records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a journal: its files, groups (what one fdatasync made durable) and records; damage included.

    Exit code 1: some of it is damaged. A torn end is told as the end: it was never acknowledged.
    """
    from bindery.bookie.dumps import dump_journal, journal_files
    from bindery.bookie.places import ReadOnlyDisk

    disk = ReadOnlyDisk()
    files = journal_files(target, disk)
    _dump((facts for path, at in files for facts in dump_journal(path, at, disk, records=not groups)), as_json)


@log_app.command("dump")
def log_dump(
    target: Annotated[str, typer.Argument(metavar="DIR|FILE", help="A ledger directory, or an entry log.")],
    log: Annotated[str | None, typer.Argument(metavar="[LOG]", help="Log id in hex; default: all.")] = None,
    ledger: LedgerOption = None,
    as_map: Annotated[bool, typer.Option("--map", help="Only how many bytes of it each ledger has.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the records of entry logs in the order they lie, and the damaged regions between them.

    Exit code 1: some of it is damaged.
    """
    from bindery.bookie.dumps import dump_log, dump_log_map, log_files
    from bindery.bookie.places import ReadOnlyDisk

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
    runs: Annotated[bool, typer.Option("--runs/--no-runs", help="With the runs: which entries lie where.")] = True,
    as_json: AsJson = False,
) -> None:
    """Print the index: ledger rows, and runs of entries with their place in the entry logs.

    As it opens; whether anything is missing says `check`.
    """
    from bindery_core.errors import NotThere
    from bindery_core.ids import LedgerId

    from bindery.bookie.dumps import dump_index
    from bindery.bookie.places import find_ledgers, opened_index, warn_if_running

    places = find_ledgers([directory])
    warn_if_running(places)
    is_known = ledger is None
    for pair in places:
        assert pair.ledgers is not None
        with opened_index(pair.ledgers, verify=False) as index:
            if index is None:
                raise NotThere(
                    f"there is no index: a start makes it anew, or `bindery bookie rebuild-index {directory}`"
                )
            is_known = is_known or index.ledger_row(LedgerId(ledger or 0)) is not None
            _dump(dump_index(index, ledger_id=ledger, runs=runs), as_json)
    if not is_known:
        raise NotThere("no such ledger in this index", ledger_id=ledger)


@app.command("check")
def check(directories: Directories, as_json: AsJson = False) -> None:
    """Check everything offline: journal, LastLogMark, entry logs, index, and that they agree. Changes nothing.

    Works on a copy, and with a lost index. Exit codes: 0 sound, 1 damaged; with --json the last line is the summary.
    """
    from bindery.bookie.check_command import run_check

    if not run_check(directories, as_json=as_json):
        raise typer.Exit(EXIT_DAMAGED)


@app.command("rebuild-index")
def rebuild_index(
    directory: Directory,
    discard: Annotated[bool, typer.Option("--discard", help="Remove the old index instead of keeping it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make the index anew from the entry logs. The bookie must be stopped; LevelDB's lock proves it.

    The new index is made beside the old one and takes its place at the end; the old one is kept as index.old-<time>. A
    start does the same by itself when the index is lost or older than LastLogMark.
    """
    from bindery.bookie.rebuild import rebuild

    for facts in rebuild(directory, discard=discard):
        if as_json:
            print(json.dumps(facts))
        else:
            kept = f", the old one is {facts['kept']}" if facts["kept"] else ""
            print(f"{facts['path']}: {facts['ledgers']} ledgers, from {facts['entries']} entries in the logs{kept}")


@app.command("salvage")
def salvage(
    directories: Directories,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Put aside what a start refuses and nobody can restore: a damaged LastLogMark, a journal damaged in the middle.

    The bookie must be stopped. The files go to `quarantine` in the ledger directory, nothing is deleted; the shard goes
    into limbo: at the next start the bookie denies nothing, and fetches what it lost from the others. Try to restore
    the files first. Exit codes: 0 done, or nothing to do; 1 there is, and --yes was not given.
    """
    from bindery.bookie.salvage_command import run_salvage, step_lines

    count = 0
    for facts in run_salvage(directories, yes=yes):
        count += 1
        print(json.dumps(facts) if as_json else "\n".join(step_lines(facts)))
    if count and not yes:
        print("nothing was done; --yes does it", file=sys.stderr)
        raise typer.Exit(EXIT_DAMAGED)
    if not count and not as_json:
        print("nothing to salvage: a start does not refuse these files")


def _dump(items: Iterable[dict[str, Any]], as_json: bool) -> None:
    """Print; exit code 1 at the end when there was damage."""
    from bindery.bookie.dumps import line

    damaged = 0
    for facts in items:
        damaged += "problem" in facts
        print(json.dumps(facts) if as_json else line(facts))
    if damaged:
        print(f"bindery: damaged in {damaged} places", file=sys.stderr)
        raise typer.Exit(EXIT_DAMAGED)


def _say_of_index(shard: Any) -> None:
    if shard.index_problem:
        print(f"{shard.ledgers_path}: {shard.index_problem}; the entry logs were read instead", file=sys.stderr)
