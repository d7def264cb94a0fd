"""`bindery recovery gate` on metadata in memory: which clusters pass, and the fix for each refusal."""

import json
from typing import Any

import pytest
from bindery.recovery import recovery_gate
from bindery_core.errors import MetadataUnavailable
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryStore
from bindery_recovery.draining import upgrade_gate
from memory_cluster import LAYOUT, MemoryCluster

TEMPLATE = "bindery-bookie-{}.bindery-bookie"
B = [TEMPLATE.format(ordinal) for ordinal in range(12)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    monkeypatch.setattr(recovery_gate, "PAUSE_S", 0.01)
    cluster = MemoryCluster(monkeypatch)
    cluster.register(*B[:6])
    cluster.elect("a0")
    return cluster


def gate(cluster: MemoryCluster, *arguments: str, bookies: int | None = None) -> tuple[int, dict[str, Any]]:
    """Return (exit code, output)."""
    scale = () if bookies is None else ("--bookies", str(bookies), "--id-template", TEMPLATE)
    result = cluster.invoke("recovery", "gate", "--json", *scale, *arguments)
    return result.exit_code, dict(json.loads(result.stdout))


def reasons(cluster: MemoryCluster, *, bookies: int | None = None) -> list[tuple[str, str | None]]:
    code, response = gate(cluster, bookies=bookies)
    assert code == (1 if response["reasons"] else 0)
    assert (response["pass"], response["open"]) == (code == 0, code == 0)
    return [(reason["kind"], reason["bookie_id"]) for reason in response["reasons"]]


def mean(
    cluster: MemoryCluster, bookie: str, intent: Intent, until_ms: int | None = None, *, follows: bool = True
) -> None:
    """Set the intent of a bookie. `follows`: if it is draining, it turns read-only, as the bookies of Bindery do."""

    async def work(store: MemoryStore) -> None:
        memberships = MembershipStore(store, clock_ms=lambda: cluster.now_ms)
        await memberships.set(BookieId(bookie), intent, until_ms=until_ms)
        if follows and intent is Intent.DRAINING:
            await cluster.turn_read_only(bookie)

    cluster.do(work)


def mark(cluster: MemoryCluster, *ledger_ids: LedgerId, paused: bool = False) -> None:
    async def work(store: MemoryStore) -> None:
        manager = UnderreplicationManager(
            store, LAYOUT, randomness=recovery_gate.NoRandomness(), clock_ms=lambda: cluster.now_ms
        )
        await manager.prepare()
        for ledger_id in ledger_ids:
            await manager.mark(ledger_id)
        if paused:
            await manager.disable()

    cluster.do(work)


def test_a_sound_cluster_passes(cluster: MemoryCluster) -> None:
    assert reasons(cluster) == []
    assert reasons(cluster, bookies=6) == []
    assert cluster.invoke("recovery", "gate").stdout == "passed: no ledger is marked and no bookie is lost\n"


def test_a_marked_ledger_is_refused_with_the_fix(cluster: MemoryCluster) -> None:
    mark(cluster, *map(LedgerId, range(7, 14)))
    code, response = gate(cluster)
    (reason,) = response["reasons"]
    assert (code, reason["kind"]) == (1, "under_replicated")
    assert reason["text"] == "7 ledgers are under-replicated (7, 8, 9, 10, 11, ...)"
    assert reason["fix"].startswith(
        "wait until `bindery recovery status --watch` shows none; `bindery recovery explain 7`"
    )
    mark(cluster, paused=True)
    assert gate(cluster)[1]["reasons"][0]["fix"].startswith(
        "automatic recovery is paused: run `bindery recovery resume`"
    )


def note(cluster: MemoryCluster, *ledgers: tuple[int, LedgerState]) -> None:
    """Create ledgers with closing records, and the closing record of a deleted ledger."""

    async def work(store: MemoryStore) -> None:
        manager = LedgerManager(store, LAYOUT, randomness=recovery_gate.NoRandomness())
        for number, state in ledgers:
            metadata = LedgerMetadata(
                ensemble_size=1,
                write_quorum=1,
                ack_quorum=1,
                segments=(Segment(EntryId(0), (BookieId(B[0]),)),),
                state=state,
                last_entry_id=EntryId(9 if state is LedgerState.CLOSED else -1),
            )
            await manager.create_with_id(LedgerId(number), metadata)
            await ClosingRecords(store).add(LedgerId(number), ClosingCause.RECOVERED)
        await ClosingRecords(store).add(LedgerId(99), ClosingCause.RECOVERED)  # deleted meanwhile

    cluster.do(work)


def test_the_gate_waits_until_a_ledger_that_recovery_closed_is_checked(cluster: MemoryCluster) -> None:
    note(cluster, (3, LedgerState.IN_RECOVERY))
    assert reasons(cluster) == [], "its writer or recovery completes the copies"
    note(cluster, *((number, LedgerState.CLOSED) for number in (4, 5)))
    code, response = gate(cluster)
    (reason,) = response["reasons"]
    assert (code, reason["kind"]) == (1, "unknown_copies")
    assert reason["text"] == (
        "2 ledgers were closed by recovery, or by a writer that missed copies, and not checked for missing copies"
        " since (4, 5)"
    )
    assert reason["fix"].startswith("wait some seconds: the auditor checks them")
    assert gate(cluster, "--force")[0] == 0
    mark(cluster, LedgerId(4), LedgerId(5))
    assert reasons(cluster) == [("under_replicated", None)], "marked ledgers are counted once"


def test_unchecked_ledgers_are_refused_with_the_fix_while_recovery_is_paused(cluster: MemoryCluster) -> None:
    note(cluster, (4, LedgerState.CLOSED))
    mark(cluster, paused=True)
    assert gate(cluster)[1]["reasons"][0]["fix"].startswith(
        "automatic recovery is paused: run `bindery recovery resume`"
    )


def test_force_passes_and_reports_the_reasons(cluster: MemoryCluster) -> None:
    mark(cluster, LedgerId(7))
    code, response = gate(cluster, "--force")
    assert (code, response["pass"], response["open"], len(response["reasons"])) == (0, True, False, 1)
    refused = cluster.invoke("recovery", "gate")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[0].startswith("refused: 1 ledger is under-replicated (7); wait until")
    assert "--set upgradeGate.force=true" in refused.stderr.splitlines()[-1]
    forced = cluster.invoke("recovery", "gate", "--force")
    assert forced.exit_code == 0
    assert forced.stderr.startswith("passed by force: 1 ledger is under-replicated")


def test_an_absent_bookie_without_maintenance_is_refused(cluster: MemoryCluster) -> None:
    cluster.stop(B[1])
    assert reasons(cluster) == [("lost", B[1])]
    assert f"`bindery bookie recover {B[1]} --yes --wait`" in gate(cluster)[1]["reasons"][0]["fix"]


@pytest.mark.parametrize(
    ("intent", "until_s", "expected"),
    [
        (Intent.MAINTENANCE, 600, []),
        (Intent.MAINTENANCE, None, []),
        (Intent.MAINTENANCE, -1, [("lost", B[1])]),
        (Intent.JOINING, None, []),
        (Intent.REMOVED, None, []),
        (Intent.DRAINING, None, []),
    ],
)
def test_the_intent_decides_whether_an_absent_bookie_is_refused(
    cluster: MemoryCluster, intent: Intent, until_s: int | None, expected: list[tuple[str, str]]
) -> None:
    cluster.stop(B[1])
    mean(cluster, B[1], intent, None if until_s is None else cluster.now_ms + 1000 * until_s)
    assert reasons(cluster) == expected


def test_a_joining_bookie_that_is_registered_must_be_drained_before_it_is_removed(cluster: MemoryCluster) -> None:
    mean(cluster, B[5], Intent.JOINING)
    assert reasons(cluster) == []
    assert reasons(cluster, bookies=5) == [("not_drained", B[5])]
    cluster.stop(B[5])
    assert reasons(cluster, bookies=5) == [], "it never served"


def test_closing_records_beyond_the_limit_of_one_check_are_refused_unread(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(cluster, (3, LedgerState.IN_RECOVERY), (4, LedgerState.IN_RECOVERY))
    assert reasons(cluster) == [], "two are not closed yet, ledger 99 was deleted"
    monkeypatch.setattr(upgrade_gate, "NOTES_READ_MAX", 2)
    (reason,) = gate(cluster)[1]["reasons"]
    assert reason["kind"] == "unknown_copies"
    assert reason["text"].endswith("(99)")


def test_an_absent_draining_bookie_with_entries_is_lost(cluster: MemoryCluster) -> None:
    cluster.ledger(B[0], B[1], B[2])
    mean(cluster, B[1], Intent.DRAINING, follows=False)
    assert reasons(cluster) == []
    cluster.stop(B[1])
    assert reasons(cluster) == [("lost", B[1])]


def test_bookies_to_be_removed_must_be_drained(cluster: MemoryCluster) -> None:
    cluster.ledger(B[0], B[1], B[4])
    assert reasons(cluster, bookies=4) == [("not_drained", B[4]), ("not_drained", B[5])]
    fixes = [reason["fix"] for reason in gate(cluster, bookies=4)[1]["reasons"]]
    assert fixes == [f"`bindery bookie drain {bookie} --wait`" for bookie in B[4:6]]

    mean(cluster, B[4], Intent.DRAINING)
    mean(cluster, B[5], Intent.DRAINING)
    code, response = gate(cluster, bookies=4)
    assert [reason["text"] for reason in response["reasons"]] == [
        f"bookie {B[4]} is to be removed, but 1 ledgers still name it"
    ]
    assert code == 1


def test_a_writable_bookie_that_no_ledger_names_may_not_be_removed(cluster: MemoryCluster) -> None:
    mean(cluster, B[5], Intent.DRAINING, follows=False)
    assert reasons(cluster, bookies=5) == [("not_drained", B[5])]
    (reason,) = gate(cluster, bookies=5)[1]["reasons"]
    assert reason["text"].startswith(
        f"bookie {B[5]} is to be removed and is empty, but {B[5]} is still registered as writable: "
    )
    assert reasons(cluster) == [], "it may be restarted"
    mean(cluster, B[5], Intent.DRAINING)
    assert reasons(cluster, bookies=5) == []


def test_a_bookie_that_no_ledger_names_may_be_removed(cluster: MemoryCluster) -> None:
    cluster.ledger(B[0], B[1], B[2])
    mean(cluster, B[4], Intent.DRAINING, follows=False)
    cluster.stop(B[4])
    mean(cluster, B[5], Intent.REMOVED)
    assert reasons(cluster, bookies=4) == []
    cluster.stop(B[5])
    assert reasons(cluster, bookies=4) == []
    assert reasons(cluster, bookies=6) == [], "a note is enough if it stays"
    notes = gate(cluster, bookies=6)[1]["notes"]
    assert [note.partition(";")[0] for note in notes] == [
        f"bookie {B[4]} is to stay, but is draining: it accepts no new ledgers",
        f"bookie {B[5]} is to stay, but is removed: it does not start",
    ]


def test_a_rollback_is_refused_only_for_bookies_that_it_removes(cluster: MemoryCluster) -> None:
    cluster.ledger(B[0], B[1], B[4])
    mark(cluster, LedgerId(7))
    note(cluster, (8, LedgerState.CLOSED))
    cluster.stop(B[1])
    assert len(reasons(cluster, bookies=6)) == 3
    assert gate(cluster, "--only-drained", bookies=6)[0] == 0

    code, response = gate(cluster, "--only-drained", bookies=4)
    (reason,) = response["reasons"]
    assert (code, reason["kind"], reason["bookie_id"]) == (1, "not_drained", B[4])
    assert reason["text"] == f"bookie {B[4]} is to be removed, but 1 ledgers still name it"
    cluster.stop(B[4])
    code, response = gate(cluster, "--only-drained", bookies=4)
    assert (code, [(reason["kind"], reason["bookie_id"]) for reason in response["reasons"]]) == (1, [("lost", B[4])]), (
        "it may hold the only copy"
    )
    mean(cluster, B[4], Intent.REMOVED)
    assert gate(cluster, "--only-drained", bookies=4)[0] == 0


@pytest.mark.parametrize("intent", [None, Intent.JOINING, Intent.MAINTENANCE, Intent.DRAINING])
@pytest.mark.parametrize("is_away", [False, True])
def test_bookies_added_by_a_failed_upgrade_may_be_removed(
    cluster: MemoryCluster, intent: Intent | None, is_away: bool
) -> None:
    """An upgrade to more bookies failed after they had registered: they are not drained, and no ledger names them."""
    cluster.ledger(B[0], B[1], B[2])
    if intent is not None:
        mean(cluster, B[5], intent, follows=False)
    if is_away:
        cluster.stop(B[5])
    assert gate(cluster, "--only-drained", bookies=4)[0] == 0
    cluster.ledger(B[0], B[1], B[5])
    code, response = gate(cluster, "--only-drained", bookies=4)
    assert (code, [reason["bookie_id"] for reason in response["reasons"]]) == (1, [B[5]])


def test_a_refused_rollback_names_the_fix(cluster: MemoryCluster) -> None:
    scale = ("--bookies", "5", "--id-template", TEMPLATE)
    ledger_id = cluster.ledger(B[0], B[1], B[5])
    refused = cluster.invoke("recovery", "gate", "--only-drained", *scale)
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].endswith("--force (of a rollback by Helm: --no-hooks) passes nevertheless")
    cluster.do(lambda store: LedgerManager(store, LAYOUT, randomness=recovery_gate.NoRandomness()).delete(ledger_id))
    passed = cluster.invoke("recovery", "gate", "--only-drained", *scale)
    assert passed.stdout == "passed: only the 5 bookies that stay hold data\n"


@pytest.mark.parametrize("is_away", [False, True])
def test_maintenance_does_not_permit_removal(cluster: MemoryCluster, is_away: bool) -> None:
    mean(cluster, B[5], Intent.MAINTENANCE)
    if is_away:
        cluster.stop(B[5])
    assert reasons(cluster, bookies=5) == [("not_drained", B[5])]


def test_ordinals_are_numbers_and_other_bookies_are_ignored(cluster: MemoryCluster) -> None:
    cluster.register(
        B[10], "other-bookie-9.elsewhere", "bindery-bookie-07.bindery-bookie", "bindery-bookie-x.bindery-bookie"
    )
    assert reasons(cluster, bookies=6) == [("not_drained", B[10])]


def test_an_id_template_that_matches_no_bookie_is_refused(cluster: MemoryCluster) -> None:
    """With another release name, all existing bookies would be removed together with their data."""
    result = cluster.invoke("recovery", "gate", "--bookies", "6", "--id-template", "other-bookie-{}.other-bookie")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[0].startswith(
        f"refused: none of the 6 bookies (such as {B[0]}) has an id like other-bookie-0.other-bookie; use the"
    )
    assert cluster.invoke("recovery", "gate", "--bookies", "0", "--id-template", "none-{}").exit_code == 0


def test_a_cluster_without_a_bookie_yet_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_gate, "PAUSE_S", 0.01)
    assert reasons(MemoryCluster(monkeypatch), bookies=4) == []


