"""Deletion of ledgers: caches and index drop them, late writers stay fenced."""

from typing import Any

import pytest
from bindery_core.errors import NoSuchLedger
from bindery_core.wire.messages import Status

OK = Status.OK


async def test_a_deleted_ledger_is_removed_from_caches_and_index(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 30)
    await kit.fill(engine, 6, 1)
    await engine.flush()
    await kit.fill(engine, 5, 3, first=30)
    await kit.read(engine, (5, 0))
    await engine.delete_ledger(5)
    await engine.delete_ledger(5)
    for _ in range(3):
        assert await kit.read(engine, (5, 0), (5, 31), (5, -1)) == [Status.NO_LEDGER] * 3
        assert list(await engine.list_ledger_ids()) == [6]
        with pytest.raises(NoSuchLedger):
            engine.last_add_confirmed(5)
        await engine.flush()
    await engine.close()
    engine = await world.opened()
    assert await kit.read(engine, (5, 0), (5, -1)) == [Status.NO_LEDGER] * 2
    await engine.close()


async def test_a_deleted_ledger_can_be_created_again_without_its_old_entries(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 30)
    await engine.flush()
    await engine.delete_ledger(5)
    body = kit.entry(5, 7, b"new")
    assert await kit.add(engine, kit.add_request(body, key=b"new key")) == [OK]
    for _ in range(3):
        assert await kit.read(engine, (5, 7), (5, 8), (5, 6), (5, -1)) == [body, Status.NO_ENTRY, Status.NO_ENTRY, body]
        await engine.flush()
    assert await engine.entry_ids(5) == [(7, 1)]
    await engine.close()


async def test_a_late_writer_cannot_create_a_fenced_and_deleted_ledger_again(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 3)
    await engine.fence(5, kit.KEY)
    await engine.delete_ledger(5)
    assert await kit.add(engine, kit.add_request(kit.entry(5, 3))) == [Status.FENCED]
    with pytest.raises(NoSuchLedger):
        await engine.fence(5, kit.KEY)
    with pytest.raises(NoSuchLedger):
        await engine.write_lac(5, kit.KEY, 1, kit.lac_packet(5, 1))
    await engine.close()
