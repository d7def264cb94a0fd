"""`bindery bookie drain|recover|maintenance|members`: who belongs to the cluster, and what is meant with them.

Drain and recover go on without us: Ctrl-C ends the watching, the same verb takes it up again.
"""

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bindery.cluster.commands import DEFAULT_ZOOKEEPER
from bindery.common.operator import (
    LEDGERS_ROOT,
    AsJson,
    LedgersRoot,
    Live,
    Reason,
    ZooKeeper,
    duration_text,
    now_ms,
    operator_name,
    parse_duration,
    run_on,
    time_text,
)

if TYPE_CHECKING:
    from bindery_recovery.draining.drain import BookieEmptier, Progress, Started

    from bindery.common.operator import Cluster

EXIT_NOT_DONE: Final = 1
MAINTENANCE_S_MAX: Final = 7 * 86_400.0

BookieArgument = Annotated[str, typer.Argument(metavar="BOOKIE", help="Bookie id, as `bindery bookie members` has it.")]
Wait = Annotated[bool, typer.Option("--wait", help="Show how far it is until it is done; Ctrl-C ends only that.")]


def drain(
    bookie: BookieArgument,
    wait: Wait = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Make it an ordinary member again; also after `recover`.")
    ] = False,
    reason: Reason = "",
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Move everything off a running bookie, so that it can be taken away; no entry has fewer copies meanwhile.

    The bookie becomes read-only; the auditor has its ledgers copied to others. Refused when too few bookies would
    remain. Say it again to see how far it is.

    Example: bindery bookie drain 10.0.0.7:3181 --wait --reason "new disks"

    Exit codes: 0 said (with --wait: the bookie is empty), 1 refused, or nothing but unrecoverable ledgers is left.
    """

    async def work(cluster: "Cluster") -> bool:
        from bindery_core.ids import validate_bookie_id
        from bindery_metadata.bookies.cookies import CookieStore
        from bindery_metadata.bookies.membership import Intent, MembershipStore

        bookie_id = validate_bookie_id(bookie)
        emptier = _emptier(cluster)
        live = Live(is_quiet=as_json)
        if cancel:
            before = await emptier.cancel_drain(bookie_id)
            has_cookie = await CookieStore(cluster.store, cluster.layout).read(bookie_id) is not None
            _say(as_json, {"bookie_id": bookie_id, "was": before.intent.value, "intent": "active",
                           "has_cookie": has_cookie},
                 f"{bookie_id} was {before.intent.value}; it is an ordinary member again")  # fmt: skip
            if not has_cookie:
                live.say(
                    f"its cookie is gone, and with data on its disks it does not start: adopt the disks (`bindery "
                    f"bookie cookie adopt --bookie-id {bookie_id} ...`; its start says the whole command) or empty them"
                )
            return True
        started = await emptier.start_drain(
            bookie_id, reason=reason, progress=lambda count: live.show(f"reading the metadata of ledgers: {count}")
        )
        live.clear()
        if started.goes_on and reason and reason != started.membership.reason:
            # As it was read, else a drain that somebody takes back at this moment would begin anew.
            memberships = MembershipStore(cluster.store, clock_ms=now_ms)
            await memberships.set(
                bookie_id, Intent.DRAINING, reason=reason, by=operator_name(), version=started.membership.version
            )
        verb = "goes on being drained" if started.goes_on else "is being drained from now on"
        _say(as_json, {"bookie_id": bookie_id, "intent": "draining", **_started_facts(started)},
             f"{bookie_id} {verb}: {_amount(started)}")  # fmt: skip
        if not wait:
            obstacles, _ = await emptier.obstacles(bookie_id, started.holdings)
            for sentence in obstacles if started.holdings.ledgers else ():
                live.say(f"but {sentence}")
            live.say(f"`bindery bookie drain {bookie_id} --wait` shows how far it is, `--cancel` takes it back")
            return True
        if not await _follow(emptier, started, live, as_json):
            return False
        await emptier.finish_drain(bookie_id)
        live.say(
            f"{bookie_id} holds nothing any more: stop it, then run "
            f"`bindery bookie cookie retire --bookie-id {bookie_id}`"
        )
        return True

    _run(zookeeper, ledgers_root, work)


def recover(
    bookie: BookieArgument,
    wait: Wait = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it held.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without it, only say what would be done.")] = False,
    reason: Reason = "",
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Declare a bookie gone for good: make new copies of what it held, then forget it.

    For one that will not come back; refused while it is registered. Its ledgers are marked at once, without the
    lost-bookie delay; a bookie that starts with this id is refused from then on. Its cookie is retired once no ledger
    names it any more: wait for that, or say the same again later.

    Example: bindery bookie recover 10.0.0.7:3181 --yes --wait

    Exit codes: 0 done (without --wait: said), 1 refused or not done.
    """

    async def work(cluster: "Cluster") -> bool:
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
            _say(as_json, {**facts, "done": False}, f"{bookie_id} is not registered; {_held(plan)}")
            for sentence in _spare_sentences(plan, facts["spares"]):
                live.say(sentence)
            if not dry_run:
                live.say("nothing was done; --yes declares it gone for good and has new copies made")
            return dry_run
        total = len(plan.holdings.ledgers)
        started = await emptier.start_recovery(
            plan, reason=reason, progress=lambda count: live.show(f"marking ledgers: {count} of {total}")
        )
        live.clear()
        _say(as_json, {**facts, "intent": "removed", "marked": started.marked},
             f"{bookie_id} is removed; {_held(started)}; {started.marked} newly marked")  # fmt: skip
        for sentence in _spare_sentences(plan, facts["spares"]):
            live.say(sentence)
        if started.holdings.ledgers and not wait:
            live.say(f"`bindery bookie recover {bookie_id} --yes --wait` follows it and retires the cookie at the end")
            return True
        if not await _follow(emptier, started, live, as_json):
            return False
        had_cookie = await emptier.retire(bookie_id)
        _say(as_json, {"bookie_id": bookie_id, "done": True, "cookie_removed": had_cookie},
             f"no ledger names {bookie_id} any more{', and its cookie is retired' if had_cookie else ''}")  # fmt: skip
        return True

    _run(zookeeper, ledgers_root, work)


