"""Pages of namespaces and topics: every name once and in order, also if a page ends early, with bounded reads."""

import random

import pytest
from bindery_broker.namespaces import names as names_module
from bindery_broker.namespaces.names import Names, Page
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_pulsar import znode_layout

ODD = ["~tilde", "a b", "ä", "a+b", "%41", ".hidden", "x-partition-0", "x-partition-10", "x*", "0", "\U0001f600"]


class CountingStore:
    """Counts the lists that are read, in all and at once."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.reads = 0
        self.watches = 0
        self._in_flight = 0
        self.in_flight_max = 0

    async def children(self, path, *, watch=None):
        self.reads += 1
        self.watches += watch is not None
        self._in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self._in_flight)
        try:
            return await self._store.children(path, watch=watch)
        finally:
            self._in_flight -= 1

    def __getattr__(self, name):
        return getattr(self._store, name)


async def filled(topics: list[tuple[str, str, str]], namespaces: list[tuple[str, str]] = ()) -> CountingStore:
    store = MemoryTree().connect()
    for tenant, namespace in namespaces:
        await store.create(znode_layout.namespace_policies(tenant=tenant, namespace=namespace), make_parents=True)
        await store.create(znode_layout.managed_ledgers(tenant=tenant, namespace=namespace), make_parents=True)
    for tenant, namespace, local in topics:
        path = znode_layout.managed_ledger(tenant=tenant, namespace=namespace, topic=local)
        await store.create(path, make_parents=True)
    return CountingStore(store)


async def all_pages(read, limit: int) -> tuple[list[str], list[Page]]:
    pages = [await read(after=None, limit=limit)]
    while pages[-1].next is not None:
        pages.append(await read(after=pages[-1].next, limit=limit))
        assert pages[-1].next != pages[-2].next
    return [name for page in pages for name in page.names], pages


@pytest.mark.parametrize("seed", range(20))
async def test_pages_have_every_topic_once_in_the_order_of_their_names(seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(names_module, "READS_MAX", rng.choice([1, 3, 10, 64]))
    monkeypatch.setattr(names_module, "GROUP", rng.choice([1, 2, 16]))
    words = ["a", "a-b", "a.b", "a0", "ab", "a:", "A", "b", "a-", "a=1", "a_"]
    spaces = [(rng.choice(words), rng.choice(words)) for _ in range(rng.randint(0, 30))]
    topics = {(*rng.choice(spaces), rng.choice(words + ODD)) for _ in range(rng.randint(0, 80) if spaces else 0)}
    names = Names(await filled(sorted(topics), sorted(set(spaces))))
    wanted = sorted("/".join(topic) for topic in topics)
    for limit in (1, 2, 7, 1000):
        found, pages = await all_pages(names.topics, limit)
        assert found == wanted
        assert all(len(page.names) <= limit for page in pages)
    for after in [*rng.choices(wanted or [""], k=5), "", "a", "a/", "a/b", "a/b/", "a-b/a", "zz", "/"]:
        page = await names.topics(after=after, limit=3)
        expected = [name for name in wanted if name > after]
        assert page.names == expected[: len(page.names)]
        assert page.names or page.next is not None or not expected
    spaces_found, _ = await all_pages(names.namespaces, rng.choice([1, 3, 100]))
    assert spaces_found == ["/".join(space) for space in sorted(set(spaces))]


async def test_the_topics_of_a_namespace_are_paged_too():
    names = Names(await filled([("t", "n", local) for local in ODD] + [("t", "n2", "other")]))

    async def read(*, after, limit):
        return await names.topics(after=after, limit=limit, namespace=("t", "n"))

    found, pages = await all_pages(read, 4)
    assert found == sorted(f"t/n/{local}" for local in ODD)
    assert [len(page.names) for page in pages] == [4, 4, 3]
    assert await names.topics(after=None, limit=4, namespace=("t", "missing")) == Page([], None)


async def test_a_node_that_no_topic_can_have_is_left_out():
    store = await filled([("t", "n", "good")])
    await store.create("/managed-ledgers/t/n/persistent/%FF")
    await store.create("/managed-ledgers/t/n/persistent/%2F")
    assert await Names(store).local_names("t", "n") == ["good"]


async def test_a_page_reads_a_bounded_number_of_lists():
    spaces = [("t", f"n{number:04}") for number in range(1_000)]
    store = await filled([("t", "n0999", "last")], spaces)
    names = Names(store)
    for passes in range(2):
        pages = 0
        page = Page([], "")
        while page.next is not None:
            store.reads = store.in_flight_max = 0
            page = await names.topics(after=page.next or None, limit=1_000)
            pages += 1
            assert store.reads <= names_module.READS_MAX + names_module.GROUP
            assert store.in_flight_max <= names_module.GROUP
            assert page.names == ([] if page.next is not None else ["t/n0999/last"])
        assert pages == (1 if passes else pytest.approx(16, abs=2))  # the second time, all are in memory
    assert store.reads == 0


async def test_a_topic_of_another_broker_is_in_the_next_page():
    tree = MemoryTree()
    store, other = tree.connect(latency_s=0.01), tree.connect()
    names = Names(store)
    for number in range(5):
        path = znode_layout.managed_ledger(tenant="t", namespace="n", topic=str(number))
        await other.create(path, make_parents=True)
        assert (await names.topics(after=None, limit=9)).names == [f"t/n/{one}" for one in range(number + 1)]
        assert await names.local_names("t", "n") == [str(one) for one in range(number + 1)]
    await other.delete(path, version=None)
    assert await names.local_names("t", "n") == ["0", "1", "2", "3"]


async def test_a_small_page_reads_little():
    spaces = [("t", f"n{number:04}") for number in range(500)]
    store = await filled([(*space, local) for space in spaces for local in ("a", "b")], spaces)
    page = await Names(store).topics(after=None, limit=5)
    assert (page.names, page.next) == (["t/n0000/a", "t/n0000/b", "t/n0001/a", "t/n0001/b", "t/n0002/a"], "t/n0002/a")
    assert store.reads <= names_module.GROUP + 2
