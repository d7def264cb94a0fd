"""`bindery bookie` commands that read from a running bookie over HTTP.

`state`, `disks` and `limbo` exit with 1 if an operator needs to act, `damage` with 3 if the bookie found damage.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from bindery_core.errors import BadRequest

from bindery.common import exit_codes
from bindery.common.options import AsJson, group
from bindery.common.output import print_json, print_table
from bindery.common.url_options import TOKEN_FILE

if TYPE_CHECKING:
    from bindery.bookie.admin_api import BookieAdmin

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="BINDERY_BOOKIE_URL",
        show_envvar=True,
        help="HTTP URL of the bookie; default: http://127.0.0.1:8000.",
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        envvar=["BINDERY_BOOKIE_TOKEN_FILE", TOKEN_FILE.variable],
        show_envvar=True,
        help="File with the bearer token for protected operations.",
    ),
]
Minor = Annotated[bool, typer.Option("--minor", help="Minor compaction: logs with little live data.")]
Major = Annotated[bool, typer.Option("--major", help="Major compaction: logs with more live data, too.")]

gc_app = group("Show and control garbage collection and compaction.")
scrub_app = group("Show and control the background verification.")
drill_app = group("Inject faults into the disks of a bookie.")


def state(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show the state of a bookie: writable or not and why, disks, limbo, damage, background verification, metadata.

    Example: bindery bookie state --url http://127.0.0.1:8001

    Exit codes: 0 the bookie is writable and sound, 1 it is read-only, in limbo, found damage, or a rollback of the
    metadata is suspected.
    """

    def ask(bookie: "BookieAdmin") -> dict[str, Any]:
        from bindery.bookie.admin_api import NotServed

        facts: dict[str, Any] = {"state": bookie.get("state")}
        for part in ("state/readonly", "disks", "limbo", "damage", "scrub", "gc/rollback"):
            try:
                facts[part.rpartition("/")[2]] = bookie.get(part)
            except NotServed:
                continue
        return facts

    facts = _asked(url, token_file, ask)
    is_read_only = bool(facts["state"].get("readOnly"))
    damage = int(facts.get("damage", {}).get("count", 0))
    is_limbo = bool(facts.get("limbo", {}).get("inLimbo"))
    reports = facts.get("rollback", {}).get("reports") or {}
    if as_json:
        print_json(facts)
    else:
        from bindery.common.tables import lines_of, table

        running = "running" if facts["state"].get("running") else "not running yet"
        print(f"{running}, {'READ-ONLY' if is_read_only else 'writable'}")
        for part, why in (facts.get("readonly", {}).get("reasons") or {}).items():
            print(f"  {_because(part, why)}")
        if facts.get("disks", {}).get("directories"):
            print("\n".join(table(facts["disks"]["directories"], columns=_DISK_COLUMNS)))
        limbo_shards = [shard for shard in facts.get("limbo", {}).get("shards", ()) if shard.get("inLimbo")]
        for shard in limbo_shards:
            print(f"IN LIMBO: shard {shard.get('shard')}, {shard.get('phase')}: {shard.get('reason')}")
        if not is_limbo:
            print("not in limbo")
        print(f"damage: {damage or 'none'}")
        if reports:
            unknown = sum(report.get("unknown", 0) for report in reports.values())
            print(
                f"METADATA ROLLBACK SUSPECTED: {unknown} replicas on {', '.join(sorted(reports))} are of ledgers "
                "unknown to ZooKeeper; no ledgers are deleted (`bindery cluster accept-metadata --dry-run`)"
            )
        if facts.get("scrub"):
            print("\n".join(lines_of({"scrub": _scrub_rows(facts["scrub"])})))
    if is_read_only or damage or is_limbo or reports:
        raise typer.Exit(exit_codes.FAILURE)


def _because(part: str, why: str) -> str:
    """Return which part accepts no adds and why. The reason may begin with the name of the part."""
    return why if why.startswith(f"{part}:") else f"{part}: {why}"


