"""Memberships of bookies: compare-and-set, the end of a maintenance, watches."""

import asyncio
import json

import pytest
from bindery_core.errors import BadRequest, Corrupt, MetadataUnavailable, VersionConflict
from bindery_core.ids import BookieId
from bindery_metadata.bookies.membership import ABSENT, Intent, Membership, MembershipStore
from bindery_metadata.stores import followers
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from store_environments import StoreEnvironment, until

ONE, TWO = BookieId("bookie-1.bookies:3181"), BookieId("10.0.0.2:3181")
PATH = f"/bindery/membership/{ONE}"


class Clock:
    now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def memberships(store: MetadataStore, clock: Clock):
    memberships = MembershipStore(store, clock_ms=clock)
    yield memberships
    await memberships.close()


@pytest.fixture
def others(other: MetadataStore, clock: Clock) -> MembershipStore:
    return MembershipStore(other, clock_ms=clock)


async def test_a_bookie_without_a_node_is_active(memberships: MembershipStore) -> None:
    assert await memberships.get(ONE) == Membership(ONE, Intent.ACTIVE, version=ABSENT)
    assert await memberships.all() == {}
    await memberships.clear(ONE)


async def test_a_membership_is_stored_as_json(memberships: MembershipStore, store: MetadataStore) -> None:
    said = await memberships.set(
        ONE, Intent.DRAINING, reason="disk", by="ann", drain={"ledgers_total": 7, "bytes_total": 99}
    )
    assert said == Membership(
        ONE, Intent.DRAINING, since_ms=1_000, reason="disk", by="ann", drain=said.drain, version=0
    )
    assert said.drain == {"ledgers_total": 7, "bytes_total": 99}
    assert (await store.get(PATH)).data == (
        b'{"by":"ann","drain":{"bytes_total":99,"ledgers_total":7},"intent":"draining","reason":"disk",'
        b'"since_ms":1000,"until_ms":null}'
    )
    assert await memberships.get(ONE) == said
    await memberships.set(TWO, Intent.REMOVED)
    assert {bookie: one.intent for bookie, one in (await memberships.all()).items()} == {
        ONE: Intent.DRAINING,
        TWO: Intent.REMOVED,
    }
    await memberships.clear(ONE)
    assert list(await memberships.all()) == [TWO]


def test_a_maintenance_ends_at_its_time() -> None:
    lease = Membership(ONE, Intent.MAINTENANCE, until_ms=5_000)
    assert lease.effective(4_999) is Intent.MAINTENANCE
    assert lease.effective(5_000) is Intent.ACTIVE
    assert Membership(ONE, Intent.MAINTENANCE).effective(10**15) is Intent.MAINTENANCE
    assert Membership(ONE, Intent.DRAINING, until_ms=5_000).effective(6_000) is Intent.DRAINING


async def test_setting_the_same_intent_again_keeps_its_start_and_its_sizes(
    memberships: MembershipStore, clock: Clock
) -> None:
    await memberships.set(ONE, Intent.DRAINING, drain={"ledgers_total": 7})
    clock.now_ms = 2_000
    again = await memberships.set(ONE, Intent.DRAINING, reason="still")
    assert (again.since_ms, again.drain, again.reason, again.version) == (1_000, {"ledgers_total": 7}, "still", 1)
    removed = await memberships.set(ONE, Intent.REMOVED)
    assert (removed.since_ms, removed.drain, removed.reason) == (2_000, {}, "")


async def test_a_set_with_a_version_changes_only_the_membership_that_was_read(
    memberships: MembershipStore, others: MembershipStore
) -> None:
    first = await memberships.set(ONE, Intent.DRAINING, version=ABSENT)
    with pytest.raises(VersionConflict):
        await others.set(ONE, Intent.MAINTENANCE, version=ABSENT)
    second = await others.set(ONE, Intent.ACTIVE, version=first.version)
    with pytest.raises(VersionConflict):
        await memberships.set(ONE, Intent.REMOVED, version=first.version)
    assert await memberships.get(ONE) == second
    await memberships.clear(ONE)
    with pytest.raises(VersionConflict):
        await memberships.set(ONE, Intent.REMOVED, version=second.version)


