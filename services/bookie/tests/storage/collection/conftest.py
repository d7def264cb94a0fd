"""Helpers for the tests of compaction."""

from typing import Any

import pytest
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_core.wire.messages import Status

CURRENT = "/ledgers/current"


class CompactionKit:
    """A shard with live and dead ledgers, and checks of its content."""

    @staticmethod
    async def live_and_dead(
        kit: Any, engine: StorageEngine, *, dead: int = 60, live: int = 10
    ) -> dict[int, list[bytes]]:
        """Write ledgers 1 to 4 to one closed log: 1 (fenced, with an explicit LAC) and 3 live, 2 and 4 deleted.

        Return the bodies of the live ones.
        """
        bodies = {
            ledger_id: await kit.fill(engine, ledger_id, live if ledger_id % 2 else dead, size=200)
            for ledger_id in (1, 2, 3, 4)
        }
        await engine.fence(1, kit.KEY)
        await engine.write_lac(1, kit.KEY, 3, kit.lac_packet(1, 3))
        await engine.flush()
        await engine.compactor.run(force=True)
        for ledger_id in (2, 4):
            await engine.delete_ledger(ledger_id)
            del bodies[ledger_id]
        return bodies

    @staticmethod
    async def check(kit: Any, engine: StorageEngine, bodies: dict[int, list[bytes]]) -> None:
        """Check that exactly these entries are stored, with fence, key and explicit LAC."""
        assert list(await engine.list_ledger_ids()) == sorted(bodies)
        for ledger_id, expected in bodies.items():
            found = await kit.read(engine, *((ledger_id, entry_id) for entry_id in range(len(expected) + 1)))
            assert found == [*expected, Status.NO_ENTRY]
        assert (await engine.read_lac(1)).explicit_packet == kit.lac_packet(1, 3)
        (status,) = await kit.add(engine, kit.add_request(kit.entry(1, 500)))
        assert status == Status.FENCED
        (status,) = await kit.add(engine, kit.add_request(kit.entry(3, 500), key=b"another"))
        assert status == Status.UNAUTHORIZED

    @staticmethod
    def log_names(world: Any) -> list[str]:
        return [name for name in world.disk.list_names(CURRENT) if ".log" in name]

    @staticmethod
    async def check_rebuilt(world: Any, kit: Any, bodies: dict[int, list[bytes]]) -> None:
        """Run the same check after an index rebuild from the entry logs."""
        world.kv.clear()
        engine = await world.opened()
        await CompactionKit.check(kit, engine, bodies)
        await engine.close()


@pytest.fixture(scope="session")
def compaction() -> type[CompactionKit]:
    return CompactionKit
