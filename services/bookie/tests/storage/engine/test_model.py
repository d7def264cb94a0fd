"""Compare the engine with a dict, for any order of adds, overwrites, flushes, fences, deletions, crashes, restarts."""

import asyncio
from typing import Any

from bindery_core.wire.messages import Status
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

LEDGER_IDS = st.integers(0, 2)
ENTRY_IDS = st.integers(0, 200)


def make_machine(kit: Any) -> type[RuleBasedStateMachine]:
    class Engine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.runner = asyncio.Runner()
            self.world = kit.World(1)
            self.engine = self.run(self.world.opened())
            self.entries: dict[int, dict[int, bytes]] = {}
            self.fenced: set[int] = set()
            self.tombstones: set[int] = set()
            self.serial = 0

        def run(self, work: Any) -> Any:
            async def limited() -> Any:
                async with asyncio.timeout(30):
                    return await work

            return self.runner.run(limited())

        @rule(
            ledger_id=LEDGER_IDS,
            first=ENTRY_IDS,
            count=st.integers(1, 40),
            step=st.integers(1, 4),
            recovery=st.booleans(),
        )
        def add(self, ledger_id: int, first: int, count: int, step: int, recovery: bool) -> None:
            self.serial += 1
            ids = range(first, first + count * step, step)
            bodies = [kit.entry(ledger_id, entry_id, b"%d" % self.serial * 20) for entry_id in ids]
            statuses = self.run(kit.add(self.engine, *(kit.add_request(body, recovery=recovery) for body in bodies)))
            if ledger_id in self.tombstones | self.fenced and not recovery:
                assert statuses == [Status.FENCED] * count
            else:
                assert statuses == [Status.OK] * count
                if ledger_id in self.tombstones:  # copies are stored again, and the ledger stays fenced
                    self.tombstones.discard(ledger_id)
                    self.fenced.add(ledger_id)
                self.entries.setdefault(ledger_id, {}).update(zip(ids, bodies, strict=True))

        @rule(ledger_id=LEDGER_IDS)
        def fence(self, ledger_id: int) -> None:
            if ledger_id not in self.tombstones:
                self.run(self.engine.fence(ledger_id, kit.KEY))
                self.fenced.add(ledger_id)
                self.entries.setdefault(ledger_id, {})

        @rule(ledger_id=LEDGER_IDS)
        def delete(self, ledger_id: int) -> None:
            self.run(self.engine.delete_ledger(ledger_id))
            if self.entries.pop(ledger_id, None) is not None and ledger_id in self.fenced:
                self.tombstones.add(ledger_id)
            self.fenced.discard(ledger_id)
            self.run(self.engine.flush())  # a crash may undo a deletion that is not flushed

        @rule()
        def flush(self) -> None:
            self.run(self.engine.flush())

        @rule()
        def restart(self) -> None:
            self.run(self.engine.close())
            self.engine = self.run(self.world.opened())
            assert self.engine.stats.replay_entries == 0
            self.tombstones.clear()

        @rule(seed=st.integers(0, 1000))
        def crash(self, seed: int) -> None:
            self.world.disk.cut_after(0)
            self.run(self.engine.close())
            self.world.lose_power(seed)
            self.engine = self.run(self.world.opened())
            self.tombstones.clear()

        @rule()
        def lose_the_index(self) -> None:
            self.run(self.engine.close())
            self.world.kv.clear()
            self.engine = self.run(self.world.opened())
            self.tombstones.clear()

        @rule(ledger_id=LEDGER_IDS, entry_id=ENTRY_IDS, count=st.integers(1, 100))
        def read(self, ledger_id: int, entry_id: int, count: int) -> None:
            keys = [(ledger_id, each) for each in range(entry_id, entry_id + count)]
            entries = self.entries.get(ledger_id)
            absent = Status.NO_LEDGER if entries is None else Status.NO_ENTRY
            expected = [(entries or {}).get(each, absent) for _, each in keys]
            assert self.run(kit.read(self.engine, *keys)) == expected

        @rule(ledger_id=LEDGER_IDS)
        def read_last(self, ledger_id: int) -> None:
            entries = self.entries.get(ledger_id)
            absent = Status.NO_LEDGER if entries is None else Status.NO_ENTRY
            expected = entries[max(entries)] if entries else absent
            assert self.run(kit.read(self.engine, (ledger_id, -1))) == [expected]
            if entries is not None:
                runs = self.run(self.engine.entry_ids(ledger_id))
                assert [each for first, count in runs for each in range(first, first + count)] == sorted(entries)

        @invariant()
        def knows_its_ledgers(self) -> None:
            assert list(self.run(self.engine.list_ledger_ids())) == sorted(self.entries)

        def teardown(self) -> None:
            self.run(self.engine.close())
            self.runner.close()

    return Engine


def test_the_engine_behaves_like_a_dict(kit: Any) -> None:
    run_state_machine_as_test(
        make_machine(kit),
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
