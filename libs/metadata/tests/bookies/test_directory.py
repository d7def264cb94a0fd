"""The directory of registered bookies is complete and up to date, and never derives an address from an id alone."""

import asyncio

import pytest
from bindery_core.errors import MetadataUnavailable, NoSuchNode, NotEnoughBookies
from bindery_core.formats.bookie_service_info import BookieServiceInfo, Endpoint, encode, of_bookie
from bindery_core.ids import BookieId
from bindery_metadata.bookies.directory import BookieDirectory, BookieRecord
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from store_environments import StoreEnvironment, until

LAYOUT = LedgersLayout()


async def register(store: MetadataStore, name: str, *, port: int = 3181, read_only: bool = False) -> BookieId:
    bookie_id = BookieId(name)
    info = encode(of_bookie(host="127.0.0.1", port=port))
    await store.create(LAYOUT.bookie(bookie_id, read_only=read_only), info, ephemeral=True)
    return bookie_id


@pytest.fixture(autouse=True)
async def tree(other: MetadataStore) -> None:
    await other.create(LAYOUT.available_readonly, make_parents=True)


@pytest.fixture
async def directory(store: MetadataStore):
    directory = BookieDirectory(store, LAYOUT)
    yield directory
    await directory.close()


async def test_both_lists_are_read_with_addresses(directory: BookieDirectory, other: MetadataStore) -> None:
    await register(other, "b0", port=4000)
    await register(other, "b1", port=4001, read_only=True)
    await directory.start()
    assert dict(directory.bookies) == {
        "b0": BookieRecord(BookieId("b0"), "127.0.0.1", 4000, False, of_bookie(host="127.0.0.1", port=4000)),
        "b1": BookieRecord(BookieId("b1"), "127.0.0.1", 4001, True, of_bookie(host="127.0.0.1", port=4001)),
    }
    assert directory.writable() == {"b0"}
    assert directory.address(BookieId("b1")) == ("127.0.0.1", 4001)


async def test_an_unregistered_bookie_has_no_address_even_if_its_id_looks_like_one(
    directory: BookieDirectory,
) -> None:
    await directory.start()
    assert directory.address(BookieId("127.0.0.1:3181")) is None


async def test_the_address_of_a_bookie_without_service_info_is_its_id(
    directory: BookieDirectory, other: MetadataStore
) -> None:
    await other.create(LAYOUT.bookie(BookieId("127.0.0.1:3181"), read_only=False), ephemeral=True)
    await directory.start()
    assert directory.address(BookieId("127.0.0.1:3181")) == ("127.0.0.1", 3181)


async def test_bookies_that_cannot_be_contacted_are_left_out(directory: BookieDirectory, other: MetadataStore) -> None:
    http_only = encode(BookieServiceInfo((Endpoint("httpserver", 8000, "127.0.0.1", "http"),)))
    for name, data in (("no-port", b""), ("damaged", b"\xff\xff\xff"), ("http-only", http_only)):
        await other.create(LAYOUT.bookie(BookieId(name), read_only=False), data, ephemeral=True)
    good = await register(other, "good")
    await directory.start()
    assert list(directory.bookies) == [good]


async def test_arrivals_moves_and_departures_are_followed(directory: BookieDirectory, other: MetadataStore) -> None:
    await directory.start()
    bookie_id = await register(other, "b0")
    await until(lambda: directory.writable() == {"b0"})
    await register(other, "b0", read_only=True)
    await other.delete(LAYOUT.bookie(bookie_id, read_only=False), version=None)
    await until(lambda: bookie_id in directory.bookies and not directory.writable())
    await other.delete(LAYOUT.bookie(bookie_id, read_only=True), version=None)
    await until(lambda: not directory.bookies)


async def test_a_bookie_that_is_moving_counts_as_writable(directory: BookieDirectory, other: MetadataStore) -> None:
    await register(other, "b0")
    await register(other, "b0", read_only=True)
    await directory.start()
    assert directory.writable() == {"b0"}


