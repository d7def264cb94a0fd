"""The interleaved form: the order of arrival is kept, and each entry of the cache is written exactly once."""

import asyncio
from typing import Any

import pytest
from add_scene import AddScene, request_of
from bindery_bookie.storage.engine.interleaved import InterleavedAdds, InterleavedCache, InterleavedEncoder
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_core.wire.messages import Status
from flush_scene import CHUNK_SIZE, HEADER, KEY_RECORD, SLICE_S, FlushScene, sealed


class Scene(FlushScene):
    """A flush of an InterleavedCache."""

    cache: InterleavedCache

    def __init__(self, kit: Any) -> None:
        super().__init__(kit, encoder=InterleavedEncoder, make_cache=InterleavedCache)

    async def known(self, *ledger_ids: int) -> int:
        """Create these ledgers, flush them, and return the end of the log."""
        for ledger_id in ledger_ids:
            self.ledgers.create(ledger_id, self.kit.KEY)
        await self.flush()
        return len(self.log(5))


@pytest.fixture
def scene(kit: Any) -> Scene:
    return Scene(kit)


# --- cache ------------------------------------------------------------------------------------------------------------


def test_a_cache_keeps_the_order_of_arrival(kit: Any) -> None:
    cache = InterleavedCache(100)
    bodies = [kit.entry(5, 1), kit.entry(4, 0), kit.entry(5, 0), kit.entry(5, 1, b"again")]
    for body, (ledger_id, entry_id) in zip(bodies, [(5, 1), (4, 0), (5, 0), (5, 1)], strict=True):
        cache.put(ledger_id, entry_id, body)
    assert cache.order == bodies
    assert cache.get(5, 1) == bodies[3]
    assert (cache.entries, cache.size, cache.size_max) == (4, 3 * 32 + 37 + 4 * 160, 100)


def test_only_adds_whose_body_is_in_the_cache_are_recorded(kit: Any) -> None:
    cache = InterleavedCache(100)
    adds = [kit.add_request(kit.entry(*ids)) for ids in ((5, 0), (5, 1), (6, 0), (5, 2))]
    equal = kit.add_request(kit.entry(5, 2))
    short = kit.add_request(kit.entry(5, 3)[:23])
    smallest = kit.add_request(kit.entry(5, 4)[:24])
    cache.ledgers[5] = {0: adds[0].body, 2: adds[3].body, 3: short.body, 4: smallest.body}
    cache.record_order([*adds, equal, short, smallest])
    assert cache.order == [adds[0].body, adds[3].body, smallest.body]
    assert all(recorded is add.body for recorded, add in zip(cache.order, (adds[0], adds[3], smallest), strict=True))


def test_entries_and_their_order_are_freed_in_parts(kit: Any) -> None:
    cache = InterleavedCache(100)
    for entry_id in range(5):
        cache.put(5, entry_id, kit.entry(5, entry_id))
    assert cache.release(3)
    assert (len(cache.order), len(cache.ledgers[5])) == (2, 2)
    assert not cache.release(3)
    assert (cache.order, cache.ledgers) == ([], {})


def test_a_cache_is_not_empty_while_its_order_is_not_freed(kit: Any) -> None:
    """Entries that were added again, or whose ledger was deleted, are only in the order."""
    cache = InterleavedCache(100)
    for _ in range(5):
        cache.put(5, 0, kit.entry(5, 0))
    assert cache.release(3)
    assert len(cache.order) == 2
    assert not cache.release(3)
    cache.order = []
    cache.ledgers[5] = {entry_id: kit.entry(5, entry_id) for entry_id in range(4)}
    assert cache.release(3)


# --- adds -------------------------------------------------------------------------------------------------------------


async def test_accepted_adds_are_recorded_in_the_order_of_arrival(kit: Any) -> None:
    scene = AddScene(adds=InterleavedAdds, make_cache=InterleavedCache)
    sent = [request_of(kit, 5, 1), request_of(kit, 4, 0), request_of(kit, 5, 0, key=b"other"), request_of(kit, 5, 0)]
    assert scene.add(*sent[:2]) == [Status.OK, Status.OK]
    assert scene.add(*sent[2:]) == [Status.UNAUTHORIZED, Status.OK]
    cache = scene.caches.active
    assert isinstance(cache, InterleavedCache)
    assert cache.order == [sent[0].body, sent[1].body, sent[3].body]


async def test_adds_that_fill_a_cache_are_recorded_in_the_swapped_one(kit: Any) -> None:
    scene = AddScene(adds=InterleavedAdds, make_cache=InterleavedCache, cache_size=200)
    scene.flush_loop.make_room = lambda: scene.caches.swap() is not None  # type: ignore[method-assign]
    body = request_of(kit, 5, 0)
    scene.add(body)
    flushing, active = scene.caches.flushing, scene.caches.active
    assert isinstance(flushing, InterleavedCache)
    assert isinstance(active, InterleavedCache)
    assert (flushing.order, active.order) == ([body.body], [])


