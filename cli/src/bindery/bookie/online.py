"""`bindery bookie` on a running bookie, through its HTTP port.

Exit codes as everywhere; `state`, `limbo` and `damage` end with 1 when something needs an operator's eye.
"""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from bindery_core.errors import BadRequest

if TYPE_CHECKING:
    from bindery.bookie.admin_api import BookieAdmin

EXIT_PROBLEM: Final = 1

Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The bookie's HTTP port (BINDERY_BOOKIE_URL). [localhost:8000]"),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file", metavar="FILE", help="A token for what not everybody may (BINDERY_BOOKIE_TOKEN_FILE)."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Minor = Annotated[bool, typer.Option("--minor", help="Minor compaction.")]
Major = Annotated[bool, typer.Option("--major", help="Major compaction.")]

gc_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Garbage collection and compaction.")
scrub_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The background verification.")
drill_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Slow and failing disks, on purpose.")


def state(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show how a bookie is: writable or why not, disks, limbo, damage, scrub.

    Exit code 1: it is read-only, in limbo, or knows of damage.
    """

    def ask(bookie: "BookieAdmin") -> dict[str, Any]:
        from bindery.bookie.admin_api import NotServed

        facts: dict[str, Any] = {"state": bookie.get("state")}
        for part in ("state/readonly", "disks", "limbo", "damage", "scrub"):
            try:
                facts[part.rpartition("/")[2]] = bookie.get(part)
            except NotServed:
                continue
        return facts

    facts = _asked(url, token_file, ask)
    is_read_only = bool(facts["state"].get("readOnly"))
    damage = int(facts.get("damage", {}).get("count", 0))
    is_limbo = bool(facts.get("limbo", {}).get("inLimbo"))
    if as_json:
        print(json.dumps(facts))
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
        if facts.get("scrub"):
            print("\n".join(lines_of({"scrub": _scrub_rows(facts["scrub"])})))
    if is_read_only or damage or is_limbo:
        raise typer.Exit(EXIT_PROBLEM)


def _because(part: str, why: str) -> str:
    """What takes no adds and why; the reason may begin with its part's name."""
    return why if why.startswith(f"{part}:") else f"{part}: {why}"


def _scrub_rows(scrub: dict[str, Any]) -> list[dict[str, Any]]:
    """Each shard; without the start of a round that is not under way, or that nobody knows to begin."""
    return [
        {name: value for name, value in shard.items() if value or name not in ("startMs", "nextMs")}
        for shard in scrub.get("shards", ())
    ]


_DISK_COLUMNS: Final = ("path", "holds", "status", "usage", "free", "total", "reserveHeld", "reason")


def disks(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List the directories with their state and why; exit code 1: one is full or almost."""
    facts = _asked(url, token_file, lambda bookie: bookie.get("disks"))
    if as_json:
        print(json.dumps(facts))
    else:
        from bindery.common.tables import table

        print("\n".join(table(facts.get("directories", []), columns=_DISK_COLUMNS)))
        for part, why in (facts.get("reasons") or {}).items():
            print(f"read-only because of {_because(part, why)}")
    if any(directory.get("status") != "ok" for directory in facts.get("directories", [])):
        raise typer.Exit(EXIT_PROBLEM)


def limbo(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show which shards are in limbo, why, and how far their repair is; exit code 1: one is.

    A bookie in limbo lost some of its storage. It says "unknown" instead of "no such entry" for the ledgers concerned
    until it fetched what it should have from the other bookies.
    """
    facts = _show(url, token_file, as_json, lambda bookie: bookie.get("limbo"))
    if facts.get("inLimbo"):
        raise typer.Exit(EXIT_PROBLEM)


def damage(
    url: Url = None,
    token_file: TokenFile = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="At most so many places.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """List what the bookie knows to be damaged, newest last; exit code 1: something is."""
    facts = _asked(url, token_file, lambda bookie: bookie.get("damage", limit=limit))
    if as_json:
        print(json.dumps(facts))
    else:
        from bindery.common.tables import table

        if facts.get("damage"):
            print("\n".join(table(facts["damage"])))
        print(f"{facts.get('count', 0) or 'no'} damaged places")
    if facts.get("count"):
        raise typer.Exit(EXIT_PROBLEM)


@gc_app.command("state")
def gc_state(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show what garbage collection does, when it ran, whether compaction is suspended."""
    facts = _show(url, token_file, as_json, lambda bookie: bookie.get("gc/state"))
    if not as_json and not any(shard.get("logs") for shard in facts.get("shards", ())):
        print("It has not looked at its entry logs yet: `bindery bookie gc logs --look` makes it.")


@gc_app.command("logs")
def gc_logs(
    look: Annotated[bool, typer.Option("--look", help="Look at every log now, not at what the last run saw.")] = False,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List the entry logs with how much of each is alive."""
    facts = _asked(url, token_file, lambda bookie: bookie.get("gc/logs", look="true" if look else None))
    if as_json:
        print(json.dumps(facts))
        return
    from bindery.common.tables import table

    columns = ("shard", "file", "state", "size", "liveBytes", "liveRatio", "liveLedgers", "deadLedgers", "lookedAtMs")
    print("\n".join(table(facts["logs"], columns=columns)) if facts.get("logs") else "no entry logs")


@gc_app.command("explain")
def gc_explain(
    log: Annotated[str, typer.Argument(metavar="LOG", help="A log's id in hex, as in its file's name.")],
    shard: Annotated[int | None, typer.Option(metavar="N", min=0, help="With several shards: whose log.")] = None,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what will happen to an entry log, why, and which ledgers keep it alive."""
    from bindery_bookie.offline.dumps import parse_log_id
    from bindery_bookie.storage.entry_log import entry_log_format

    file = entry_log_format.file_name(parse_log_id(log))
    facts = _asked(url, token_file, lambda bookie: bookie.get("gc/explain", log=file, shard=shard))
    if as_json:
        print(json.dumps(facts))
        return
    from bindery.common.tables import lines_of

    print("\n".join([*facts.pop("sentences", []), "", *lines_of(facts)]))


@gc_app.command("run")
def gc_run(
    minor: Minor = False, major: Major = False, url: Url = None, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Collect garbage now: remove logs of deleted ledgers; with --minor or --major compact too.

    It works in the background; `gc state` shows how far it is.
    """
    # Without a body both compactions would run, as in BookKeeper.
    body = {"forceMinor": minor, "forceMajor": major}
    _show(url, token_file, as_json, lambda bookie: bookie.put("gc", body))
    if not minor and not major:
        return
    suspended = _asked(url, token_file, lambda bookie: bookie.get("gc/suspend_compaction"))
    for kind, is_wanted in (("minor", minor), ("major", major)):
        if is_wanted and suspended[f"is{kind.capitalize()}GcSuspended"] == "true":
            print(f"{kind} compaction is suspended and does not run: `bindery bookie gc resume`", file=sys.stderr)


@gc_app.command("suspend")
def gc_suspend(
    minor: Minor = False, major: Major = False, url: Url = None, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Stop compaction, both kinds unless one is named, until `resume` or the next start."""
    both = not minor and not major
    body = {"suspendMinor": minor or both, "suspendMajor": major or both}
    _show(url, token_file, as_json, lambda bookie: bookie.put("gc/suspend_compaction", body))


@gc_app.command("resume")
def gc_resume(
    minor: Minor = False, major: Major = False, url: Url = None, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Let compaction go on, both kinds unless one is named."""
    both = not minor and not major
    body = {"resumeMinor": minor or both, "resumeMajor": major or both}
    _show(url, token_file, as_json, lambda bookie: bookie.put("gc/resume_compaction", body))


@scrub_app.command("state")
def scrub_state(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show how far the background verification is, and when everything was last verified."""
    facts = _asked(url, token_file, lambda bookie: bookie.get("scrub"))
    if as_json:
        print(json.dumps(facts))
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
    """Verify every live entry, from now on. It works in the background; `scrub state` shows how far it is."""
    facts = _asked(url, token_file, lambda bookie: bookie.put("scrub", None if shard is None else {"shard": shard}))
    if as_json:
        print(json.dumps(facts))
    else:
        which = f"shard {shard}" if shard is not None else "all that is stored here"
        print(f"it verifies {which} from now on; `bindery bookie scrub state` shows how far it is")


@drill_app.command("list")
def drill_list(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List the drills under way."""
    _show_drills(url, token_file, as_json, lambda bookie: bookie.get("drill"))


@drill_app.command("set")
def drill_set(
    rules: Annotated[
        list[str], typer.Argument(metavar="RULE...", help="For instance 'datasync *.txn delay 0.2'; quote each.")
    ],
    url: Url = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Replace all drills by these. Only a bookie started with drills enabled does that."""
    if not all(rule.strip() for rule in rules):
        raise BadRequest("a rule must not be empty")
    _show_drills(url, token_file, as_json, lambda bookie: bookie.put("drill", {"rules": rules}))


@drill_app.command("clear")
def drill_clear(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """End all drills."""
    _show_drills(url, token_file, as_json, lambda bookie: bookie.delete("drill"))


def add_to(app: typer.Typer) -> None:
    """Register these verbs."""
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
    """Print the answer, and give it back."""
    facts = _asked(url, token_file, ask)
    if as_json:
        print(json.dumps(facts))
    else:
        from bindery.common.tables import lines_of

        print("\n".join(lines_of(facts)))
    return facts


def _show_drills(url: str | None, token_file: str | None, as_json: bool, ask: "Callable[[BookieAdmin], Any]") -> None:
    facts = _asked(url, token_file, ask)
    if as_json:
        print(json.dumps(facts))
        return
    from bindery.common.tables import table

    drills = facts.get("drills") if isinstance(facts, dict) else None
    print("\n".join(table(drills)) if drills else "no drills")