def test_a_cluster_that_is_not_initialized_passes(cluster: MemoryCluster) -> None:
    result = cluster.invoke("recovery", "gate", "--ledgers-root", "/none", "--bookies", "1", "--id-template", TEMPLATE)
    assert result.exit_code == 0
    assert "not initialized: there is no data to protect" in result.stdout


def test_a_cluster_without_an_auditor_passes_with_a_note(cluster: MemoryCluster) -> None:
    async def work(store: MemoryStore) -> None:
        for vote in await store.children(LAYOUT.auditor_election):
            await store.delete(f"{LAYOUT.auditor_election}/{vote}", version=None)

    cluster.do(work)
    code, response = gate(cluster)
    assert (code, response["notes"]) == (0, ["no auditor is running: under-replicated ledgers may not be marked"])


def test_the_gate_waits_for_conditions_that_end_by_themselves(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.stop(B[1])
    checks: list[int] = []
    real_check = recovery_gate.check_gate

    async def check_gate(store: MemoryStore, layout: LedgersLayout, **rest: Any) -> Any:
        checks.append(1)
        if len(checks) == 4:
            await store.create(LAYOUT.bookie(BookieId(B[1]), read_only=True))
        return await real_check(store, layout, **rest)

    monkeypatch.setattr(recovery_gate, "check_gate", check_gate)
    assert gate(cluster, "--wait", "60s")[0] == 0
    assert len(checks) == 4


def test_an_unreachable_zookeeper_is_refused(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def connected_store(zookeeper: str) -> Any:
        raise MetadataUnavailable("no zookeeper server responds", hosts=zookeeper)

    monkeypatch.setattr(recovery_gate, "connected_store", connected_store)
    code, response = gate(cluster, "--zookeeper", "zk:2181")
    assert (code, response["reasons"][0]["kind"]) == (1, "unreachable")
    assert "hosts=zk:2181" in response["reasons"][0]["text"]
    assert gate(cluster, "--bookies-now", "4", bookies=4)[0] == 1, "an upgrade needs ZooKeeper"


@pytest.mark.parametrize(("now", "passes"), [(None, False), (3, True), (4, True), (5, False)])
def test_a_rollback_that_removes_no_bookie_needs_no_zookeeper(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, now: int | None, passes: bool
) -> None:
    def connected_store(zookeeper: str) -> Any:
        raise MetadataUnavailable("no zookeeper server responds", hosts=zookeeper)

    monkeypatch.setattr(recovery_gate, "connected_store", connected_store)
    if now is not None:
        monkeypatch.setenv("BINDERY_BOOKIES_NOW", str(now))
    code, response = gate(cluster, "--only-drained", bookies=4)
    assert (code == 0, response["pass"]) == (passes, passes)
    if passes:
        (note,) = response["notes"]
        assert note.startswith("ZooKeeper is unreachable: ")
        assert note.endswith(f"; none of {now} bookies is removed")


def test_registered_bookies_count_more_than_the_configured_number(cluster: MemoryCluster) -> None:
    cluster.ledger(B[0], B[1], B[4])
    assert gate(cluster, "--only-drained", "--bookies-now", "4", bookies=4)[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--bookies", "4"),
        ("--id-template", TEMPLATE),
        ("--bookies", "4", "--id-template", "b"),
        ("--wait", "soon"),
        ("--only-drained",),
    ],
)
def test_contradictory_options_are_refused(cluster: MemoryCluster, arguments: tuple[str, ...]) -> None:
    result = cluster.invoke("recovery", "gate", *arguments)
    assert type(result.exception).__name__ == "BadRequest"