async def test_a_new_address_under_the_same_id_is_noticed(directory: BookieDirectory, other: MetadataStore) -> None:
    bookie_id = await register(other, "b0", port=4000)
    await directory.start()
    await other.set(
        LAYOUT.bookie(bookie_id, read_only=False), encode(of_bookie(host="127.0.0.1", port=5000)), version=None
    )
    await until(lambda: directory.address(bookie_id) == ("127.0.0.1", 5000))


async def test_listeners_get_each_new_snapshot_and_old_snapshots_do_not_change(
    directory: BookieDirectory, other: MetadataStore
) -> None:
    await directory.start()
    snapshots = []
    remove = directory.on_change(snapshots.append)
    await register(other, "b0")
    await until(lambda: len(snapshots) == 1)
    remove()
    await register(other, "b1")
    await until(lambda: len(directory.bookies) == 2)
    assert [list(snapshot) for snapshot in snapshots] == [["b0"]]


async def test_a_burst_of_changes_costs_few_reads(other: MetadataStore) -> None:
    """All bookies register at once: the directory reads the lists a few times, not once per bookie."""
    tree = MemoryTree()
    store, bookies = tree.connect(), tree.connect()
    await bookies.create(LAYOUT.available_readonly, make_parents=True)
    directory = BookieDirectory(store, LAYOUT)
    await directory.start()
    snapshots = []
    directory.on_change(snapshots.append)
    for number in range(30):
        await register(bookies, f"b{number}")
    await until(lambda: len(directory.bookies) == 30)
    assert len(snapshots) <= 2
    await directory.close()


@pytest.mark.parametrize("fault", ["suspend", "expire"])
async def test_the_snapshot_remains_during_an_outage_and_is_updated_after_it(
    environment: StoreEnvironment, store: MetadataStore, directory: BookieDirectory, other: MetadataStore, fault: str
) -> None:
    await register(other, "b0")
    await directory.start()
    if fault == "suspend":
        await environment.suspend(store)
        await register(other, "b1")
        assert directory.writable() == {"b0"}
        await environment.resume(store)
    else:
        await environment.expire(store)
        await register(other, "b1")
    await until(lambda: directory.writable() == {"b0", "b1"})


async def test_a_failed_read_is_repeated() -> None:
    tree = MemoryTree()
    store, other = tree.connect(), tree.connect()
    await other.create(LAYOUT.available_readonly, make_parents=True)
    directory = BookieDirectory(store, LAYOUT)
    await directory.start()
    store.fail_next(MetadataUnavailable(), matching=lambda operation, _: operation == "children")
    await register(other, "b0")
    await until(lambda: directory.writable() == {"b0"})
    await directory.close()


async def test_a_missing_read_only_list_is_created(directory: BookieDirectory, other: MetadataStore) -> None:
    await other.delete(LAYOUT.available_readonly, version=None)
    await directory.start()
    assert await other.exists(LAYOUT.available_readonly) is not None
    await register(other, "b0", read_only=True)
    await until(lambda: "b0" in directory.bookies)


async def test_a_cluster_that_was_never_initialized_is_an_error(
    directory: BookieDirectory, other: MetadataStore
) -> None:
    await other.delete(LAYOUT.available_readonly, version=None)
    await other.delete(LAYOUT.available, version=None)
    with pytest.raises(NoSuchNode):
        await directory.start()


async def test_waiting_for_bookies_ends_when_there_are_enough(directory: BookieDirectory, other: MetadataStore) -> None:
    await register(other, "b0")
    await directory.start()
    await directory.wait_for_writable(1, timeout_s=0.01)
    waiting = asyncio.create_task(directory.wait_for_writable(2, timeout_s=10))
    await register(other, "b1", read_only=True)
    await until(lambda: len(directory.bookies) == 2)
    assert not waiting.done()
    await register(other, "b2")
    await waiting


async def test_the_error_of_a_wait_for_bookies_lists_the_writable_ones(
    directory: BookieDirectory, other: MetadataStore
) -> None:
    await register(other, "b0")
    await directory.start()
    with pytest.raises(NotEnoughBookies) as raised:
        await directory.wait_for_writable(3, timeout_s=0.01)
    assert raised.value.facts["wanted"] == 3
    assert raised.value.facts["writable"] == ["b0"]
