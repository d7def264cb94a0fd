"""OwnRack: what a bookie writes to the record of racks when it starts."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from bookie_world import BookieWorld, running

NOW_MS = 1_000_000
PULSARS = b'{"default":{"other:3181":{"rack":"/r1","hostname":"other"}},"gold":{"b0":{"rack":"/old","weight":7}}}'


async def record(world: BookieWorld) -> Any:
    return json.loads((await world.observer.get("/bookies")).data)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[BookieWorld]:
    world = BookieWorld(tmp_path, wall_clock_ms=lambda: NOW_MS, rack="zone-a")
    async with running(world):
        yield world


async def test_a_bookie_announces_its_rack_before_it_registers(world: BookieWorld) -> None:
    await world.process.start()
    assert await record(world) == {"default": {"b0": {"rack": "/zone-a", "hostname": "127.0.0.1"}}}


async def test_entries_of_others_and_its_own_group_are_kept(world: BookieWorld) -> None:
    await world.observer.create("/bookies", PULSARS)
    await world.process.start()
    assert await record(world) == {
        "default": {"other:3181": {"rack": "/r1", "hostname": "other"}},
        "gold": {"b0": {"rack": "/zone-a", "hostname": "127.0.0.1", "weight": 7}},
    }


async def test_a_record_that_cannot_be_read_is_reported_and_not_overwritten(world: BookieWorld) -> None:
    await world.observer.create("/bookies", b"{broken")
    await world.process.start()
    assert (await world.observer.get("/bookies")).data == b"{broken"
    assert "rack zone-a is not announced" in (await world.get("/readyz")).text


@pytest.mark.parametrize(
    ("content", "expected"), [(b"/zone-b\n", "/zone-b"), (b"", None), (None, None), (b"\xff", None)]
)
async def test_the_rack_may_come_from_a_file(tmp_path: Path, content: bytes | None, expected: str | None) -> None:
    file = tmp_path / "rack"
    if content is not None:
        file.write_bytes(content)
    world = BookieWorld(tmp_path / "data", wall_clock_ms=lambda: NOW_MS, rack_file=str(file))
    async with running(world):
        await world.process.start()
        if expected is None:
            assert await world.observer.exists("/bookies") is None
            assert f"no rack in {file}" in (await world.get("/readyz")).text
        else:
            assert (await record(world))["default"]["b0"]["rack"] == expected


async def test_without_a_rack_the_entry_of_an_operator_stays(tmp_path: Path) -> None:
    world = BookieWorld(tmp_path, wall_clock_ms=lambda: NOW_MS)
    async with running(world):
        await world.observer.create("/bookies", PULSARS)
        await world.process.start()
        assert (await world.observer.get("/bookies")).data == PULSARS