# --- flush ------------------------------------------------------------------------------------------------------------


async def test_entries_are_written_in_the_order_of_arrival(scene: Scene) -> None:
    start = await scene.known(3, 6)
    records = [scene.add(6, 1), scene.add(3, 7), scene.add(6, 0, size=50), scene.add(3, 8)]
    await scene.flush()
    assert scene.log(5)[start:] == b"".join(records)
    assert scene.located(6) == {1: (5, start), 0: (5, start + 200)}
    assert scene.located(3) == {7: (5, start + 100), 8: (5, start + 258)}
    assert scene.index.ledger_row(6) == LedgerRow(scene.kit.KEY, False, -1, 1, None)
    assert scene.index.ledger_row(3) == LedgerRow(scene.kit.KEY, False, -1, 8, None)
    assert await scene.flusher.open_ledgers() == {3: KEY_RECORD + 200, 6: KEY_RECORD + 158}
    assert scene.stats.flush_entries == 4
    assert scene.stats.flush_bytes == 2 * KEY_RECORD + 358


async def test_adjacent_entries_share_a_row(scene: Scene) -> None:
    await scene.known(3, 6)
    scene.add_many(6, range(3))
    scene.add(3, 0)
    scene.add_many(6, range(3, 5))
    await scene.flush()
    assert [(run.first_entry_id, len(run.sizes)) for run in scene.index.runs(6)] == [(0, 3), (3, 2)]


async def test_an_entry_is_written_once_with_its_last_body(scene: Scene) -> None:
    start = await scene.known(6)
    scene.add(6, 0, size=60)
    other = scene.add(6, 1)
    last = scene.add(6, 0, size=70)
    scene.cache.order.append(scene.cache.ledgers[6][1])  # the same object was added twice
    await scene.flush()
    assert scene.log(5)[start:] == other + last
    assert scene.located(6) == {1: (5, start), 0: (5, start + 100)}
    assert scene.stats.flush_entries == 2


async def test_entries_of_a_deleted_ledger_are_not_written(scene: Scene) -> None:
    start = await scene.known(3, 6)
    kept = scene.add(6, 0)
    scene.add(3, 0)
    scene.ledgers.delete(3)
    scene.cache.drop_ledger(3)
    await scene.flush()
    assert scene.log(5)[start + 24 :] == kept, "behind the record of the deletion"
    assert scene.located(6) == {0: (5, start + 24)}


async def test_entries_missing_from_the_order_are_written_behind_the_others(scene: Scene) -> None:
    start = await scene.known(3, 6)
    first = scene.add(6, 1)
    missing = [scene.add(6, 2), scene.add(6, 0), scene.add(3, 5)]
    del scene.cache.order[1:]
    await scene.flush()
    assert scene.log(5)[start:] == first + missing[2] + missing[1] + missing[0]
    assert scene.located(6) == {0: (5, start + 200), 1: (5, start), 2: (5, start + 300)}
    assert scene.located(3) == {5: (5, start + 100)}


# --- entries that the index has already -------------------------------------------------------------------------------


async def test_entries_stored_again_replace_their_rows(scene: Scene) -> None:
    scene.add_many(6, range(5))
    await scene.flush()
    end = len(scene.log(5))
    scene.add_many(6, [6, 4, 2, 5])
    flush = await scene.flush()
    first = HEADER + KEY_RECORD
    assert scene.located(6) == {
        0: (5, first),
        1: (5, first + 100),
        2: (5, end + 200),
        3: (5, first + 300),
        4: (5, end + 100),
        5: (5, end + 300),
        6: (5, end),
    }
    assert flush.overwritten == [(6, 2), (6, 4)], "5 and 6 are above everything in the index"
    scene.add(6, 1)
    await scene.flush()
    assert scene.ledgers.states[6].indexed_entry_id == 6, "it never decreases"


async def test_a_repeated_attempt_replaces_what_the_first_may_have_written(scene: Scene) -> None:
    scene.add_many(6, [1, 0])
    flush = scene.taken()
    scene.kv.errors = [OSError(5, "written, but the answer was lost")]
    with pytest.raises(OSError, match="answer was lost"):
        await scene.flusher.store(flush)
    await scene.flusher.store(flush)
    assert flush.overwritten == [(6, 0), (6, 1)]
    assert scene.located(6) == {1: (6, HEADER + KEY_RECORD), 0: (6, HEADER + KEY_RECORD + 100)}


