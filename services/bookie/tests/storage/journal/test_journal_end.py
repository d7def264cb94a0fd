"""The end of a journal: states that a crash can leave, and states that only a lost or truncated file can leave."""

from typing import Any

import pytest
from bindery_bookie.storage.journal import journal_format
from bindery_core.errors import DamagedStorage
from crc32c import crc32c


async def crashed_with_journals(kit: Any) -> Any:
    """Return a bookie that crashed with acknowledged entries in several journals and none flushed."""
    world = kit.World(3, write_cache_size_max=1 << 20)
    engine = await world.opened()
    world.bodies = await kit.fill(engine, 1, 400, size=500)
    world.disk.cut_after(0)
    await engine.close()
    world.lose_power(1)
    return world


def journals(world: Any) -> list[str]:
    return sorted(path for path in world.disk.paths() if path.endswith(".txn"))


async def test_each_file_is_linked_to_the_next(kit: Any) -> None:
    world = await crashed_with_journals(kit)
    before = journals(world)[:-1]
    assert len(before) >= 3
    for path in before:
        data = world.disk.contents(path)
        at = data.rindex(journal_format.GROUP_MAGIC)
        sequence = journal_format.sequence_at(world.disk.open_read(path), journal_id=_id(path), offset=at)
        assert sequence is not None
        (group,) = journal_format.read_groups(
            world.disk.open_read(path), path=path, journal_id=_id(path), offset=at, sequence=sequence
        )
        assert journal_format.following(group) == _id(path) + 1
    engine = await world.opened()
    assert await kit.read(engine, *((1, entry_id) for entry_id in range(400))) == world.bodies
    await engine.close()


async def test_a_lost_last_journal_is_damage(kit: Any) -> None:
    world = await crashed_with_journals(kit)
    newest = journals(world)[-1]
    world.disk.remove(newest)
    with pytest.raises(DamagedStorage) as raised:
        await world.opened()
    assert raised.value.facts["path"] == newest


@pytest.mark.parametrize("size", [0, 100, 512, 1536, 40_000])
async def test_a_truncated_last_journal_is_damage(kit: Any, size: int) -> None:
    world = await crashed_with_journals(kit)
    newest = journals(world)[-1]
    world.disk.truncate(newest, size)
    with pytest.raises(DamagedStorage) as raised:
        await world.opened()
    assert raised.value.facts["path"] == newest


async def test_a_crash_before_the_next_file_is_linked_leaves_it_empty_or_absent(kit: Any) -> None:
    """After a power loss at any operation of a file change the start succeeds and all acknowledged entries exist."""
    for operations in range(8, 80):
        world = kit.World(operations, write_cache_size_max=1 << 20)
        engine = await world.opened()
        world.disk.cut_after(operations)
        bodies = []
        for entry_id in range(300):
            body = kit.entry(1, entry_id, b"x" * 3000)
            if await kit.add(engine, kit.add_request(body)) != [0]:
                break
            bodies.append(body)
        assert world.disk.is_cut
        await engine.close()
        world.lose_power()
        engine = await world.opened()
        assert await kit.read(engine, *((1, entry_id) for entry_id in range(len(bodies)))) == bodies
        await engine.close()


async def test_journals_of_version_1_are_replayed_and_continued(kit: Any) -> None:
    """Such journals have no links and no size in their header. They exist after an upgrade of a crashed bookie."""
    world = await crashed_with_journals(kit)
    sequence = 1
    for path in journals(world):
        data = as_version_1(world.disk.open_read(path), path, sequence)
        sequence += data.count(journal_format.GROUP_MAGIC)
        world.disk.remove(path)
        file = world.disk.create(path)
        file.write_at(data, 0)
        file.sync()
        world.disk.sync_directory(path.rpartition("/")[0])
    last = journals(world)[-1]
    engine = await world.opened()
    assert await kit.read(engine, *((1, entry_id) for entry_id in range(400))) == world.bodies
    newest = journals(world)[-1]
    assert _id(newest) == _id(last) + 1
    assert world.disk.contents(newest)[4:8] == (2).to_bytes(4, "big")
    more = await kit.fill(engine, 1, 50, first=400)
    world.disk.cut_after(0)
    await engine.close()
    world.lose_power(2)
    engine = await world.opened()
    assert await kit.read(engine, *((1, entry_id) for entry_id in range(450))) == world.bodies + more
    await engine.close()


def as_version_1(file: Any, path: str, sequence: int) -> bytes:
    """Return a journal's records in groups that count from `sequence`, as version 1 wrote them."""
    journal_id, at = _id(path), journal_format.HEADER_SIZE
    head = journal_format.MAGIC + (1).to_bytes(4, "big") + journal_id.to_bytes(8, "big")
    data = (head + crc32c(head).to_bytes(4, "big")).ljust(at, b"\0")
    first = journal_format.sequence_at(file, journal_id=journal_id, offset=at)
    assert first is not None or file.size() > at
    groups = journal_format.read_groups(file, path=path, journal_id=journal_id, offset=at, sequence=first or 1)
    for group in groups:
        if journal_format.following(group) is None:
            records = b"".join(journal_format.pack_record_size(len(record)) + record for record in group.records)
            data += journal_format.pack_group(records, journal_id=journal_id, sequence=sequence)
            sequence += 1
    return data.ljust(file.size(), b"\0")


def _id(path: str) -> int:
    journal_id = journal_format.parse_file_name(path.rpartition("/")[2])
    assert journal_id is not None
    return journal_id
