"""The registration node of a bookie is created, kept after session losses, moved without a gap, and deleted."""

import asyncio
from typing import Any

import pytest
from bindery_core.errors import AlreadyExists, BinderyError, MetadataUnavailable
from bindery_core.formats.bookie_service_info import encode, of_bookie
from bindery_core.ids import BookieId
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from store_environments import StoreEnvironment, until

LAYOUT = LedgersLayout()
BOOKIE = BookieId("bookie-0:3181")
INFO = encode(of_bookie(host="127.0.0.1", port=3181))
WRITABLE = "/ledgers/available/bookie-0:3181"
READ_ONLY = "/ledgers/available/readonly/bookie-0:3181"


def registration_of(store: MetadataStore, *, session_timeout_s: float = 10.0, info: bytes = INFO) -> BookieRegistration:
    return BookieRegistration(store, LAYOUT, BOOKIE, info, session_timeout_s=session_timeout_s)


@pytest.fixture(autouse=True)
async def tree(other: MetadataStore) -> None:
    await other.create(LAYOUT.available_readonly, make_parents=True)


async def test_a_registered_bookie_is_seen_with_its_service_info(store: MetadataStore, other: MetadataStore) -> None:
    registration = registration_of(store)
    assert not registration.is_registered
    await registration.register()
    assert registration.is_registered
    node = await other.get(WRITABLE)
    assert (node.data, node.stat.ephemeral_owner) == (INFO, store.session_id)
    assert await other.exists(READ_ONLY) is None
    await registration.close()
    assert not registration.is_registered
    assert await other.exists(WRITABLE) is None
    await registration.close()


async def test_set_read_only_after_close_has_no_effect(store: MetadataStore, other: MetadataStore) -> None:
    """A disk may become full while the bookie stops."""
    registration = registration_of(store)
    await registration.register()
    closing = asyncio.create_task(registration.close())
    await asyncio.sleep(0)
    await registration.set_read_only(True)
    await closing
    await registration.set_read_only(True)
    assert await other.exists(READ_ONLY) is None
    assert await other.exists(WRITABLE) is None


async def test_a_bookie_can_start_read_only(store: MetadataStore, other: MetadataStore) -> None:
    registration = registration_of(store)
    await registration.register(read_only=True)
    assert registration.is_read_only
    assert await other.exists(READ_ONLY) is not None
    assert await other.exists(WRITABLE) is None
    await registration.close()
    assert await other.exists(READ_ONLY) is None


async def test_a_bookie_that_changes_lists_is_in_one_of_them_at_every_moment(
    store: MetadataStore, other: MetadataStore
) -> None:
    """A watcher that finds the bookie in neither list would count it as lost."""
    registration = registration_of(store)
    await registration.register()
    events: list[str] = []
    for read_only in (True, False):
        await other.exists(WRITABLE, watch=lambda: events.append("writable"))
        await other.exists(READ_ONLY, watch=lambda: events.append("read-only"))
        await registration.set_read_only(read_only)
        await other.sync("/")
    assert events == ["read-only", "writable", "writable", "read-only"]  # created, deleted, created, deleted
    await registration.close()


async def test_setting_the_current_mode_again_changes_nothing(store: MetadataStore, other: MetadataStore) -> None:
    registration = registration_of(store)
    await registration.register()
    before = await other.exists(WRITABLE)
    await registration.set_read_only(False)
    assert await other.exists(WRITABLE) == before
    await registration.close()


async def test_a_restarted_bookie_waits_for_its_former_session_to_end(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore
) -> None:
    """As after kill -9, the old node exists until the old session times out."""
    await other.create(WRITABLE, b"of the killed process", ephemeral=True)
    registration = registration_of(store)
    registering = asyncio.create_task(registration.register())
    await asyncio.sleep(0.05)
    assert not registering.done()
    assert not registration.is_registered
    await environment.expire(other)
    await registering
    assert (await store.get(WRITABLE)).data == INFO
    await registration.close()


async def test_a_second_process_under_the_same_id_is_refused(store: MetadataStore, other: MetadataStore) -> None:
    await other.create(WRITABLE, b"alive", ephemeral=True)
    registration = registration_of(store, session_timeout_s=-1.9)
    with pytest.raises(AlreadyExists) as raised:
        await registration.register()
    assert raised.value.facts["bookie_id"] == BOOKIE
    assert raised.value.facts["owner"] == f"{other.session_id:#x}"
    assert (await store.get(WRITABLE)).data == b"alive"
    await registration.close()
    assert (await store.get(WRITABLE)).data == b"alive"


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_bookie_registers_again_after_its_session_expired(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, read_only: bool
) -> None:
    registration = registration_of(store)
    calls: list[bool] = []
    registration.on_change(calls.append)
    await registration.register(read_only=read_only)
    await environment.expire(store)
    await until(lambda: calls == [True, False, True])
    assert registration.is_registered
    stat = await other.exists(READ_ONLY if read_only else WRITABLE)
    assert stat is not None
    assert stat.ephemeral_owner == store.session_id
    await registration.close()
    assert calls == [True, False, True, False]


