"""`bindery recovery`: status of automatic recovery, explanations for single ledgers, pause and resume."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bindery.common.operator import now_ms, operator_name, run_on, time_text
from bindery.common.options import (
    DEFAULT_ZOOKEEPER,
    LEDGERS_ROOT,
    AsJson,
    LedgerArgument,
    LedgersRoot,
    ZooKeeper,
    group,
)

if TYPE_CHECKING:
    from bindery_recovery.admin.recovery_admin import RecoveryAdmin

    from bindery.common.operator import Cluster

EXIT_NOT_DONE: Final = 1
WATCH_INTERVAL_S: Final = 2.0

app = group("Show, explain and control re-replication.")


@app.command("status")
def status(
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every 2 seconds until Ctrl-C.")] = False,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show lost and draining bookies, under-replicated ledgers, workers, speed and the estimated time left.

    Example: bindery recovery status --watch

    Exit codes: 0 all ledgers are fully replicated, or can be repaired; 1 no ledger can be repaired: recovery is paused,
    or no auditor or worker is running.
    """

    async def work(cluster: "Cluster") -> int:
        import asyncio

        from bindery_recovery.reporting.progress import Pace

        from bindery.recovery.recovery_status import read_status, status_lines

        pace = Pace()
        while True:
            facts = await read_status(cluster.store, cluster.layout, now_ms=now_ms(), pace=pace)
            if as_json:
                print(json.dumps(facts), flush=True)
            else:
                if watch and sys.stdout.isatty():
                    print("\x1b[2J\x1b[H", end="")
                print("\n".join(status_lines(facts, now_ms=now_ms())), flush=True)
                if watch and not sys.stdout.isatty():
                    print(flush=True)
            if not watch:
                return 0 if facts["can_heal"] else EXIT_NOT_DONE
            await asyncio.sleep(WATCH_INTERVAL_S)

    if code := run_on(zookeeper, ledgers_root, work):
        raise typer.Exit(code)


@app.command("explain")
def explain(
    ledger: LedgerArgument,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Explain why a ledger is not repaired and what to do.

    Example: bindery recovery explain 7

    Exit codes: 0 no action is needed; 1 the ledger cannot be repaired without an action.
    """

    async def work(cluster: "Cluster") -> int:
        from bindery_core.ids import LedgerId

        from bindery.recovery.recovery_explain import explain_ledger, explanation_lines

        facts = await explain_ledger(_admin(cluster), LedgerId(ledger))
        print(json.dumps(facts) if as_json else "\n".join(explanation_lines(facts)))
        return EXIT_NOT_DONE if facts["waits"] else 0

    if code := run_on(zookeeper, ledgers_root, work):
        raise typer.Exit(code)


@app.command("history")
def history(
    limit: Annotated[
        int, typer.Option("-n", "--limit", metavar="N", min=1, max=1000, help="Maximum number of events.")
    ] = 50,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """List recovery events, newest last: bookies lost and returned, ledgers marked and repaired, drains, checks.

    Example: bindery recovery history -n 20
    """

    async def work(cluster: "Cluster") -> None:
        from bindery_metadata.recovery.recovery_records import RecoveryRecords

        events = await RecoveryRecords(cluster.store).history(limit)
        for event in reversed(events):
            if as_json:
                facts = {"at_ms": event.at_ms, "kind": event.kind, "text": event.text, "fields": dict(event.fields)}
                print(json.dumps(facts))
            else:
                print(f"{time_text(event.at_ms)}  {event.kind:<18} {event.text}")
        if not events and not as_json:
            print("no events are recorded", file=sys.stderr)

    run_on(zookeeper, ledgers_root, work)


@app.command("pause")
def pause(
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason, shown to other operators.")],
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Pause automatic recovery: no bookie is declared lost and no entry is copied until `resume`.

    Example: bindery recovery pause --reason "moving rack 3"
    """

    async def work(cluster: "Cluster") -> None:
        done = await _admin(cluster).pause(reason)
        _say(as_json, {"paused": True, "by": done.by, "reason": done.reason, "at_ms": done.at_ms},
             f"automatic recovery is paused: {reason}; run `bindery recovery resume` to resume it")  # fmt: skip

    run_on(zookeeper, ledgers_root, work)


@app.command("resume")
def resume(
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER, ledgers_root: LedgersRoot = LEDGERS_ROOT, as_json: AsJson = False
) -> None:
    """Resume automatic recovery.

    Example: bindery recovery resume
    """

    async def work(cluster: "Cluster") -> None:
        was_paused = await _admin(cluster).resume()
        _say(as_json, {"paused": False, "was_paused": was_paused},
             "automatic recovery is resumed" if was_paused else "automatic recovery was not paused")  # fmt: skip

    run_on(zookeeper, ledgers_root, work)


@app.command("retry")
def retry(
    ledger: LedgerArgument,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Retry the repair of a marked ledger now: ends its back-off or its unrecoverable state.

    Example: bindery recovery retry 7

    Exit codes: 0 the repair will be retried; 1 the ledger is not marked, or does not exist.
    """

    async def work(cluster: "Cluster") -> None:
        from bindery_core.ids import LedgerId

        from bindery.recovery.recovery_explain import retry_ledger

        admin = _admin(cluster)
        if await admin.marks.get(LedgerId(ledger)) is None:
            await cluster.client.metadata(LedgerId(ledger))  # NoSuchLedger says more than "not marked"
        before = await retry_ledger(admin.marks, admin.records, LedgerId(ledger))
        _say(as_json, {"ledger_id": ledger, "was": None if before is None else before.state.value},
             f"the repair of ledger {ledger} is retried"
             + (f"; it was {before.state.value} after {before.attempts} attempts" if before else ""))  # fmt: skip

    run_on(zookeeper, ledgers_root, work)


@app.command("trigger")
def trigger(
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER, ledgers_root: LedgersRoot = LEDGERS_ROOT, as_json: AsJson = False
) -> None:
    """Start an audit of all bookies now: absent bookies count as lost without the usual delay.

    Example: bindery recovery trigger

    Exit code 1: no auditor has become leader yet.
    """

    async def work(cluster: "Cluster") -> None:
        admin = _admin(cluster)
        await admin.trigger_audit()
        auditor = await admin.auditor()
        line = (
            f"audit requested from {auditor}"
            if auditor
            else "audit requested; no auditor is running: the next one starts it"
        )
        _say(as_json, {"triggered": True, "auditor": auditor}, line)

    run_on(zookeeper, ledgers_root, work)


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
        zookeeper, ledgers_root, bookies=bookies, id_template=id_template, wait=wait, only_drained=only_drained,
        force=force, as_json=as_json, bookies_now=bookies_now,
    ):  # fmt: skip
        raise typer.Exit(EXIT_NOT_DONE)


def _admin(cluster: "Cluster") -> "RecoveryAdmin":
    import random

    from bindery_recovery.admin.recovery_admin import RecoveryAdmin

    async def ledgers() -> Any:
        return cluster.client

    return RecoveryAdmin(
        cluster.store, cluster.layout, by=operator_name(), ledgers=ledgers, randomness=random.SystemRandom(),
        clock_ms=now_ms,
    )  # fmt: skip


def _say(as_json: bool, facts: dict[str, Any], line: str) -> None:
    print(json.dumps(facts) if as_json else line)
