"""`bindery recovery`: how the cluster heals itself, why a ledger is not healed, and the switch."""

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
    watch: Annotated[bool, typer.Option("--watch", help="Again every 2 seconds, until Ctrl-C.")] = False,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Show what is lost, draining and marked, who heals, how fast, and when it will be done.

    Example: bindery recovery status --watch

    Exit codes: 0 nothing is to be healed, or it is being healed; 1 nothing can be healed: paused, or no auditor or
    worker is there.
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
    """Say in a sentence why a ledger is not healed and what would heal it, with the facts.

    Example: bindery recovery explain 7

    Exit codes: 0 it needs no healing, or is on its way; 1 it waits for something.
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
    limit: Annotated[int, typer.Option("-n", "--limit", metavar="N", min=1, max=1000, help="At most so many.")] = 50,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """List what happened: bookies lost and back, ledgers marked and healed, drains, checks, pauses. The newest last.

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
            print("nothing has happened yet", file=sys.stderr)

    run_on(zookeeper, ledgers_root, work)


@app.command("pause")
def pause(
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the others to read.")],
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Stop all healing: no bookie counts as lost, nothing is copied, until `resume`. BookKeeper's own switch.

    Example: bindery recovery pause --reason "moving rack 3"
    """

    async def work(cluster: "Cluster") -> None:
        done = await _admin(cluster).pause(reason)
        _say(as_json, {"paused": True, "by": done.by, "reason": done.reason, "at_ms": done.at_ms},
             f"healing is paused: {reason}; `bindery recovery resume` lets it go on")  # fmt: skip

    run_on(zookeeper, ledgers_root, work)


@app.command("resume")
def resume(
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER, ledgers_root: LedgersRoot = LEDGERS_ROOT, as_json: AsJson = False
) -> None:
    """Let healing go on.

    Example: bindery recovery resume
    """

    async def work(cluster: "Cluster") -> None:
        was_paused = await _admin(cluster).resume()
        _say(as_json, {"paused": False, "was_paused": was_paused},
             "healing goes on" if was_paused else "it was not paused")  # fmt: skip

    run_on(zookeeper, ledgers_root, work)


@app.command("retry")
def retry(
    ledger: LedgerArgument,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Have a marked ledger tried again now: end its back-off, or its state of being unrecoverable.

    Example: bindery recovery retry 7

    Exit codes: 0 it will be tried, 1 it is not marked, or not there.
    """

    async def work(cluster: "Cluster") -> None:
        from bindery_core.ids import LedgerId

        from bindery.recovery.recovery_explain import retry_ledger

        admin = _admin(cluster)
        if await admin.marks.get(LedgerId(ledger)) is None:
            await cluster.client.metadata(LedgerId(ledger))  # NoSuchLedger says more than "not marked"
        before = await retry_ledger(admin.marks, admin.records, LedgerId(ledger))
        _say(as_json, {"ledger_id": ledger, "was": None if before is None else before.state.value},
             f"ledger {ledger} is tried again"
             + (f"; it was {before.state.value} after {before.attempts} attempts" if before else ""))  # fmt: skip

    run_on(zookeeper, ledgers_root, work)


@app.command("trigger")
def trigger(
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER, ledgers_root: LedgersRoot = LEDGERS_ROOT, as_json: AsJson = False
) -> None:
    """Have the auditor look at all bookies now: those that are away count as lost without their delay.

    Example: bindery recovery trigger

    Exit code 1: no auditor has led yet.
    """

    async def work(cluster: "Cluster") -> None:
        admin = _admin(cluster)
        await admin.trigger_audit()
        auditor = await admin.auditor()
        line = f"{auditor} was asked for an audit" if auditor else "asked; no auditor is running: the next one does it"
        _say(as_json, {"triggered": True, "auditor": auditor}, line)

    run_on(zookeeper, ledgers_root, work)


@app.command("gate")
def gate(
    bookies: Annotated[
        int | None,
        typer.Option("--bookies", metavar="N", min=0, help="So many are to stay: ordinals 0 to N-1; needs a template."),
    ] = None,
    id_template: Annotated[
        str,
        typer.Option("--id-template", metavar="ID", help="A bookie's id with {} for its ordinal: b-{}.bookies"),
    ] = "",
    wait: Annotated[
        str, typer.Option("--wait", metavar="TIME", help="Look again for so long before refusing: 60s, 5m.")
    ] = "0s",
    only_drained: Annotated[
        bool,
        typer.Option(
            "--only-drained", help="Ask only what bookies hold that are to go, as before a rollback, which may heal."
        ),
    ] = False,
    bookies_now: Annotated[
        int | None,
        typer.Option(
            "--bookies-now",
            metavar="N",
            min=0,
            envvar="BINDERY_BOOKIES_NOW",
            help="So many are there: with --only-drained, N or more that stay need no ZooKeeper to say so.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Say what is wrong, and let it pass.")] = False,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    ledgers_root: LedgersRoot = LEDGERS_ROOT,
    as_json: AsJson = False,
) -> None:
    """Refuse while bookies must not be restarted or taken away: ledgers lack copies, a bookie is lost, or one that is
    to go was not drained. For a job before an upgrade or a rollback; changes nothing.

    Example: bindery recovery gate --bookies 4 --id-template 'bindery-bookie-{}.bindery-bookie' --wait 60s

    Exit codes: 0 go on (also where no cluster is initialised yet), 1 refused: one line for each reason, with its fix.
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