async def test_a_broken_connection_leaves_the_bookie_registered(
    environment: StoreEnvironment, store: MetadataStore
) -> None:
    registration = registration_of(store)
    await registration.register()
    calls: list[bool] = []
    registration.on_change(calls.append)
    await environment.suspend(store)
    assert registration.is_registered
    await environment.resume(store)
    await store.sync("/")
    assert registration.is_registered
    assert calls == []
    await registration.close()


async def test_a_mode_changed_during_an_outage_is_applied_after_it(
    environment: StoreEnvironment, other: MetadataStore
) -> None:
    store = await environment.connect(operation_timeout_s=1.0)
    registration = registration_of(store)
    await registration.register()
    await environment.suspend(store)
    with pytest.raises(MetadataUnavailable):
        await registration.set_read_only(True)
    await environment.resume(store)
    async with asyncio.timeout(30):
        while await other.exists(READ_ONLY) is None or await other.exists(WRITABLE) is not None:
            await asyncio.sleep(0.01)
    await registration.close()


async def test_a_node_that_was_deleted_is_created_again(store: MetadataStore, other: MetadataStore) -> None:
    registration = registration_of(store)
    await registration.register()
    await other.delete(WRITABLE, version=None)
    async with asyncio.timeout(30):
        while await other.exists(WRITABLE) is None:
            await asyncio.sleep(0.01)
    await registration.close()


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_registration_whose_response_is_lost_is_resolved(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, applied: bool
) -> None:
    registration = registration_of(store)
    environment.lose_next_write(store, applied=applied)
    await registration.register()
    assert registration.is_registered
    assert (await other.get(WRITABLE)).data == INFO
    await registration.close()


async def test_an_own_node_with_older_data_is_corrected(store: MetadataStore, other: MetadataStore) -> None:
    await store.create(WRITABLE, b"older", ephemeral=True)
    registration = registration_of(store)
    await registration.register()
    assert (await other.get(WRITABLE)).data == INFO
    await registration.close()


async def test_registering_again_is_repeated_until_it_succeeds() -> None:
    """The store is available again, but fails once more."""
    tree = MemoryTree()
    store = tree.connect()
    await store.create(LAYOUT.available_readonly, make_parents=True)
    registration = registration_of(store)
    await registration.register()
    store.fail_next(MetadataUnavailable(), matching=lambda operation, _: operation == "create")
    tree.expire(store)
    await until(lambda: registration.is_registered)
    await registration.close()


async def test_a_check_runs_before_each_registration_in_a_session_and_may_refuse_it(
    environment: StoreEnvironment, store: MetadataStore
) -> None:
    """No new ledger is placed on the bookie before the check has passed."""
    path = LAYOUT.bookie(BOOKIE, read_only=False)
    seen: list[bool] = []
    errors: list[BinderyError] = [MetadataUnavailable("refused")]

    async def before() -> None:
        seen.append(await store.exists(path) is not None)
        if errors:
            raise errors.pop()

    made = BookieRegistration(store, LAYOUT, BOOKIE, b"info", before=before)
    with pytest.raises(MetadataUnavailable, match="refused"):
        await made.register()
    assert await store.exists(path) is None
    await made.register()
    assert seen == [False, False]
    await made.set_read_only(True)
    assert len(seen) == 2, "a move needs no check"
    errors.append(MetadataUnavailable("refused"))
    await environment.expire(store)
    await until(lambda: made.is_registered)
    assert len(seen) >= 4, "the refused registration was repeated"
    await made.close()


async def test_a_registration_in_a_session_that_began_after_the_check_is_taken_back() -> None:
    """The loss of a session may be noticed only while the node is created: it is then created in the next session."""
    tree = MemoryTree()
    store = tree.connect()
    await store.create(LAYOUT.available_readonly, make_parents=True)
    checked: list[int] = []
    nodes: list[bool] = []

    async def before() -> None:
        nodes.append(await store.exists(WRITABLE) is not None)
        checked.append(store.session_id)

    made = BookieRegistration(store, LAYOUT, BOOKIE, b"info", before=before)
    await made.register()
    real, lost = store.create, 0

    async def create(path: str, data: bytes = b"", **options: Any) -> str:
        nonlocal lost
        lost += 1
        if lost == 1:
            tree.expire(store)
        return await real(path, data, **options)

    store.create = create  # type: ignore[method-assign]
    await store.delete(WRITABLE, version=None)  # the registration looks again, in the session that is lost then
    await until(lambda: lost and made.is_registered)
    assert checked[0] != checked[-1] == store.session_id
    assert nodes == [False] * len(nodes)
    stat = await store.exists(WRITABLE)
    assert stat is not None
    assert stat.ephemeral_owner == store.session_id
    await made.close()
    await store.close()
