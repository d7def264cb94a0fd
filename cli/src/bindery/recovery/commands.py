"""`bindery recovery`: status of automatic recovery, explanations for single ledgers, pause and resume."""

import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bindery.common import exit_codes
from bindery.common.cluster_command import cluster_command
from bindery.common.operator import now_ms, operator_name, time_text
from bindery.common.options import (
    DEFAULT_ZOOKEEPER,
    LEDGERS_ROOT,
    AsJson,
    LedgerArgument,
    LedgersRoot,
    ZooKeeper,
    group,
)
from bindery.common.output import emit, print_json

if TYPE_CHECKING:
    from bindery_recovery.admin.recovery_admin import RecoveryAdmin

    from bindery.common.operator import Cluster

WATCH_INTERVAL_S: Final = 2.0

app = group("Show, explain and control re-replication.")


@cluster_command(app, "status")
async def status(
    cluster: "Cluster",
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every 2 seconds until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show lost and draining bookies, under-replicated ledgers, workers, speed and the estimated time left.

    Example: bindery recovery status --watch

    Exit codes: 0 all ledgers are fully replicated, or can be repaired; 1 no ledger can be repaired: recovery is paused,
    or no auditor or worker is running.
    """
    import asyncio

    from bindery_recovery.reporting.progress import Pace

    from bindery.recovery.recovery_status import read_status, status_lines

    pace = Pace()
    while True:
        facts = await read_status(cluster.store, cluster.layout, now_ms=now_ms(), pace=pace)
        if as_json:
            print_json(facts)
        else:
            if watch and sys.stdout.isatty():
                print("\x1b[2J\x1b[H", end="")
            print("\n".join(status_lines(facts, now_ms=now_ms())), flush=True)
            if watch and not sys.stdout.isatty():
                print(flush=True)
        if not watch:
            return exit_codes.OK if facts["can_heal"] else exit_codes.FAILURE
        await asyncio.sleep(WATCH_INTERVAL_S)


@cluster_command(app, "explain")
async def explain(
    cluster: "Cluster",
    ledger: LedgerArgument,
    as_json: AsJson = False,
) -> int:
    """Explain why a ledger is not repaired and what to do.

    Example: bindery recovery explain 7

    Exit codes: 0 no action is needed; 1 the ledger cannot be repaired without an action.
    """
    from bindery_core.ids import LedgerId

    from bindery.recovery.recovery_explain import explain_ledger, explanation_lines

    facts = await explain_ledger(_admin(cluster), LedgerId(ledger))
    emit(facts, explanation_lines(facts), as_json=as_json)
    return exit_codes.FAILURE if facts["waits"] else exit_codes.OK


@cluster_command(app, "history")
async def history(
    cluster: "Cluster",
    limit: Annotated[
        int, typer.Option("-n", "--limit", metavar="N", min=1, max=1000, help="Maximum number of events.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """List recovery events, newest last: bookies lost and returned, ledgers marked and repaired, drains, checks.

    Example: bindery recovery history -n 20
    """
    from bindery_metadata.recovery.recovery_records import RecoveryRecords

    events = await RecoveryRecords(cluster.store).history(limit)
    for event in reversed(events):
        if as_json:
            facts = {"at_ms": event.at_ms, "kind": event.kind, "text": event.text, "fields": dict(event.fields)}
            print_json(facts)
        else:
            print(f"{time_text(event.at_ms)}  {event.kind:<18} {event.text}")
    if not events and not as_json:
        print("no events are recorded", file=sys.stderr)


@cluster_command(app, "pause")
async def pause(
    cluster: "Cluster",
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason, shown to other operators.")],
    as_json: AsJson = False,
) -> None:
    """Pause automatic recovery: no bookie is declared lost and no entry is copied until `resume`.

    Example: bindery recovery pause --reason "moving rack 3"
    """
    done = await _admin(cluster).pause(reason)
    emit(
        {"paused": True, "by": done.by, "reason": done.reason, "at_ms": done.at_ms},
        f"automatic recovery is paused: {reason}; run `bindery recovery resume` to resume it",
        as_json=as_json,
    )


@cluster_command(app, "resume")
async def resume(cluster: "Cluster", as_json: AsJson = False) -> None:
    """Resume automatic recovery.

    Example: bindery recovery resume
    """
    was_paused = await _admin(cluster).resume()
    emit(
        {"paused": False, "was_paused": was_paused},
        "automatic recovery is resumed" if was_paused else "automatic recovery was not paused",
        as_json=as_json,
    )


@cluster_command(app, "retry")
async def retry(
    cluster: "Cluster",
    ledger: LedgerArgument,
    as_json: AsJson = False,
) -> None:
    """Retry the repair of a marked ledger now: ends its back-off or its unrecoverable state.

    Example: bindery recovery retry 7

    Exit codes: 0 the repair will be retried; 1 the ledger is not marked, or does not exist.
    """
    from bindery_core.ids import LedgerId

    from bindery.recovery.recovery_explain import retry_ledger

    admin = _admin(cluster)
    if await admin.marks.get(LedgerId(ledger)) is None:
        await cluster.client.metadata(LedgerId(ledger))  # raises NoSuchLedger, a more precise error than "not marked"
    before = await retry_ledger(admin.marks, admin.records, LedgerId(ledger))
    emit(
        {"ledger_id": ledger, "was": None if before is None else before.state.value},
        f"the repair of ledger {ledger} is retried"
        + (f"; it was {before.state.value} after {before.attempts} attempts" if before else ""),
        as_json=as_json,
    )


@cluster_command(app, "trigger")
async def trigger(cluster: "Cluster", as_json: AsJson = False) -> None:
    """Start an audit of all bookies now: absent bookies count as lost without the usual delay.

    Example: bindery recovery trigger

    Exit code 1: no auditor has become leader yet.
    """
    admin = _admin(cluster)
    await admin.trigger_audit()
    auditor = await admin.auditor()
    line = (
        f"audit requested from {auditor}"
        if auditor
        else "audit requested; no auditor is running: the next one starts it"
    )
    emit({"triggered": True, "auditor": auditor}, line, as_json=as_json)


@app.command("gate")
def gate(
    bookies: Annotated[
        int | None,
        typer.Option(
            "--bookies", metavar="N", min=0, help="Number of bookies that stay: ordinals 0 to N-1; needs a template."
        ),
    ] = None,
    id_template: Annotated[
        str,
        typer.Option(
            "--id-template", metavar="ID", help="Bookie id with {} in place of the ordinal, for example b-{}.bookies."
        ),
    ] = "",
    wait: Annotated[
        str, typer.Option("--wait", metavar="TIME", help="Time to keep checking before refusing: 60s, 5m.")
    ] = "0s",
    only_drained: Annotated[
        bool,
        typer.Option("--only-drained", help="Check only the bookies to be removed, as before a rollback."),
    ] = False,
    bookies_now: Annotated[
        int | None,
        typer.Option(
            "--bookies-now",
            metavar="N",
            min=0,
            envvar="BINDERY_BOOKIES_NOW",
            help="Present number of bookies. With --only-drained, if none is removed, ZooKeeper is not needed.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Report problems, but exit with 0.")] = False,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Check whether bookies may be restarted or removed. Refuses while ledgers are under-replicated, a bookie is
    lost, or a bookie to be removed is not drained. For a job before an upgrade or a rollback; changes nothing.

    Example: bindery recovery gate --bookies 4 --id-template 'bindery-bookie-{}.bindery-bookie' --wait 60s

    Exit codes: 0 passed (also if the cluster is not initialized); 1 refused: one line for each reason, with its fix.
    """
    from bindery.recovery.recovery_gate import run_gate

    if not run_gate(
        zookeeper,
        ledgers_root,
        bookies=bookies,
        id_template=id_template,
        wait=wait,
        only_drained=only_drained,
        force=force,
        as_json=as_json,
        bookies_now=bookies_now,
    ):
        raise typer.Exit(exit_codes.FAILURE)


def _admin(cluster: "Cluster") -> "RecoveryAdmin":
    import random

    from bindery_recovery.admin.recovery_admin import RecoveryAdmin

    async def ledgers() -> Any:
        return cluster.client

    return RecoveryAdmin(
        cluster.store,
        cluster.layout,
        by=operator_name(),
        ledgers=ledgers,
        randomness=random.SystemRandom(),
        clock_ms=now_ms,
    )