async def test_concurrent_sets_succeed_one_after_another(memberships: MembershipStore, others: MembershipStore) -> None:
    said = await asyncio.gather(*((memberships, others)[n % 2].set(ONE, Intent.DRAINING, by=str(n)) for n in range(8)))
    assert sorted(one.version for one in said) == list(range(8))


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
@pytest.mark.parametrize("existing", [True, False], ids=["changed", "new"])
async def test_a_lost_response_is_resolved(
    environment: StoreEnvironment, memberships: MembershipStore, store: MetadataStore, applied: bool, existing: bool
) -> None:
    await memberships.set(TWO, Intent.DRAINING)  # creates the parents
    version = (await memberships.set(ONE, Intent.DRAINING)).version if existing else ABSENT
    environment.lose_next_write(store, applied=applied)
    said = await memberships.set(ONE, Intent.MAINTENANCE, until_ms=9, version=version)
    assert said.version == version + 1
    assert await memberships.get(ONE) == said
    environment.lose_next_write(store, applied=applied)
    await memberships.clear(ONE)
    assert (await memberships.get(ONE)).version == ABSENT


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"intent":"dancing"}',
        b'{"intent":7}',
        b'{"intent":"draining","since_ms":"x"}',
        b'{"intent":"draining","drain":{"ledgers_total":"many"}}',
        b'{"intent":"draining","reason":"' + b"x" * 300_000 + b'"}',
    ],
    ids=lambda data: repr(data[:20]),
)
async def test_an_unreadable_node_raises_is_skipped_in_the_list_and_is_overwritten(
    memberships: MembershipStore, store: MetadataStore, data: bytes
) -> None:
    await memberships.set(TWO, Intent.DRAINING)
    await store.create(PATH, data)
    with pytest.raises(Corrupt, match=f"path={PATH}"):
        await memberships.get(ONE)
    assert list(await memberships.all()) == [TWO]
    with pytest.raises(VersionConflict):
        await memberships.set(ONE, Intent.REMOVED, version=ABSENT)
    assert (await memberships.set(ONE, Intent.REMOVED)).version == 1
    assert (await memberships.get(ONE)).intent is Intent.REMOVED


async def test_json_members_of_a_later_release_are_ignored(memberships: MembershipStore, store: MetadataStore) -> None:
    await store.create(
        PATH,
        json.dumps({"intent": "draining", "later": 1, "version": 77, "bookie_id": "x"}).encode(),
        make_parents=True,
    )
    assert await memberships.get(ONE) == Membership(ONE, Intent.DRAINING, version=0)


async def test_an_invalid_bookie_id_is_refused(memberships: MembershipStore, store: MetadataStore) -> None:
    with pytest.raises(BadRequest):
        await memberships.set(BookieId("a/b"), Intent.DRAINING)
    await store.create("/bindery/membership/readonly", make_parents=True)
    assert await memberships.all() == {}


# --- following --------------------------------------------------------------------------------------------------------


async def test_the_watch_of_the_list_fires_for_any_change(
    memberships: MembershipStore, others: MembershipStore
) -> None:
    async def after(change) -> None:
        calls: list[str] = []  # the watches of the node and of the list may both fire, one of them late
        await memberships.all(watch=lambda: calls.append("changed"))
        assert calls == []
        await change
        await until(lambda: "changed" in calls)

    await after(others.set(ONE, Intent.DRAINING))  # before the list existed
    await after(others.set(TWO, Intent.DRAINING))
    await after(others.set(ONE, Intent.ACTIVE))
    await after(others.clear(TWO))


async def test_a_follower_receives_every_lasting_change(
    environment: StoreEnvironment,
    memberships: MembershipStore,
    others: MembershipStore,
    store: MetadataStore,
    other: MetadataStore,
) -> None:
    calls: list[Intent] = []
    stop = memberships.watch(ONE, lambda one: calls.append(one.intent))
    await until(lambda: calls == [Intent.ACTIVE])
    await others.set(ONE, Intent.DRAINING)
    await until(lambda: calls[1:] == [Intent.DRAINING])
    await other.set(PATH, b"nonsense", version=None)
    await environment.suspend(store)
    await others.set(ONE, Intent.MAINTENANCE)
    await environment.resume(store)
    await until(lambda: calls[2:] == [Intent.MAINTENANCE])
    await environment.expire(store)
    await others.clear(ONE)
    await until(lambda: calls[3:] == [Intent.ACTIVE])
    stop()
    await others.set(ONE, Intent.REMOVED)
    await asyncio.sleep(0.05)
    assert len(calls) == 4


async def test_a_follower_survives_errors_of_the_store_and_of_its_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "WATCH_RETRY_S", 0.01)
    store = MemoryTree().connect()
    memberships = MembershipStore(store, clock_ms=lambda: 1)
    calls: list[Intent] = []

    def listener(membership: Membership) -> None:
        calls.append(membership.intent)
        raise ZeroDivisionError("a defect")

    store.fail_next(MetadataUnavailable())
    memberships.watch(ONE, listener)
    await until(lambda: calls == [Intent.ACTIVE])
    await memberships.set(ONE, Intent.DRAINING)
    await until(lambda: calls == [Intent.ACTIVE, Intent.DRAINING])
    await memberships.close()
    await memberships.set(ONE, Intent.ACTIVE)
    await asyncio.sleep(0.02)
    assert len(calls) == 2
