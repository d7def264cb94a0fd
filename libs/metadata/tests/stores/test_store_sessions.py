"""The contract of `bindery_metadata.stores.store` on both implementations: sessions, lost responses, close."""

import asyncio

import pytest
from bindery_core.errors import (
    MetadataOutcomeUnknown,
    MetadataUnavailable,
)
from bindery_metadata.stores.store import Create, MetadataStore, SessionState
from store_environments import StoreEnvironment, until, until_answered

# --- sessions ---------------------------------------------------------------------------------------------------------


def record_states(store: MetadataStore) -> list[SessionState]:
    states: list[SessionState] = []
    store.on_session_change(states.append)
    return states


async def test_a_connected_store_has_a_session_id(store: MetadataStore, other: MetadataStore) -> None:
    assert store.session_state is SessionState.CONNECTED
    assert 0 not in (store.session_id, other.session_id)
    assert store.session_id != other.session_id


async def test_a_broken_connection_keeps_session_and_ephemerals(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/a", ephemeral=True)
    states, session_id = record_states(store), store.session_id
    await environment.suspend(store)
    assert store.session_id == session_id
    assert await other.exists("/a") is not None
    await environment.resume(store)
    assert store.session_id == session_id
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
    assert await store.exists("/a") is not None


async def test_an_expired_session_loses_its_ephemerals_and_a_new_one_begins(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/a", ephemeral=True)
    await store.create("/b")
    states, session_id = record_states(store), store.session_id
    await environment.expire(store)
    assert states == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]
    assert store.session_id not in (0, session_id)
    assert await other.exists("/a") is None
    assert await store.exists("/b") is not None
    await store.create("/a", ephemeral=True)


async def test_a_session_that_expires_while_disconnected_is_lost_on_reconnection(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/a", ephemeral=True)
    states, session_id = record_states(store), store.session_id
    await environment.suspend(store)
    await environment.end_session(store)
    assert await other.exists("/a") is None
    assert (store.session_state, store.session_id) == (SessionState.SUSPENDED, session_id)
    await environment.resume(store)
    assert states == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]
    assert store.session_id != session_id


async def test_a_removed_session_listener_is_not_called(environment: StoreEnvironment, store: MetadataStore) -> None:
    calls: list[SessionState] = []
    remove = store.on_session_change(calls.append)
    remove()
    remove()
    await environment.suspend(store)
    assert calls == []


@pytest.mark.parametrize("fault", ["suspend", "expire"])
async def test_each_watch_fires_once_after_reconnection(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, fault: str
) -> None:
    await store.create("/a")
    fired: list[tuple[str, SessionState]] = []

    def watch(name: str):
        return lambda: fired.append((name, store.session_state))

    await store.get("/a", watch=watch("get"))
    await store.exists("/missing", watch=watch("exists"))
    await store.children("/a", watch=watch("children"))
    if fault == "suspend":
        await environment.suspend(store)
        await other.create("/a/b")
        await other.set("/a", b"1", version=0)
        assert fired == []
        await environment.resume(store)
    else:
        await environment.expire(store)
    await store.sync("/")
    assert sorted(fired) == [(name, SessionState.CONNECTED) for name in ("children", "exists", "get")]


async def test_a_request_waits_for_the_connection(environment: StoreEnvironment, store: MetadataStore) -> None:
    await environment.suspend(store)
    creating = asyncio.create_task(store.create("/a"))
    reading = asyncio.create_task(store.children("/"))
    await asyncio.sleep(0.01)
    assert not creating.done()
    await environment.resume(store)
    assert await creating == "/a"
    assert "a" in await reading


async def test_a_request_that_times_out_without_a_connection_is_not_applied(
    environment: StoreEnvironment, other: MetadataStore
) -> None:
    store = await environment.connect(operation_timeout_s=0.05)
    await environment.suspend(store)
    with pytest.raises(MetadataUnavailable):
        await store.create("/a")
    with pytest.raises(MetadataUnavailable):
        await store.get("/")
    await environment.resume(store)
    await until_answered(store)
    await other.sync("/")
    assert await other.exists("/a") is None


# --- lost responses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_write_whose_response_is_lost_has_an_unknown_outcome(
    environment: StoreEnvironment, store: MetadataStore, applied: bool
) -> None:
    """The error is the same whether the write was applied or not. Only another read shows the outcome."""
    await store.create("/set", b"old")
    await store.create("/deleted")
    attempts = {
        "create": lambda: store.create("/created"),
        "set": lambda: store.set("/set", b"new", version=0),
        "delete": lambda: store.delete("/deleted", version=0),
        "multi": lambda: store.multi([Create("/in-multi")]),
    }
    for attempt in attempts.values():
        environment.lose_next_write(store, applied=applied)
        with pytest.raises(MetadataOutcomeUnknown):
            await attempt()
        await store.sync("/")
    assert (await store.exists("/created") is not None) is applied
    assert ((await store.get("/set")).data == b"new") is applied
    assert (await store.exists("/deleted") is None) is applied
    assert (await store.exists("/in-multi") is not None) is applied


async def test_a_read_whose_response_is_lost_is_unavailable(
    environment: StoreEnvironment, store: MetadataStore
) -> None:
    await store.create("/a")
    for attempt in (lambda: store.get("/a"), lambda: store.exists("/a"), lambda: store.children("/a")):
        environment.lose_next_read(store)
        with pytest.raises(MetadataUnavailable):
            await attempt()
    assert (await store.get("/a")).data == b""


async def test_an_ephemeral_node_whose_creation_had_an_unknown_outcome_belongs_to_the_session(
    environment: StoreEnvironment, store: MetadataStore
) -> None:
    environment.lose_next_write(store, applied=True)
    with pytest.raises(MetadataOutcomeUnknown):
        await store.create("/a", ephemeral=True)
    stat = await store.exists("/a")
    assert stat is not None
    assert stat.ephemeral_owner == store.session_id


async def test_a_cancelled_caller_leaves_the_store_usable(store: MetadataStore) -> None:
    await store.create("/a", b"one")
    task = asyncio.create_task(store.set("/a", b"two", version=0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.sync("/a")
    assert (await store.get("/a")).data in (b"one", b"two")


# --- close ------------------------------------------------------------------------------------------------------------


async def test_a_second_close_has_no_effect(store: MetadataStore) -> None:
    await store.close()
    await store.close()
    assert (store.session_state, store.session_id) == (SessionState.LOST, 0)


async def test_a_closed_store_refuses_requests(store: MetadataStore) -> None:
    await store.close()
    for attempt in (store.get("/"), store.create("/a"), store.multi([Create("/a")]), store.sync("/")):
        with pytest.raises(MetadataUnavailable):
            await attempt


async def test_a_close_calls_neither_watches_nor_session_listeners(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a")
    calls: list[object] = []
    await store.get("/a", watch=lambda: calls.append("watch"))
    store.on_session_change(calls.append)
    await store.close()
    await other.set("/a", b"1", version=None)
    await other.sync("/a")
    assert calls == []


async def test_a_close_without_a_connection_returns(environment: StoreEnvironment, store: MetadataStore) -> None:
    await environment.suspend(store)
    waiting = asyncio.create_task(store.get("/"))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await store.close()
    with pytest.raises(MetadataUnavailable):
        await waiting


async def test_a_close_fires_the_watches_of_other_sessions_on_its_ephemerals(
    store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/a", ephemeral=True)
    fired: list[str] = []
    await other.exists("/a", watch=lambda: fired.append("gone"))
    await store.close()
    await until(lambda: fired == ["gone"])