def maintenance(
    bookie: BookieArgument,
    duration: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="How long it may be away: 90s, 10m, 1h30m; 7d at most.")
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="It is back: end the lease now.")] = False,
    reason: Reason = "",
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Let a bookie be away for a while without anybody copying what it holds. The lease runs out by itself.

    Example: bindery bookie maintenance 10.0.0.7:3181 --for 10m --reason "kernel update"
    """
    from bindery_core.errors import BadRequest

    if (duration is None) == (not end):
        raise BadRequest("give either --for TIME or --end")
    seconds = 0.0 if duration is None else parse_duration(duration)
    if not end and not 0 < seconds <= MAINTENANCE_S_MAX:
        raise BadRequest("a maintenance lasts up to 7d; whoever stays away for longer is drained first", given=duration)

    async def work(cluster: "Cluster") -> bool:
        from bindery_core.ids import validate_bookie_id
        from bindery_metadata.bookies.membership import MembershipStore
        from bindery_recovery.draining.drain import end_maintenance, set_maintenance

        bookie_id = validate_bookie_id(bookie)
        memberships = MembershipStore(cluster.store, clock_ms=now_ms)
        if end:
            ended = await end_maintenance(memberships, bookie_id)
            line = f"the maintenance of {bookie_id} is over" if ended else f"{bookie_id} was not in maintenance"
            _say(as_json, {"bookie_id": bookie_id, "ended": ended}, line)
            return True
        until_ms = now_ms() + round(seconds * 1000)
        await _emptier(cluster).check_known(bookie_id)
        await set_maintenance(memberships, bookie_id, until_ms=until_ms, reason=reason, by=operator_name())
        _say(as_json, {"bookie_id": bookie_id, "intent": "maintenance", "until_ms": until_ms},
             f"{bookie_id} may be away until {time_text(until_ms)} ({duration_text(seconds)})")  # fmt: skip
        return True

    _run(zookeeper, ledgers_root, work)


def members(
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER, ledgers_root: LedgersRoot = LEDGERS_ROOT, as_json: AsJson = False
) -> None:
    """List all bookies: whether each is registered, and what is meant with it (drain, maintenance, removed).

    Example: bindery bookie members
    """

    async def work(cluster: "Cluster") -> bool:
        from bindery.cluster.members import member_lines, read_members

        found = await read_members(cluster.store, cluster.layout, now_ms=now_ms())
        if as_json:
            for member in found:
                print(json.dumps(member))
        else:
            print("\n".join(member_lines(found)) or "no bookies")
        return True

    _run(zookeeper, ledgers_root, work)


def add_to(app: typer.Typer) -> None:
    """Make these verbs of `bindery bookie`."""
    for verb in (drain, recover, maintenance, members):
        app.command(verb.__name__)(verb)


def _run(zookeeper: str, ledgers_root: str, work: Any) -> None:
    if not run_on(zookeeper, ledgers_root, work):
        raise typer.Exit(EXIT_NOT_DONE)


def _emptier(cluster: "Cluster") -> "BookieEmptier":
    import random

    from bindery_recovery.draining.drain import BookieEmptier

    return BookieEmptier(
        cluster.store, cluster.layout, cluster.client, randomness=random.SystemRandom(), clock_ms=now_ms,
        by=operator_name(),
    )  # fmt: skip


async def _follow(emptier: "BookieEmptier", started: "Started", live: Live, as_json: bool) -> bool:
    """Show progress to the end. False: what is left cannot be healed."""
    told: tuple[str, ...] = ()
    progress = None
    async for progress in emptier.follow(started):
        if as_json:
            facts = dataclasses.asdict(progress)
            print(json.dumps({"kind": "progress", "percent": _percent(progress), **facts}), flush=True)
            continue
        for sentence in progress.obstacles:
            if sentence not in told:
                live.say(f"waiting: {sentence}")
        told = progress.obstacles
        live.show(progress_line(progress))
    live.clear()
    if progress is not None and not progress.done:
        shown = ", ".join(map(str, progress.unrecoverable[:10]))
        print(
            f"bindery: {len(progress.unrecoverable)} ledgers cannot be healed: {shown}; "
            f"`bindery recovery explain {progress.unrecoverable[0]}` says why",
            file=sys.stderr,
        )
        return False
    return True


def progress_line(progress: "Progress") -> str:
    """One line for people who wait."""
    from bindery.common.tables import size_text

    eta = "" if progress.eta_s is None or not progress.size_left else f", about {duration_text(progress.eta_s)} left"
    moved = max(0, progress.size_total - progress.size_left)
    ledgers = f"{progress.ledgers_left} of {progress.ledgers_total} ledgers left"
    if not progress.size_total:  # all are open: their sizes are not known yet
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
        "goes_on": started.goes_on, "ledgers": len(holdings.ledgers), "open_ledgers": holdings.open_count,
        "entries": holdings.entries, "bytes": holdings.size, "unreadable": list(holdings.unreadable),
    }  # fmt: skip


def _amount(started: "Started") -> str:
    from bindery.common.tables import size_text

    holdings = started.holdings
    text = f"{len(holdings.ledgers)} ledgers, {size_text(holdings.size)}"
    if holdings.open_count:
        text += f" and what {holdings.open_count} open ones have"
    if holdings.unreadable:
        text += f"; the metadata of {len(holdings.unreadable)} ledgers cannot be read, they may lie there too"
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
        return [f"there are bookies to take it: {spares} can be written, and no ledger needs more than {needed}"]
    return [
        f"ledger {ledger_id} needs {needed} bookies and only {spares} can be written: "
        f"it waits until {needed - spares} more join"
    ]


def _say(as_json: bool, facts: dict[str, Any], line: str) -> None:
    print(json.dumps(facts) if as_json else line, flush=True)
