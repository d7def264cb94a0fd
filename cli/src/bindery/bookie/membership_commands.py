"""`bindery bookie drain|recover|maintenance|members`: the members of a cluster and their administrative states.

The auditor carries out drains and recoveries. Ctrl-C ends only the display; the same command shows the progress again.
"""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bindery.common import exit_codes
from bindery.common.cluster_command import cluster_command
from bindery.common.operator import duration_text, now_ms, operator_name, parse_duration, run_on, time_text
from bindery.common.options import DEFAULT_ZOOKEEPER, LEDGERS_ROOT, AsJson, LedgersRoot, Reason, Yes, ZooKeeper
from bindery.common.output import emit, print_json, report_error
from bindery.common.progress import Progress as Live

if TYPE_CHECKING:
    from bindery_recovery.draining.drain import BookieEmptier, Progress, Started

    from bindery.common.operator import Cluster

MAINTENANCE_S_MAX: Final = 7 * 86_400.0

BookieArgument = Annotated[
    str, typer.Argument(metavar="BOOKIE", show_default=False, help="Bookie id, as listed by `bindery bookie members`.")
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Show the progress until it is complete; Ctrl-C ends only the display.")
]


async def drain(
    cluster: "Cluster",
    bookie: BookieArgument,
    wait: Wait = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the drain, or the removal by `recover`.")] = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> int:
    """Move all data off a running bookie, so that it can be removed. No entry loses a copy meanwhile.

    The bookie becomes read-only, and its ledgers are copied to other bookies. Refused if too few bookies would remain.
    Run the command again to see the progress.

    Example: bindery bookie drain 10.0.0.7:3181 --wait --reason "new disks"

    Exit codes: 0 the drain is started (with --wait: the bookie is empty), 1 refused, or only unrecoverable ledgers are
    left.
    """
    from bindery_core.ids import validate_bookie_id
    from bindery_metadata.bookies.cookies import CookieStore
    from bindery_metadata.bookies.membership import Intent, MembershipStore

    bookie_id = validate_bookie_id(bookie)
    emptier = _emptier(cluster)
    live = Live(is_quiet=as_json)
    if cancel:
        before = await emptier.cancel_drain(bookie_id)
        has_cookie = await CookieStore(cluster.store, cluster.layout).read(bookie_id) is not None
        emit(
            {
                "bookie_id": bookie_id,
                "was": before.intent.value,
                "intent": "active",
                "has_cookie": has_cookie,
            },
            f"{bookie_id} was {before.intent.value}; it is an active member again",
            as_json=as_json,
        )
        if not has_cookie:
            live.say(
                f"its cookie was removed, so it does not start while its disks hold data: adopt the disks "
                f"(`bindery bookie cookie adopt --bookie-id {bookie_id} ...`; its log has the whole command) "
                "or empty them"
            )
        return exit_codes.OK
    started = await emptier.start_drain(
        bookie_id, reason=reason, progress=lambda count: live.show(f"reading the metadata of ledgers: {count}")
    )
    live.clear()
    if started.goes_on and reason and reason != started.membership.reason:
        # Write only if the membership is unchanged: a drain that is cancelled at this moment must not start again.
        memberships = MembershipStore(cluster.store, clock_ms=now_ms)
        await memberships.set(
            bookie_id, Intent.DRAINING, reason=reason, by=operator_name(), version=started.membership.version
        )
    verb = "is already being drained" if started.goes_on else "is being drained"
    facts = {"bookie_id": bookie_id, "intent": "draining", **_started_facts(started)}
    emit(facts, f"{bookie_id} {verb}: {_amount(started)}", as_json=as_json)
    if not wait:
        obstacles, _ = await emptier.obstacles(bookie_id, started.holdings)
        for sentence in obstacles if started.holdings.ledgers else ():
            live.say(f"warning: {sentence}")
        live.say(f"`bindery bookie drain {bookie_id} --wait` shows the progress, `--cancel` cancels the drain")
        return exit_codes.OK
    if not await _follow(emptier, started, live, as_json):
        return exit_codes.FAILURE
    await emptier.finish_drain(bookie_id)
    live.say(f"{bookie_id} is empty: stop it, then run `bindery bookie cookie retire --bookie-id {bookie_id}`")
    return exit_codes.OK


async def recover(
    cluster: "Cluster",
    bookie: BookieArgument,
    wait: Wait = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what the bookie held; exit code 0.")] = False,
    yes: Yes = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> int:
    """Remove a bookie that will not come back: copy its ledgers again, then retire its cookie.

    Refused while the bookie is registered. Its ledgers are marked as under-replicated at once, without the lost-bookie
    delay, and a bookie with this id is refused from then on. Its cookie is retired when no ledger names it any more:
    use --wait, or run the command again later.

    Example: bindery bookie recover 10.0.0.7:3181 --yes --wait

    Exit codes: 0 the recovery is started (with --wait: complete), 1 refused, failed, or --yes is missing.
    """
    from bindery_core.ids import validate_bookie_id

    bookie_id = validate_bookie_id(bookie)
    emptier = _emptier(cluster)
    live = Live(is_quiet=as_json)
    plan = await emptier.plan_recovery(
        bookie_id, progress=lambda count: live.show(f"reading the metadata of ledgers: {count}")
    )
    live.clear()
    facts = {"bookie_id": bookie_id, **_started_facts(plan), "spares": await _spares(cluster, emptier, plan)}
    if dry_run or not yes:
        emit({**facts, "done": False}, f"{bookie_id} is not registered; {_held(plan)}", as_json=as_json)
        for sentence in _spare_sentences(plan, facts["spares"]):
            live.say(sentence)
        if not dry_run:
            live.say("nothing was changed; --yes removes the bookie and starts copying its ledgers")
        return exit_codes.OK if dry_run else exit_codes.FAILURE
    total = len(plan.holdings.ledgers)
    started = await emptier.start_recovery(
        plan, reason=reason, progress=lambda count: live.show(f"marking ledgers: {count} of {total}")
    )
    live.clear()
    emit(
        {**facts, "intent": "removed", "marked": started.marked},
        f"{bookie_id} is removed; {_held(started)}; {started.marked} newly marked",
        as_json=as_json,
    )
    for sentence in _spare_sentences(plan, facts["spares"]):
        live.say(sentence)
    if started.holdings.ledgers and not wait:
        live.say(
            f"`bindery bookie recover {bookie_id} --yes --wait` shows the progress and retires the cookie at the end"
        )
        return exit_codes.OK
    if not await _follow(emptier, started, live, as_json):
        return exit_codes.FAILURE
    had_cookie = await emptier.retire(bookie_id)
    emit(
        {"bookie_id": bookie_id, "done": True, "cookie_removed": had_cookie},
        f"no ledger names {bookie_id} any more{', and its cookie is retired' if had_cookie else ''}",
        as_json=as_json,
    )
    return exit_codes.OK


def maintenance(
    bookie: BookieArgument,
    duration: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="Maximum absence: 90s, 10m, 1h30m; at most 7d.")
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="End the maintenance now.")] = False,
    reason: Reason = "",
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Allow a bookie to be absent for a limited time without re-replication. The maintenance ends by itself.

    Example: bindery bookie maintenance 10.0.0.7:3181 --for 10m --reason "kernel update"
    """
    from bindery_core.errors import BadRequest

    if (duration is None) == (not end):
        raise BadRequest("one of --for TIME and --end is required")
    seconds = 0.0 if duration is None else parse_duration(duration)
    if not end and not 0 < seconds <= MAINTENANCE_S_MAX:
        raise BadRequest("a maintenance lasts at most 7d; drain a bookie that is absent for longer", given=duration)

    async def work(cluster: "Cluster") -> None:
        from bindery_core.ids import validate_bookie_id
        from bindery_metadata.bookies.membership import MembershipStore
        from bindery_recovery.draining.drain import end_maintenance, set_maintenance

        bookie_id = validate_bookie_id(bookie)
        memberships = MembershipStore(cluster.store, clock_ms=now_ms)
        if end:
            ended = await end_maintenance(memberships, bookie_id)
            line = f"the maintenance of {bookie_id} is over" if ended else f"{bookie_id} was not in maintenance"
            emit({"bookie_id": bookie_id, "ended": ended}, line, as_json=as_json)
            return
        until_ms = now_ms() + round(seconds * 1000)
        await _emptier(cluster).check_known(bookie_id)
        await set_maintenance(memberships, bookie_id, until_ms=until_ms, reason=reason, by=operator_name())
        emit(
            {"bookie_id": bookie_id, "intent": "maintenance", "until_ms": until_ms},
            f"{bookie_id} is in maintenance until {time_text(until_ms)} ({duration_text(seconds)})",
            as_json=as_json,
        )

    run_on(zookeeper, ledgers_root, work)


async def members(cluster: "Cluster", as_json: AsJson = False) -> int:
    """List all bookies with registration and administrative state: active, draining, maintenance, removed.

    Example: bindery bookie members
    """
    from bindery.cluster.members import member_lines, read_members

    found = await read_members(cluster.store, cluster.layout, now_ms=now_ms())
    if as_json:
        for member in found:
            print_json(member)
    else:
        print("\n".join(member_lines(found)) or "no bookies")
    return exit_codes.OK


def add_to(app: typer.Typer) -> None:
    """Add these commands to `bindery bookie`."""
    cluster_command(app, "drain")(drain)
    cluster_command(app, "recover")(recover)
    app.command("maintenance")(maintenance)
    cluster_command(app, "members")(members)


def _emptier(cluster: "Cluster") -> "BookieEmptier":
    import random

    from bindery_recovery.draining.drain import BookieEmptier

    return BookieEmptier(
        cluster.store,
        cluster.layout,
        cluster.client,
        randomness=random.SystemRandom(),
        clock_ms=now_ms,
        by=operator_name(),
    )


async def _follow(emptier: "BookieEmptier", started: "Started", live: Live, as_json: bool) -> bool:
    """Show the progress to the end. Return False if the ledgers that are left cannot be recovered."""
    shown_obstacles: tuple[str, ...] = ()
    progress = None
    async for progress in emptier.follow(started):
        if as_json:
            facts = dataclasses.asdict(progress)
            print_json({"kind": "progress", "percent": _percent(progress), **facts})
            continue
        for sentence in progress.obstacles:
            if sentence not in shown_obstacles:
                live.say(f"waiting: {sentence}")
        shown_obstacles = progress.obstacles
        live.show(progress_line(progress))
    live.clear()
    if progress is not None and not progress.done:
        shown = ", ".join(map(str, progress.unrecoverable[:10]))
        report_error(
            f"{len(progress.unrecoverable)} ledgers cannot be recovered: {shown}; "
            f"`bindery recovery explain {progress.unrecoverable[0]}` gives the reason",
            code="unrecoverable",
            as_json=as_json,
        )
        return False
    return True


def progress_line(progress: "Progress") -> str:
    """Return the progress as one line of text."""
    from bindery.common.tables import size_text

    eta = "" if progress.eta_s is None or not progress.size_left else f", about {duration_text(progress.eta_s)} left"
    moved = max(0, progress.size_total - progress.size_left)
    ledgers = f"{progress.ledgers_left} of {progress.ledgers_total} ledgers left"
    if not progress.size_total:  # all ledgers are open: their sizes are not known yet
        return f"{_percent(progress):.0f} %: {ledgers}"
    return (
        f"{_percent(progress):.0f} %: {size_text(moved)} of {size_text(progress.size_total)} moved, {ledgers}, "
        f"{size_text(progress.bytes_per_s)}/s{eta}"
    )


def _percent(progress: "Progress") -> float:
    from bindery.recovery.recovery_status import percent_done

    return percent_done(progress.part, ledgers_left=progress.ledgers_left)


def _started_facts(started: "Started") -> dict[str, Any]:
    holdings = started.holdings
    return {
        "goes_on": started.goes_on,
        "ledgers": len(holdings.ledgers),
        "open_ledgers": holdings.open_count,
        "entries": holdings.entries,
        "bytes": holdings.size,
        "unreadable": list(holdings.unreadable),
    }


def _amount(started: "Started") -> str:
    from bindery.common.tables import size_text

    holdings = started.holdings
    text = f"{len(holdings.ledgers)} ledgers, {size_text(holdings.size)}"
    if holdings.open_count:
        text += f", plus {holdings.open_count} open ledgers of unknown size"
    if holdings.unreadable:
        text += f"; the metadata of {len(holdings.unreadable)} more ledgers cannot be read, so they may be on it too"
    return text


def _held(plan: "Started") -> str:
    holdings = plan.holdings
    return f"it held {_amount(plan)}" if holdings.ledgers or holdings.unreadable else "no ledger names it any more"


async def _spares(cluster: "Cluster", emptier: "BookieEmptier", plan: "Started") -> int:
    return len(await emptier.remaining(plan.membership.bookie_id, await cluster.client.list_bookies()))


def _spare_sentences(plan: "Started", spares: int) -> list[str]:
    widest = plan.holdings.widest()
    if widest is None:
        return []
    ledger_id, needed = widest
    if spares >= needed:
        return [f"enough bookies remain: {spares} are writable, and no ledger needs more than {needed}"]
    return [
        f"ledger {ledger_id} needs {needed} bookies and only {spares} are writable: "
        f"it is copied when {needed - spares} more join"
    ]
