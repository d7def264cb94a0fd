"""The ends of the generated ids, as ZooKeeper counts them, and how they are advanced."""

import pytest
from bindery_core.errors import AlreadyExists, MetadataOutcomeUnknown
from bindery_metadata.layout.layout import SHORT_ID_END, LedgersLayout
from bindery_metadata.ledgers import id_counters
from bindery_metadata.ledgers.id_counters import (
    ATTEMPTS_MAX,
    BURN_MAX,
    IdCounters,
    burn,
    high_halves,
    read_counters,
    skip_ids,
)
from bindery_metadata.ledgers.id_generator import LedgerIdGenerator
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.store import MetadataStore

LAYOUT = LedgersLayout()
FIRST_LONG = 1 << 32


async def store_with(*paths: str) -> MemoryStore:
    store = MemoryTree().connect()
    for path in paths:
        await store.create(path, b"x", make_parents=True)
    return store


async def test_the_end_is_the_next_id_that_the_generator_returns(store: MetadataStore) -> None:
    """Also while nodes of the counter exist, which change what ZooKeeper reports as the version of the children."""
    assert await read_counters(store, LAYOUT) == IdCounters(0, SHORT_ID_END)
    ids = LedgerIdGenerator(store, LAYOUT)
    for _ in range(3):
        ledger_id = await ids.next_id()
        assert await read_counters(store, LAYOUT) == IdCounters(ledger_id + 1, SHORT_ID_END)
    await ids.close()
    assert await read_counters(store, LAYOUT) == IdCounters(3, SHORT_ID_END)
    kept = await store.create(f"{LAYOUT.idgen}/ID-", sequential=True)
    assert kept.endswith("0000000003")
    assert await read_counters(store, LAYOUT) == IdCounters(4, SHORT_ID_END)
    await store.delete(kept, version=None)
    assert await read_counters(store, LAYOUT) == IdCounters(4, SHORT_ID_END)


async def test_with_long_ids_the_highest_upper_half_has_the_end(store: MetadataStore) -> None:
    await store.create(LAYOUT.idgen_long, make_parents=True)
    assert await read_counters(store, LAYOUT) == IdCounters(SHORT_ID_END, SHORT_ID_END), "no long id was generated yet"
    ids = LedgerIdGenerator(store, LAYOUT)
    assert [await ids.next_id() for _ in range(2)] == [FIRST_LONG, FIRST_LONG + 1]
    assert await read_counters(store, LAYOUT) == IdCounters(SHORT_ID_END, FIRST_LONG + 2)
    await store.create(LAYOUT.hob(10))
    assert await read_counters(store, LAYOUT) == IdCounters(SHORT_ID_END, 10 << 32)
    ledger_id = await ids.next_id()
    assert await read_counters(store, LAYOUT) == IdCounters(SHORT_ID_END, ledger_id + 1)
    await ids.close()


@pytest.mark.parametrize("creates", [0, 1, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 2, 2**31 - 1])
@pytest.mark.parametrize("children", [0, 1, 2])
async def test_the_end_is_right_although_the_version_of_the_children_has_32_bits(creates: int, children: int) -> None:
    tree = MemoryTree()
    store = tree.connect()
    await store.create(LAYOUT.idgen, make_parents=True)
    node = tree.znodes._nodes[LAYOUT.idgen]
    node.creates = creates
    node.children.update(f"n{number}" for number in range(children))
    stat = await store.exists(LAYOUT.idgen)
    assert stat is not None
    wrapped = (stat.children_version + 2**31) % 2**32 - 2**31
    object.__setattr__(stat, "children_version", wrapped)
    assert stat.creates == creates
    assert (await read_counters(store, LAYOUT)).short_end == creates


def test_names_that_are_no_upper_half_are_ignored() -> None:
    assert high_halves(["HOB-0000000010", "HOB-0000000009", "other", "HOB-", "HOB-x1"]) == [9, 10]


# --- skipping ids -----------------------------------------------------------------------------------------------------


async def test_skipped_ids_are_never_generated(store: MetadataStore) -> None:
    ids = LedgerIdGenerator(store, LAYOUT)
    assert await skip_ids(store, LAYOUT, up_to=7) == 7, "although there is no counter yet"
    assert await ids.next_id() == 7
    assert await skip_ids(store, LAYOUT, up_to=7) == 8
    assert await skip_ids(store, LAYOUT, up_to=1_200) == 1_200
    assert await ids.next_id() == 1_200
    await ids.close()


