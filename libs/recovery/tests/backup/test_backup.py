"""Backup and restore of a cluster's metadata, over memory and over a real ZooKeeper."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from bindery_core.errors import BadRequest, BadVersion, Corrupt, MetadataUnavailable, NoSuchNode
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_plans import plan_close
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import BinderyLayout, LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.recovery.recovery_records import Pause, RecoveryRecord, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.store import MetadataStore, Node
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_recovery.backup.backup import BackupSummary, verify_backup, walk, write_backup
from bindery_recovery.backup.restore import CannotRestore, RestoreSummary, restore_backup

LAYOUT = LedgersLayout()
METADATA = LedgerMetadata(
    ensemble_size=1,
    write_quorum=1,
    ack_quorum=1,
    segments=(Segment(EntryId(0), (BookieId("b0"),)),),
    password=b"secret",
    custom={"application": b"pulsar"},
)
Connect = Callable[[], Awaitable[MetadataStore]]


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = EmbeddedZooKeeper(ServerSpec(tmp_path_factory.mktemp("zookeeper"), port))
    asyncio.run(server.start())
    yield f"127.0.0.1:{port}"
    asyncio.run(server.stop())


@pytest.fixture(params=["memory", pytest.param("zookeeper", marks=pytest.mark.integration)])
def server(request: pytest.FixtureRequest) -> str | None:
    """Return the address of a ZooKeeper server; None: use a store in memory."""
    return None if request.param == "memory" else str(request.getfixturevalue("zookeeper"))


@pytest.fixture
async def clusters(server: str | None) -> AsyncIterator[tuple[MetadataStore, Connect]]:
    """A store, and a function that returns an empty one; on ZooKeeper it is the same server, wiped."""
    opened: list[MetadataStore] = []

    async def connect() -> MetadataStore:
        if server is None:
            opened.append(MemoryTree().connect())
        else:
            opened.append(await ZooKeeperStore.connect(server))
            await wipe(opened[-1])
        return opened[-1]

    yield await connect(), connect
    for store in opened:
        await store.close()


async def wipe(store: MetadataStore, path: str = "") -> None:
    for name in await store.children(path or "/"):
        if name != "zookeeper":
            await wipe(store, f"{path}/{name}")
            with suppress(NoSuchNode):
                await store.delete(f"{path}/{name}", version=None)


async def populated(store: MetadataStore, *, ledgers: int = 5) -> LedgerManager:
    """A cluster with a bookie, ledgers, a topic, and nodes under /bindery."""
    await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    manager = LedgerManager(store, LAYOUT, randomness=random.Random(2))
    for _ in range(ledgers):
        await manager.create(METADATA)
    await store.create(LAYOUT.cookie(BookieId("b0")), b"cookie\n", make_parents=True)
    await store.create(LAYOUT.bookie(BookieId("b0"), read_only=False), b"here", ephemeral=True)
    await store.create("/managed-ledgers/public/default/persistent/t", b"\x00\xff topic", make_parents=True)
    await store.create(LAYOUT.mark(LedgerId(3)), b'replica: "b0"\n', make_parents=True)
    await store.create(LAYOUT.mark_lock(LedgerId(3)), b"lock", ephemeral=True, make_parents=True)
    await store.create("/bindery/membership/b0", b'{"intent":"draining"}', make_parents=True)
    await store.create("/bindery/recovery/history", make_parents=True)
    for number in range(7):
        path = await store.create("/bindery/recovery/history/E_", b"event", sequential=True)
        if number < 4:
            await store.delete(path, version=None)
    return manager


async def backed_up(store: MetadataStore, **options: Any) -> tuple[list[bytes], BackupSummary]:
    lines: list[bytes] = []
    summary = await write_backup(store, LAYOUT, lines.append, now_ms=1_700_000_000_000, **options)
    return lines, summary


async def restored(store: MetadataStore, lines: list[bytes], **options: Any) -> RestoreSummary:
    return await restore_backup(store, LAYOUT, verify_backup(lines), lines, **({"id_margin": 10} | options))


COLLECTION = BinderyLayout().known_ledgers.rpartition("/")[0]


async def tree_of(store: MetadataStore) -> dict[str, bytes]:
    """Return every persistent node except those of ZooKeeper itself, and the ids that a restore skipped."""
    names = [name for name in await store.children("/") if name != "zookeeper"]
    found = {path: node.data for name in names async for path, node in walk(store, f"/{name}")}
    return {path: data for path, data in found.items() if not path.startswith(COLLECTION)}


async def test_all_persistent_nodes_are_restored_and_ephemeral_ones_are_not(
    clusters: tuple[MetadataStore, Connect],
) -> None:
    store, connect = clusters
    manager = await populated(store)
    lines, summary = await backed_up(store)
    assert summary.settled
    assert (summary.ledgers, summary.passes) == (5, 2)
    before = await tree_of(store)
    target = await connect()
    result = await restored(target, lines)
    assert (result.created, result.kept, result.differing) == (summary.nodes, 0, 0)
    assert await tree_of(target) == before
    assert len(before) == summary.nodes
    assert LAYOUT.bookie(BookieId("b0"), read_only=False) not in before
    assert LAYOUT.mark_lock(LedgerId(3)) not in before
    there = LedgerManager(target, LAYOUT, randomness=random.Random(3))
    assert (await there.read(LedgerId(4))).value.password == b"secret"
    await manager.close()


async def test_new_ledgers_get_ids_above_all_known_ones_and_history_continues(
    clusters: tuple[MetadataStore, Connect],
) -> None:
    store, connect = clusters
    manager = await populated(store)
    for ledger_id in (2, 3, 4):  # the counter is above the ids of all ledgers that exist
        await manager.delete(LedgerId(ledger_id))
    await manager.create_with_id(LedgerId(1200), METADATA)
    lines, _ = await backed_up(store)
    target = await connect()
    result = await restored(target, lines, id_margin=50)
    assert result.next_ledger_id == 1251
    there = LedgerManager(target, LAYOUT, randomness=random.Random(3))
    assert (await there.create(METADATA))[0] == 1251
    assert (await target.create("/bindery/recovery/history/E_", sequential=True)).endswith("E_0000000007")
    await manager.close()
    await there.close()


async def test_a_counter_that_cannot_be_reached_switches_the_cluster_to_long_ids(
    clusters: tuple[MetadataStore, Connect],
) -> None:
    store, connect = clusters
    manager = await populated(store)
    await manager.create_with_id(LedgerId(1_999_999_999), METADATA)
    lines, _ = await backed_up(store)
    target = await connect()
    result = await restored(target, lines)
    there = LedgerManager(target, LAYOUT, randomness=random.Random(3))
    assert (await there.create(METADATA))[0] == result.next_ledger_id == 1 << 32
    # A second restore, of a cluster with long ids, starts above the upper half that was in use.
    lines, _ = await backed_up(target)
    result = await restored(target, lines, merge=True)
    assert (await LedgerManager(target, LAYOUT, randomness=random.Random(4)).create(METADATA))[0] == 2 << 32
    assert result.next_ledger_id == 2 << 32
    await manager.close()


async def test_restore_refuses_a_cluster_with_data_and_merge_adds_only_missing_nodes(
    clusters: tuple[MetadataStore, Connect],
) -> None:
    store, _ = clusters
    manager = await populated(store)
    lines, summary = await backed_up(store)
    await manager.delete(LedgerId(1))
    await store.set("/bindery/membership/b0", b"{}", version=None)
    await store.delete("/managed-ledgers/public/default/persistent/t", version=None)
    with pytest.raises(CannotRestore, match="--merge adds what is missing"):
        await restored(store, lines)
    planned = await restored(store, lines, merge=True, dry_run=True)
    with pytest.raises(NoSuchNode):
        await store.get("/managed-ledgers/public/default/persistent/t")
    done = await restored(store, lines, merge=True)
    assert (planned.created, planned.kept, planned.differing) == (done.created, done.kept, done.differing)
    assert (done.created, done.kept, done.differing) == (2, summary.nodes - 2, 1)
    assert (await store.get("/bindery/membership/b0")).data == b"{}"
    assert (await manager.read(LedgerId(1))).value.custom == METADATA.custom
    await manager.close()


async def test_a_merge_into_an_existing_cluster_restores_no_intents(
    clusters: tuple[MetadataStore, Connect],
) -> None:
    """A bookie that serves again is not declared removed again, and recovery is not paused."""
    store, connect = clusters
    manager = await populated(store)
    memberships = MembershipStore(store, clock_ms=lambda: 1)
    marks = UnderreplicationManager(store, LAYOUT, randomness=random.Random(1), clock_ms=lambda: 1)
    records = RecoveryRecords(store)
    await marks.prepare()
    bookie_id = BookieId("b7")
    await memberships.set(bookie_id, Intent.REMOVED)
    await marks.disable()
    await records.set_pause_info(Pause("anna", "moving racks", 1))
    await marks.mark(LedgerId(1), ["b7"])
    await records.put(RecoveryRecord(LedgerId(1)))
    lines, _ = await backed_up(store)
    await memberships.clear(bookie_id)
    await marks.enable()
    await records.clear_pause_info()
    held = await marks.lock(LedgerId(1))
    assert held is not None
    assert await marks.mark_replicated(held)
    await records.remove(LedgerId(1))
    await manager.delete(LedgerId(2))
    for dry_run in (True, False):
        done = await restored(store, lines, merge=True, dry_run=dry_run)
        assert done.created == 1
        assert done.left_out >= 5
    assert (await manager.read(LedgerId(2))).value.custom == METADATA.custom
    assert (await memberships.get(bookie_id)).intent is Intent.ACTIVE
    assert await marks.is_enabled()
    assert await records.pause_info() is None
    assert await marks.get(LedgerId(1)) is None
    assert await records.get(LedgerId(1)) is None
    empty = await connect()  # intents are restored into an empty cluster
    assert (await restored(empty, lines, merge=True)).left_out == 0
    assert (await MembershipStore(empty, clock_ms=lambda: 1).get(bookie_id)).intent is Intent.REMOVED
    await manager.close()


async def test_a_merge_into_another_cluster_is_refused(clusters: tuple[MetadataStore, Connect]) -> None:
    store, connect = clusters
    await populated(store)
    lines, _ = await backed_up(store)
    target = await connect()
    await initialize_cluster(target, LAYOUT, randomness=random.Random(99))
    with pytest.raises(CannotRestore, match="the target is another cluster"):
        await restored(target, lines, merge=True)


async def test_an_interrupted_restore_has_no_instance_id_and_a_merge_completes_it() -> None:
    source, target = MemoryTree().connect(), MemoryTree().connect()
    await populated(source, ledgers=600)
    lines, summary = await backed_up(source)
    multis = 0
    create = target.multi

    async def failing(ops: Any) -> Any:
        nonlocal multis
        multis += 1
        if multis == 3:
            raise MetadataUnavailable("gone")
        return await create(ops)

    target.multi = failing  # type: ignore[method-assign]
    with pytest.raises(MetadataUnavailable):
        await restored(target, lines)
    assert await target.exists(LAYOUT.instance_id) is None
    assert await target.exists(LAYOUT.root) is not None
    result = await restored(target, lines, merge=True)
    assert result.created + result.kept == summary.nodes
    assert result.kept > 0
    assert await tree_of(target) == await tree_of(source)


async def test_nodes_that_change_during_the_backup_are_read_again() -> None:
    """A ledger is created, another deleted, and a topic written between the first pass and the second."""
    store = MemoryTree().connect()
    manager = await populated(store)
    waiting = True

    def change(count: int) -> None:
        nonlocal waiting
        if waiting and count == 38:  # topics and most ledgers are read
            waiting = False
            tasks.append(asyncio.ensure_future(changes()))

    async def changes() -> None:
        await manager.create(METADATA)
        await manager.delete(LedgerId(0))
        await store.set("/managed-ledgers/public/default/persistent/t", b"rolled over", version=None)

    tasks: list[asyncio.Future[None]] = []
    lines, summary = await backed_up(store, progress=change)
    await asyncio.gather(*tasks)
    assert summary.settled
    assert summary.passes == 3
    target = MemoryTree().connect()
    await restored(target, lines)
    assert await tree_of(target) == await tree_of(store)
    await manager.close()


async def test_a_cluster_that_keeps_changing_is_backed_up_and_the_changes_are_reported() -> None:
    store = MemoryTree().connect()
    await populated(store)

    def restless(count: int) -> None:
        if count == 1:
            tasks.append(asyncio.ensure_future(store.set("/bindery/membership/b0", b"again", version=None)))

    tasks: list[asyncio.Future[Any]] = []
    lines, summary = await backed_up(store, progress=restless, passes_max=3)
    await asyncio.gather(*tasks)
    assert (summary.settled, summary.passes, summary.changed) == (False, 3, ("/bindery/membership/b0",))
    assert verify_backup(lines).summary == summary


async def test_a_single_pass_is_not_settled_because_it_cannot_detect_changes() -> None:
    store = MemoryTree().connect()
    await populated(store)
    lines, summary = await backed_up(store, passes_max=1)
    assert (summary.settled, json.loads(lines[-1])["settled"]) == (False, False)
    assert verify_backup(lines).summary == summary


async def test_a_ledger_that_is_closed_in_a_backup_has_its_closing_record_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the record is added and the ledger closed during the only pass."""
    store = MemoryTree().connect()
    manager = await populated(store)
    notes = ClosingRecords(store)
    read = store.get
    is_closed = False

    async def get(path: str, **options: Any) -> Node:
        nonlocal is_closed
        if path == LAYOUT.ledger(LedgerId(2)) and not is_closed:
            is_closed = True
            await notes.add(LedgerId(2), ClosingCause.RECOVERED)
            await manager.update(LedgerId(2), lambda found: plan_close(found, last_entry_id=3, length=9))
        return await read(path, **options)

    monkeypatch.setattr(store, "get", get)
    lines, _ = await backed_up(store, passes_max=1)
    target = MemoryTree().connect()
    await restored(target, lines)
    found = (await LedgerManager(target, LAYOUT, randomness=random.Random(3)).read(LedgerId(2))).value
    assert found.state is LedgerState.CLOSED
    assert await ClosingRecords(target).ledger_ids() == [2]


