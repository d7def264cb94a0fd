"""Cookies and the instance id."""

import random

import pytest
from bindery_core.errors import AlreadyExists, MetadataOutcomeUnknown, NoSuchNode, VersionConflict
from bindery_core.ids import BookieId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore
from store_environments import StoreEnvironment

LAYOUT = LedgersLayout()
BOOKIE = BookieId("bookie-0:3181")


@pytest.fixture
def cookies(store: MetadataStore) -> CookieStore:
    return CookieStore(store, LAYOUT)


async def test_reading_a_missing_cookie_returns_none(cookies: CookieStore) -> None:
    assert await cookies.read(BOOKIE) is None
    assert await cookies.bookies() == []


async def test_a_cookie_is_written_read_changed_and_deleted_under_its_version(
    cookies: CookieStore, store: MetadataStore
) -> None:
    assert (await cookies.write(BOOKIE, b"5\none", version=None)).version == 0
    first = await cookies.read(BOOKIE)
    assert first is not None
    assert (first.value, first.version) == (b"5\none", 0)
    assert (await store.get("/ledgers/cookies/bookie-0:3181")).data == b"5\none"
    with pytest.raises(AlreadyExists):
        await cookies.write(BOOKIE, b"5\ntwo", version=None)
    assert (await cookies.write(BOOKIE, b"5\ntwo", version=0)).version == 1
    with pytest.raises(VersionConflict):
        await cookies.write(BOOKIE, b"5\nthree", version=0)
    with pytest.raises(VersionConflict):
        await cookies.delete(BOOKIE, version=0)
    await cookies.delete(BOOKIE, version=1)
    assert await cookies.read(BOOKIE) is None
    with pytest.raises(NoSuchNode):
        await cookies.delete(BOOKIE, version=1)


async def test_the_known_bookies_are_those_with_a_cookie(cookies: CookieStore, store: MetadataStore) -> None:
    for name in ("b2:1", "b1:1"):
        await cookies.write(BookieId(name), b"5\n", version=None)
    await store.create("/ledgers/cookies/not a bookie")
    assert await cookies.bookies() == ["b1:1", "b2:1"]


@pytest.mark.parametrize("version", [None, 0], ids=["create", "set"])
async def test_a_cookie_whose_response_is_lost_is_resolved(
    environment: StoreEnvironment, store: MetadataStore, cookies: CookieStore, version: int | None
) -> None:
    await cookies.write(BookieId("another"), b"5\n", version=None)
    if version is not None:
        await cookies.write(BOOKIE, b"5\nold", version=None)
    environment.lose_next_write(store, applied=True)
    assert (await cookies.write(BOOKIE, b"5\nnew", version=version)).value == b"5\nnew"
    found = await cookies.read(BOOKIE)
    assert found is not None
    assert found.value == b"5\nnew"


async def test_a_cookie_that_was_not_written_is_not_reported_as_written(
    environment: StoreEnvironment, store: MetadataStore, cookies: CookieStore
) -> None:
    await cookies.write(BookieId("another"), b"5\n", version=None)
    environment.lose_next_write(store, applied=False)
    with pytest.raises(MetadataOutcomeUnknown):
        await cookies.write(BOOKIE, b"5\nnew", version=None)
    assert await cookies.read(BOOKIE) is None


async def test_the_instance_id_is_that_of_the_cluster(cookies: CookieStore, store: MetadataStore) -> None:
    with pytest.raises(NoSuchNode):
        await cookies.instance_id()
    made = await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    assert await cookies.instance_id() == made.instance_id