@pytest.mark.parametrize(
    ("highs", "up_to", "end"),
    [
        ((), FIRST_LONG + 5, SHORT_ID_END),
        ((1,), FIRST_LONG + 5, 2 << 32),
        ((1,), 2 << 32, 2 << 32),
        ((1,), (2 << 32) + 1, 3 << 32),
        ((1,), 3 << 32, 3 << 32),
        ((1,), (3 << 32) + 1, 1 << 32),
        ((4,), 2 << 32, 4 << 32),
        ((1,), 2**62, 1 << 32),
    ],
)
async def test_long_ids_are_skipped_up_to_the_next_upper_half_only(
    highs: tuple[int, ...], up_to: int, end: int
) -> None:
    """An id far above the counter was chosen by a client: skipping to it would use up the ids."""
    store = await store_with(*(LAYOUT.hob(high) for high in highs))
    assert await skip_ids(store, LAYOUT, up_to=up_to) == end
    assert (await read_counters(store, LAYOUT)).long_end == end


async def test_long_ids_that_were_generated_already_are_not_skipped_again(store: MetadataStore) -> None:
    await store.create(LAYOUT.hob(1), make_parents=True)
    ids = LedgerIdGenerator(store, LAYOUT)
    last = [await ids.next_id() for _ in range(3)][-1]
    await ids.close()
    for up_to in (last, last + 1):
        assert await skip_ids(store, LAYOUT, up_to=up_to) == last + 1
    assert await store.children(LAYOUT.idgen_long) == ["HOB-0000000001"]


@pytest.mark.parametrize(("gap", "is_skipped"), [(BURN_MAX, True), (BURN_MAX + 1, False)])
async def test_short_ids_far_above_the_counter_are_not_skipped(
    gap: int, is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    burnt = []

    async def burn(store: object, path: str, *, up_to: int) -> None:
        burnt.append(up_to)

    monkeypatch.setattr(id_counters, "burn", burn)
    await skip_ids(await store_with(), LAYOUT, up_to=gap)
    assert burnt == [gap] * is_skipped


async def test_short_ids_need_no_skipping_once_ids_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await store_with(LAYOUT.hob(1))
    assert await skip_ids(store, LAYOUT, up_to=1000) == SHORT_ID_END
    assert await store.exists(LAYOUT.idgen) is None


async def next_number(store: MemoryStore, path: str) -> int:
    return int((await store.create(f"{path}/S_", sequential=True))[-10:])


@pytest.mark.parametrize("up_to", [-1, 0, 1, 2, 3, 7, 11])
async def test_the_next_sequential_child_has_at_least_the_number_that_was_asked_for(
    up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_counters, "BURN_STEP", 4)
    store = await store_with("/c")
    assert [await next_number(store, "/c") for _ in range(2)] == [0, 1]
    await burn(store, "/c", up_to=up_to)
    assert await next_number(store, "/c") == max(2, up_to)
    assert len(await store.children("/c")) == 3, "nothing else is left"


@pytest.mark.parametrize("applied", [False, True])
async def test_a_counter_is_advanced_although_responses_are_lost(
    applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempts are bounded only while no transaction succeeds."""
    monkeypatch.setattr(id_counters, "BURN_STEP", 1)
    store = await store_with("/c")
    tries = 0
    multi = store.multi

    async def flaky(ops: object) -> object:
        nonlocal tries
        tries += 1
        if tries % ATTEMPTS_MAX:
            store.lose_next_write(applied=applied)
        return await multi(ops)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "multi", flaky)
    await burn(store, "/c", up_to=3)
    assert await next_number(store, "/c") == 3


@pytest.mark.parametrize("error", [AlreadyExists("exists"), MetadataOutcomeUnknown("lost")])
async def test_a_counter_that_cannot_be_advanced_is_an_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await store_with("/c")
    tries = 0

    async def failing(ops: object) -> object:
        nonlocal tries
        tries += 1
        raise error

    monkeypatch.setattr(store, "multi", failing)
    with pytest.raises(type(error)):
        await burn(store, "/c", up_to=1)
    assert tries == ATTEMPTS_MAX