async def small_backup() -> list[bytes]:
    store = MemoryTree().connect()
    await populated(store, ledgers=1)
    return (await backed_up(store))[0]


async def test_a_damaged_backup_is_refused() -> None:
    """The check finds each line that is missing, repeated or swapped with the next, and each flipped byte of a line."""
    lines = await small_backup()
    verify_backup(lines)
    for at in range(len(lines)):
        for damaged in (
            lines[:at] + lines[at + 1 :],
            [*lines[: at + 1], *lines[at:]],
            lines[:at],
            *([[*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]] if at + 1 < len(lines) else []),
        ):
            with pytest.raises((Corrupt, BadRequest)):
                verify_backup(damaged)
    for without_path in (b"{}", b'{"path": 7}', b'{"path": "ledgers"}'):
        with pytest.raises(Corrupt, match="contains no valid path"):
            verify_backup([*lines[:5], without_path + b"\n", *lines[6:]])
    line = lines[5]
    for offset in range(len(line) - 1):
        flipped = line[:offset] + bytes([line[offset] ^ 1]) + line[offset + 1 :]
        with pytest.raises((Corrupt, BadRequest)):
            verify_backup([*lines[:5], flipped, *lines[6:]])


async def test_other_files_and_other_versions_are_refused() -> None:
    lines = await small_backup()
    header = json.loads(lines[0])
    for first in (b"hello\n", json.dumps(header | {"format": "x"}).encode()):
        with pytest.raises(BadRequest, match="not a backup"):
            verify_backup([first, *lines[1:]])
    with pytest.raises(BadRequest, match="the file is empty"):
        verify_backup([])
    with pytest.raises(Corrupt, match="cannot be read"):
        verify_backup([b"[1]\n", *lines[1:]])
    for name in ("instance_id", "at_ms", "ledgers_root", "roots"):
        for incomplete in (header | {name: None}, {one: header[one] for one in header if one != name}):
            with pytest.raises(Corrupt, match="the backup's header is incomplete or invalid"):
                verify_backup([json.dumps(incomplete).encode(), *lines[1:]])
    with pytest.raises(BadVersion, match="newer version"):
        verify_backup([json.dumps(header | {"version": 2}).encode(), *lines[1:]])
    with pytest.raises(BadRequest, match="the ledgers root /ledgers"):
        await restore_backup(MemoryTree().connect(), LedgersLayout("/other"), verify_backup(lines), lines)


