"""How a restore divides nodes into transactions, and how it advances counters."""

import pytest
from bindery_core.errors import AlreadyExists, MetadataOutcomeUnknown, NoSuchNode
from bindery_metadata.layout.layout import SHORT_ID_END, LedgersLayout
from bindery_metadata.ledgers.id_counters import read_counters
from bindery_metadata.ledgers.known_ledgers import KnownLedgersStore
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_pulsar import znode_layout
from bindery_recovery.backup import restore
from bindery_recovery.backup.backup import BackedUpNode
from bindery_recovery.backup.restore import BATCH_NODES_MAX, BATCH_SIZE_MAX, BURN_MAX, WRITE_ATTEMPTS_MAX

LAYOUT = LedgersLayout()

OVERHEAD = 64
"""Bytes that a node counts besides its path and data."""


def nodes(*sizes: int) -> list[BackedUpNode]:
    """Return nodes of the given sizes in bytes. Besides OVERHEAD, a third of a size is the path."""
    found = []
    for size in sizes:
        path = (size - OVERHEAD) // 3
        found.append(BackedUpNode("/" * path, b"x" * (size - OVERHEAD - path), 0))
    return found


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [
        ([], []),
        ([BATCH_SIZE_MAX], [1]),
        ([BATCH_SIZE_MAX - 100, 100], [2]),
        ([BATCH_SIZE_MAX - 100, 101], [1, 1]),
        ([BATCH_SIZE_MAX - 100, 101, BATCH_SIZE_MAX - 101], [1, 2]),
        ([BATCH_SIZE_MAX - 100, 101, BATCH_SIZE_MAX - 100], [1, 1, 1]),
        ([BATCH_SIZE_MAX + 1, BATCH_SIZE_MAX + 1], [1, 1]),
        ([70] * BATCH_NODES_MAX, [BATCH_NODES_MAX]),
        ([70] * (2 * BATCH_NODES_MAX + 1), [BATCH_NODES_MAX, BATCH_NODES_MAX, 1]),
    ],
)
def test_a_transaction_ends_before_it_exceeds_a_limit(sizes: list[int], lengths: list[int]) -> None:
    given = nodes(*sizes)
    batches = list(restore._batches(given))
    assert [len(batch) for batch in batches] == lengths
    assert [node for batch in batches for node in batch] == given


# --- restoring nodes --------------------------------------------------------------------------------------------------

SOME = [BackedUpNode(f"/a/n{number}", b"x", 0) for number in range(3)]


async def store_with(*paths: str) -> MemoryStore:
    store = MemoryTree().connect()
    for path in paths:
        await store.create(path, b"x", make_parents=True)
    return store


async def restored(store: MemoryStore, *, dry_run: bool = False) -> tuple[int, int, int]:
    """Restore SOME. Return the numbers of created, kept and differing nodes."""
    restoring = restore._Restore(store, dry_run=dry_run, progress=lambda _: None)
    await restoring.make(SOME)
    return restoring.created, restoring.kept, restoring.differing


async def test_progress_is_the_number_of_nodes_done_after_each_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "BATCH_NODES_MAX", 2)
    told: list[int] = []
    store = await store_with("/a/n0")
    await restore._Restore(store, dry_run=False, progress=told.append).make(SOME)
    assert told == [2, 3]