def _scrub_rows(scrub: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row per shard, without the times of rounds that are not running or not scheduled."""
    return [
        {name: value for name, value in shard.items() if value or name not in ("startMs", "nextMs")}
        for shard in scrub.get("shards", ())
    ]


_DISK_COLUMNS: Final = ("path", "holds", "status", "usage", "free", "total", "reserveHeld", "reason")


def disks(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List the directories of a bookie with their state and usage.

    Exit codes: 0 all have enough space, 1 one is full or nearly full.
    """
    facts = _asked(url, token_file, lambda bookie: bookie.get("disks"))
    if as_json:
        print_json(facts)
    else:
        print_table(facts.get("directories", []), columns=_DISK_COLUMNS)
        for part, why in (facts.get("reasons") or {}).items():
            print(f"read-only: {_because(part, why)}")
    if any(directory.get("status") != "ok" for directory in facts.get("directories", [])):
        raise typer.Exit(exit_codes.FAILURE)


def limbo(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show the shards that are in limbo, the reason, and the progress of their repair.

    A bookie in limbo has lost part of its storage. For the affected ledgers it answers "unknown" instead of "no such
    entry" until it has fetched the missing entries from other bookies.

    Exit codes: 0 no shard is in limbo, 1 a shard is.
    """
    facts = _show(url, token_file, as_json, lambda bookie: bookie.get("limbo"))
    if facts.get("inLimbo"):
        raise typer.Exit(exit_codes.FAILURE)


def damage(
    url: Url = None,
    token_file: TokenFile = None,
    limit: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, show_default=True, help="Maximum number of places.")
    ] = 1000,
    as_json: AsJson = False,
) -> None:
    """List the damage that the bookie found in its files, the newest last.

    Exit codes: 0 no damage, 3 damage found.
    """
    facts = _asked(url, token_file, lambda bookie: bookie.get("damage", limit=limit))
    if as_json:
        print_json(facts)
    else:
        if facts.get("damage"):
            print_table(facts["damage"])
        print(f"{facts.get('count', 0) or 'no'} damaged places")
    if facts.get("count"):
        raise typer.Exit(exit_codes.DAMAGE)


@gc_app.command("state")
def gc_state(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show the state of garbage collection: phase, last runs, whether compaction is suspended."""
    facts = _show(url, token_file, as_json, lambda bookie: bookie.get("gc/state"))
    if not as_json and not any(shard.get("logs") for shard in facts.get("shards", ())):
        print("The entry logs have not been scanned yet; `bindery bookie gc logs --look` scans them.")


@gc_app.command("logs")
def gc_logs(
    look: Annotated[
        bool, typer.Option("--look", help="Scan every log now; default: the results of the last run.")
    ] = False,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List the entry logs with the share of live data in each."""
    facts = _asked(url, token_file, lambda bookie: bookie.get("gc/logs", look="true" if look else None))
    if as_json:
        print_json(facts)
        return

    columns = ("shard", "file", "state", "size", "liveBytes", "liveRatio", "liveLedgers", "deadLedgers", "lookedAtMs")
    if facts.get("logs"):
        print_table(facts["logs"], columns=columns)
    else:
        print("no entry logs")


@gc_app.command("explain")
def gc_explain(
    log: Annotated[
        str, typer.Argument(metavar="LOG", show_default=False, help="Log id in hex, as in the name of the file.")
    ],
    shard: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Shard of the log, for a bookie with several shards.")
    ] = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Explain what will happen to an entry log, why, and which ledgers have entries in it.

    Example: bindery bookie gc explain 1f
    """
    from bindery_bookie.offline.dumps import parse_log_id
    from bindery_bookie.storage.entry_log import entry_log_format

    file = entry_log_format.file_name(parse_log_id(log))
    facts = _asked(url, token_file, lambda bookie: bookie.get("gc/explain", log=file, shard=shard))
    if as_json:
        print_json(facts)
        return
    from bindery.common.tables import lines_of

    print("\n".join([*facts.pop("sentences", []), "", *lines_of(facts)]))


@gc_app.command("run")
def gc_run(
    minor: Minor = False, major: Major = False, url: Url = None, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Start garbage collection now: delete logs of deleted ledgers, and with --minor or --major compact the others.

    It runs in the background; `bindery bookie gc state` shows the progress.
    """
    # Without a body both compactions would run, as in BookKeeper.
    body = {"forceMinor": minor, "forceMajor": major}
    _show(url, token_file, as_json, lambda bookie: bookie.put("gc", body))
    if not minor and not major:
        return
    suspended = _asked(url, token_file, lambda bookie: bookie.get("gc/suspend_compaction"))
    for kind, is_wanted in (("minor", minor), ("major", major)):
        if is_wanted and suspended[f"is{kind.capitalize()}GcSuspended"] == "true":
            print(
                f"{kind} compaction is suspended and does not run; `bindery bookie gc resume` resumes it",
                file=sys.stderr,
            )


@gc_app.command("suspend")
def gc_suspend(
    minor: Minor = False, major: Major = False, url: Url = None, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Suspend compaction until `resume` or the next start: both kinds, or the one that is given."""
    both = not minor and not major
    body = {"suspendMinor": minor or both, "suspendMajor": major or both}
    _show(url, token_file, as_json, lambda bookie: bookie.put("gc/suspend_compaction", body))


@gc_app.command("resume")
def gc_resume(
    minor: Minor = False, major: Major = False, url: Url = None, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Resume compaction: both kinds, or the one that is given."""
    both = not minor and not major
    body = {"resumeMinor": minor or both, "resumeMajor": major or both}
    _show(url, token_file, as_json, lambda bookie: bookie.put("gc/resume_compaction", body))


@scrub_app.command("state")
def scrub_state(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show the progress of the background verification, and when all entries were last verified."""
    facts = _asked(url, token_file, lambda bookie: bookie.get("scrub"))
    if as_json:
        print_json(facts)
    else:
        from bindery.common.tables import lines_of

        print("\n".join(lines_of({**facts, "shards": _scrub_rows(facts)})))


@scrub_app.command("run")
def scrub_run(
    shard: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only this shard.")] = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Start a verification of every live entry.

    It runs in the background; `bindery bookie scrub state` shows the progress.
    """
    facts = _asked(url, token_file, lambda bookie: bookie.put("scrub", None if shard is None else {"shard": shard}))
    if as_json:
        print_json(facts)
    else:
        which = f"shard {shard}" if shard is not None else "all shards"
        print(f"verifying {which}; `bindery bookie scrub state` shows the progress")


@drill_app.command("list")
def drill_list(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List the active fault injection rules."""
    _show_drills(url, token_file, as_json, lambda bookie: bookie.get("drill"))


@drill_app.command("set")
def drill_set(
    rules: Annotated[
        list[str], typer.Argument(metavar="RULE...", show_default=False, help="Rule, quoted: OPERATION PATTERN FAULT.")
    ],
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Replace all fault injection rules. The bookie must have been started with fault injection enabled.

    Example: bindery bookie drill set 'datasync *.txn delay 0.2'
    """
    if not all(rule.strip() for rule in rules):
        raise BadRequest("a rule must not be empty")
    _show_drills(url, token_file, as_json, lambda bookie: bookie.put("drill", {"rules": rules}))


@drill_app.command("clear")
def drill_clear(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Remove all fault injection rules."""
    _show_drills(url, token_file, as_json, lambda bookie: bookie.delete("drill"))


def add_to(app: typer.Typer) -> None:
    """Add these commands to `bindery bookie`."""
    app.command("state")(state)
    app.command("disks")(disks)
    app.command("limbo")(limbo)
    app.command("damage")(damage)
    app.add_typer(gc_app, name="gc")
    app.add_typer(scrub_app, name="scrub")
    app.add_typer(drill_app, name="drill")


def _asked(url: str | None, token_file: str | None, ask: "Callable[[BookieAdmin], Any]") -> Any:
    from bindery.bookie.admin_api import BookieAdmin

    with BookieAdmin(url, token_file) as bookie:
        return ask(bookie)


def _show(url: str | None, token_file: str | None, as_json: bool, ask: "Callable[[BookieAdmin], Any]") -> Any:
    """Print the response and return it."""
    facts = _asked(url, token_file, ask)
    if as_json:
        print_json(facts)
    else:
        from bindery.common.tables import lines_of

        print("\n".join(lines_of(facts)))
    return facts


def _show_drills(url: str | None, token_file: str | None, as_json: bool, ask: "Callable[[BookieAdmin], Any]") -> None:
    facts = _asked(url, token_file, ask)
    if as_json:
        print_json(facts)
        return

    rules = facts.get("drills") if isinstance(facts, dict) else None  # wording: the field of the API
    if rules:
        print_table(rules)
    else:
        print("no fault injection rules")