async def test_the_trailer_states_the_end_and_the_counts() -> None:
    store = MemoryTree().connect()
    await populated(store)
    lines, summary = await backed_up(store)
    trailer = json.loads(lines[-1])
    assert (trailer["end"], trailer["settled"]) == (True, True)
    assert (trailer["nodes"], trailer["lines"], trailer["ledgers"]) == (summary.nodes, len(lines) - 1, 5)


async def test_a_backup_without_a_cluster_is_an_error() -> None:
    store: MemoryStore = MemoryTree().connect()
    with pytest.raises(NoSuchNode, match="not initialized"):
        await backed_up(store)


@pytest.mark.parametrize("applied", [False, True])
async def test_a_restore_counts_each_node_once_if_the_response_to_a_transaction_is_lost(applied: bool) -> None:
    source, target = MemoryTree().connect(), MemoryTree().connect()
    await populated(source)
    lines, summary = await backed_up(source)
    expected = await restored(MemoryTree().connect(), lines)
    target.lose_next_write(applied=applied, matching=lambda name, _: name == "multi")
    result = await restored(target, lines)
    assert result.created + result.kept == expected.created + expected.kept == summary.nodes
    assert result.created > 0
    assert (result.kept > expected.kept) is applied, "nodes of the transaction are found if it was applied"
    assert result.differing == expected.differing
    assert await tree_of(target) == await tree_of(source)