async def test_nodes_that_another_client_creates_meanwhile_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction fails; the nodes are then created one by one."""
    store = await store_with()
    multi = store.multi

    async def slow_multi(ops: object) -> object:
        if await store.exists(SOME[1].path) is None:
            await store.create(SOME[1].path, b"other", make_parents=True)
        return await multi(ops)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "multi", slow_multi)
    assert await restored(store) == (2, 1, 1)
    assert (await store.get(SOME[1].path)).data == b"other"


async def test_a_node_that_is_deleted_again_meanwhile_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await store_with()
    store.fail_next(NoSuchNode("no parent"), matching=lambda name, _: name == "multi")
    store.fail_next(AlreadyExists("exists"), matching=lambda name, _: name == "create")
    assert await restored(store) == (3, 0, 0)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("lost", [WRITE_ATTEMPTS_MAX - 1, WRITE_ATTEMPTS_MAX])
async def test_a_creation_with_a_lost_response_is_repeated_a_bounded_number_of_times(lost: int, applied: bool) -> None:
    def is_first(name: str, path: str) -> bool:
        return (name, path) == ("create", SOME[0].path)

    store = await store_with("/a")
    store.fail_next(NoSuchNode("no parent"), matching=lambda name, _: name == "multi")
    for _ in range(lost - 1):
        store.lose_next_write(applied=False, matching=is_first)
    store.lose_next_write(applied=applied, matching=is_first)
    if lost == WRITE_ATTEMPTS_MAX:
        with pytest.raises(MetadataOutcomeUnknown):
            await restored(store)
    else:
        assert await restored(store) == ((2, 1, 0) if applied else (3, 0, 0))


async def test_a_dry_run_counts_what_it_would_create_and_creates_nothing() -> None:
    store = await store_with("/a/n0")
    assert await restored(store, dry_run=True) == (2, 1, 0)
    assert await store.children("/a") == ["n0"]


# --- counters ---------------------------------------------------------------------------------------------------------


async def next_number(store: MemoryStore, path: str) -> int:
    return int((await store.create(f"{path}/S_", sequential=True))[-10:])


@pytest.mark.parametrize(("now", "backed_up"), [(0, 0), (0, 1), (2, 7), (3, 3), (5, 2)])
async def test_the_counter_of_producer_names_never_falls_behind_the_backup(
    now: int, backed_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "BURN_STEP", 2)
    path = znode_layout.PRODUCER_NAME_COUNTER
    store = await store_with(path)
    for _ in range(now):
        await store.set(path, b"data", version=None)
    before = (await store.get(path)).data
    node = BackedUpNode(path, b"older", backed_up)
    await restore._raise_counters(store, LAYOUT, [node], known=known_in(store), id_margin=0, dry_run=True)
    assert (await store.get(path)).stat.version == now, "a dry run writes nothing"
    await restore._raise_counters(store, LAYOUT, [node], known=known_in(store), id_margin=0, dry_run=False)
    after = await store.get(path)
    assert (after.stat.version, after.data) == (max(now, backed_up), before)


async def test_a_lost_response_while_the_producer_names_advance_names_the_remedy() -> None:
    path = znode_layout.PRODUCER_NAME_COUNTER
    store = await store_with(path)
    store.lose_next_write(applied=True)
    with pytest.raises(MetadataOutcomeUnknown, match="restore again with --merge"):
        await restore._raise_version(store, path, up_to=3)


def known_in(store: MemoryStore) -> KnownLedgersStore:
    return KnownLedgersStore(store, instance_id="cluster")


async def raised_ids(store: MemoryStore, nodes_of_backup: list[BackedUpNode], *, dry_run: bool) -> int:
    return await restore._raise_ledger_ids(
        store, LAYOUT, nodes_of_backup, known=known_in(store), id_margin=10, dry_run=dry_run
    )


def ledger_node(ledger_id: int) -> BackedUpNode:
    return BackedUpNode(LAYOUT.ledger(ledger_id), b"", 0)  # type: ignore[arg-type]


def idgen(creates: int) -> BackedUpNode:
    return BackedUpNode(LAYOUT.idgen, b"", 0, creates=creates)


LONG = BackedUpNode(LAYOUT.idgen_long, b"", 0)


@pytest.mark.parametrize(
    ("nodes_of_backup", "next_id"),
    [
        ([], 10),
        ([ledger_node(0)], 11),
        ([ledger_node(7), ledger_node(3), idgen(5)], 18),
        ([ledger_node(7), idgen(8)], 18),
        ([ledger_node(7), idgen(9)], 19),
        ([ledger_node(7), ledger_node(5 << 32)], 18),
        ([ledger_node(BURN_MAX - 11)], BURN_MAX),
        ([ledger_node(BURN_MAX - 10)], 1 << 32),
        ([ledger_node(7), LONG], 1 << 32),
        ([LONG, BackedUpNode(LAYOUT.hob(1), b"", 0)], 2 << 32),
        ([LONG, BackedUpNode(LAYOUT.hob(4), b"", 0), BackedUpNode(LAYOUT.hob(2), b"", 0)], 5 << 32),
        ([LONG, BackedUpNode(f"{LAYOUT.idgen_long}/other", b"", 0)], 1 << 32),
    ],
)
async def test_new_ledger_ids_start_a_margin_above_every_id_of_the_backup(
    nodes_of_backup: list[BackedUpNode], next_id: int
) -> None:
    async def planned() -> int:
        return await raised_ids(await store_with(), nodes_of_backup, dry_run=True)

    assert await planned() == next_id


async def test_new_ledger_ids_also_start_above_those_that_the_target_has_assigned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = await store_with(LAYOUT.idgen)
    for _ in range(30):
        await next_number(store, LAYOUT.idgen)
    for dry_run in (True, False):
        assert await raised_ids(store, [ledger_node(7)], dry_run=dry_run) == 30
    assert await raised_ids(store, [ledger_node(30)], dry_run=False) == 41
    assert await next_number(store, LAYOUT.idgen) == 41
    monkeypatch.setattr(restore, "BURN_MAX", 20)
    for highest, next_id in ((51, 62), (72, 1 << 32)):
        found = await raised_ids(store, [ledger_node(highest)], dry_run=True)
        assert found == next_id, "at most BURN_MAX ids above the counter are skipped"


async def test_ids_never_reach_the_end_of_the_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "BURN_MAX", SHORT_ID_END)
    store = await store_with()
    for highest, next_id in ((SHORT_ID_END - 12, SHORT_ID_END - 1), (SHORT_ID_END - 11, 1 << 32)):
        found = await raised_ids(store, [ledger_node(highest)], dry_run=True)
        assert found == next_id


async def test_long_ids_start_above_the_upper_halves_of_backup_and_target() -> None:
    store = await store_with(LAYOUT.hob(3))
    await store.create(f"{LAYOUT.idgen_long}/other")
    nodes_of_backup = [BackedUpNode(LAYOUT.hob(2), b"", 0)]
    assert await raised_ids(store, nodes_of_backup, dry_run=False) == 4 << 32
    assert await store.exists(LAYOUT.hob(4)) is not None
    assert await raised_ids(await store_with(), [LONG], dry_run=False) == 1 << 32


@pytest.mark.parametrize(
    ("nodes_of_backup", "known", "unknown"),
    [
        ([ledger_node(7), idgen(9)], (0, 8, 19), (9, 18)),
        ([ledger_node(BURN_MAX), idgen(9)], (0, BURN_MAX), (BURN_MAX + 1, SHORT_ID_END - 1, 1 << 32)),
        (
            [LONG, BackedUpNode(LAYOUT.hob(4), b"", 0, creates=3)],
            (0, SHORT_ID_END - 1, (4 << 32) + 2),
            ((4 << 32) + 3, (5 << 32) - 1),
        ),
    ],
    ids=["short", "from short to long", "long"],
)
async def test_ledgers_newer_than_the_backup_are_unknown_to_the_restored_metadata(
    nodes_of_backup: list[BackedUpNode], known: tuple[int, ...], unknown: tuple[int, ...]
) -> None:
    """Otherwise the margin would make bookies delete them as if they had been deleted."""
    store = await store_with()
    await store.create(LAYOUT.root, make_parents=True)
    next_id = await raised_ids(store, nodes_of_backup, dry_run=True)
    assert (await known_in(store).read())[1] is None, "a dry run writes nothing"
    assert await raised_ids(store, nodes_of_backup, dry_run=False) == next_id
    counters = await read_counters(store, LAYOUT)
    mark = (await known_in(store).read())[0].mark(counters)
    if next_id < SHORT_ID_END:
        await next_number(store, LAYOUT.idgen)
        mark = (await known_in(store).read())[0].mark(await read_counters(store, LAYOUT))
    assert [mark.may_know(one) for one in known] == [True] * len(known)
    assert [mark.may_know(one) for one in unknown] == [False] * len(unknown)