async def test_many_entries_of_a_ledger_are_indexed_in_parts(scene: Scene) -> None:
    start = await scene.known(6)
    scene.add_many(6, range(600))
    scene.add_many(6, range(300, 310))
    await scene.flush()
    places = scene.located(6)
    assert sorted(places) == list(range(600))
    assert places[0] == (5, start)
    assert places[299] == (5, start + 29_900)
    assert places[300] == (5, start + 59_000), "written in the place of its last body"
    assert scene.ledgers.states[6].indexed_entry_id == 599
    scene.add_many(6, range(590, 1000))
    flush = await scene.flush()
    assert flush.overwritten == [(6, entry_id) for entry_id in range(590, 600)]
    assert sorted(scene.located(6)) == list(range(1000))


# --- chunks, slices and logs ------------------------------------------------------------------------------------------


def writes_of(scene: Scene) -> list[int]:
    """Return a list to which each write to an entry log adds its size."""
    sizes: list[int] = []
    append = scene.logs.append

    def noted(data: bytes, **others: Any) -> None:
        sizes.append(len(data))
        append(data, **others)

    scene.logs.append = noted  # type: ignore[method-assign]
    return sizes


async def test_entries_are_written_in_chunks(scene: Scene) -> None:
    await scene.known(6, 7)
    sizes = writes_of(scene)
    for entry_id in range(50):
        scene.add(6, entry_id)
        scene.add(7, entry_id)
    await scene.flush()
    assert sizes == [4100, 4100, 1800]


async def test_a_chunk_ends_when_it_is_exactly_full(scene: Scene) -> None:
    await scene.known(6)
    sizes = writes_of(scene)
    scene.add_many(6, range(3), size=CHUNK_SIZE // 2 - 8)
    await scene.flush()
    assert sizes == [CHUNK_SIZE, CHUNK_SIZE // 2]


async def test_a_log_above_its_maximum_size_is_closed_and_a_new_one_begun(scene: Scene) -> None:
    start = await scene.known(6, 7)
    records = [scene.add(6 + entry_id % 2, entry_id, size=8192) for entry_id in range(20)]
    await scene.flush()
    first = scene.log(5)[:start] + b"".join(records[:8])
    assert scene.log(5) == sealed(first, {6: KEY_RECORD + 4 * 8200, 7: KEY_RECORD + 4 * 8200})
    assert scene.log(6) == sealed(fmt.pack_file_header(6) + b"".join(records[8:16]), {6: 4 * 8200, 7: 4 * 8200})
    assert scene.log(7) == fmt.pack_file_header(7) + b"".join(records[16:])
    assert scene.located(6)[6] == (5, start + 6 * 8200)
    assert scene.located(6)[8] == (6, HEADER)
    assert scene.located(7)[19] == (7, HEADER + 3 * 8200)


async def test_a_full_log_is_closed_before_the_first_entry(scene: Scene) -> None:
    await scene.known(6)
    scene.add(6, 0, size=65_500)
    await scene.flush()
    assert len(scene.log(5)) > 64 * 1024
    scene.add(6, 1)
    await scene.flush()
    assert scene.located(6)[1] == (6, HEADER)


async def test_entries_missing_from_the_order_open_new_logs_too(scene: Scene) -> None:
    await scene.known(6)
    scene.add_many(6, range(20), size=8192)
    scene.cache.order.clear()
    sizes = writes_of(scene)
    await scene.flush()
    assert sizes == [8200] * 20
    places = scene.located(6)
    assert (places[7][0], places[8], places[16]) == (5, (6, HEADER), (7, HEADER))


async def count_turns(scene: Scene) -> int:
    """Flush with a clock that ends a slice at every look, and return how often others could run."""
    scene.tick = SLICE_S
    turns: list[None] = []

    def count() -> None:
        turns.append(None)
        asyncio.get_running_loop().call_soon(count)

    asyncio.get_running_loop().call_soon(count)
    await scene.flusher.store(scene.taken())
    return len(turns)


@pytest.mark.parametrize(("arrived", "parts"), [(256, 1), (512, 2), (513, 3)])
async def test_others_run_after_each_part_of_256_entries(scene: Scene, arrived: int, parts: int) -> None:
    await scene.known(6)
    bodies = [scene.kit.entry(6, entry_id)[:24] for entry_id in range(2)]
    for number in range(arrived):
        scene.cache.put(6, number % 2, bodies[number % 2])
    assert await count_turns(scene) == parts + 1, "and after the rows of the ledger, which has two entries"


async def test_others_run_after_each_part_of_rows(scene: Scene) -> None:
    await scene.known(6, 7)
    scene.add(6, 0)
    scene.add(7, 0)
    assert await count_turns(scene) == 1 + 2


async def test_others_run_after_each_entry_missing_from_the_order(scene: Scene) -> None:
    await scene.known(6)
    scene.add_many(6, range(5))
    scene.cache.order.clear()
    assert await count_turns(scene) == 5 + 1
