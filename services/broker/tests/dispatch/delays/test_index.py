"""The index of delayed messages: never early, late by less than a tick, nothing lost, bounded memory."""

import random
import tracemalloc
from collections.abc import Iterator

import pytest
from bindery_broker.dispatch.delays import DelayIndex, index
from bindery_broker.dispatch.delays.bucket_codec import BLOB_SIZE_MAX, decode_bucket, weight
from bindery_core.errors import Corrupt
from bindery_pulsar.message_id import EARLIEST, Position

SEED_COUNT = 60


def at(n: int) -> Position:
    """The position of message n: ten entries in each ledger."""
    return Position(n // 10, n % 10)


def nothing_acked(position: Position) -> bool:
    return False


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a few hundred messages reach: 4 in the open part, 20 in a bucket, 6 buckets."""
    monkeypatch.setattr(index, "OPEN_MAX", 4)
    monkeypatch.setattr(index, "SMALL_MAX", 3)
    monkeypatch.setattr(index, "BUCKETS_MAX", 6)
    monkeypatch.setattr(index, "WEIGHT_MAX", weight(20, 2))
    monkeypatch.setattr(index, "ROWS_MAX", 20)


def filled(count: int) -> DelayIndex:
    """Message n is delivered at 1,000 + n ms."""
    delays = DelayIndex()
    for n in range(count):
        assert delays.add(at(n), 1_000 + n)
    return delays


# -- time


def test_a_message_is_due_at_the_end_of_the_tick_of_its_time():
    delays = DelayIndex(tick_ms=100)
    delays.add(at(0), 1_001)
    delays.add(at(1), 1_100)
    delays.add(at(2), 1_101)
    assert delays.next_due_ms() == 1_100
    assert delays.due(1_099, 10) == []
    assert delays.due(1_100, 10) == [at(0), at(1)]
    assert delays.next_due_ms() == 1_200
    assert delays.due(1_200, 10) == [at(2)]
    assert delays.next_due_ms() is None
    assert len(delays) == 0


@pytest.mark.parametrize("tick_ms", [1, 7, 100, 1_000])
@pytest.mark.usefixtures("small_limits")
def test_a_message_is_never_early_and_less_than_a_tick_late(tick_ms: int):
    delays = DelayIndex(tick_ms=tick_ms)
    times = {at(n): 5_000 + n * 13 % 97 for n in range(60)}
    for position, time_ms in times.items():
        assert delays.add(position, time_ms)
    seen = 0
    for now_ms in range(4_990, 6_200):
        for position in delays.due(now_ms, 100):
            seen += 1
            assert times[position] <= now_ms < times[position] + tick_ms
    assert seen == 60


@pytest.mark.usefixtures("small_limits")
def test_messages_of_a_tick_come_by_position_whatever_the_order_of_adding():
    delays = DelayIndex(tick_ms=100)
    numbers = list(range(50))
    random.Random(3).shuffle(numbers)
    for n in numbers:
        delays.add(at(n), 1_001 + n)
    taken = [delays.due(2_000, 7) for _ in range(8)]
    assert [position for part in taken for position in part] == [at(n) for n in range(50)]
    assert [len(part) for part in taken] == [7, 7, 7, 7, 7, 7, 7, 1]


@pytest.mark.usefixtures("small_limits")
def test_a_clock_that_was_set_back_makes_a_message_delayed_again_once():
    delays = filled(8)
    assert delays.due(1_100, 3) == [at(0), at(1), at(2)]
    for n in (1, 0):
        assert delays.add(at(n), 1_000 + n)
        delays.check()
    assert len(delays) == 7
    assert delays.due(1_200, 10) == [at(n) for n in (0, 1, 3, 4, 5, 6, 7)]


# -- position


@pytest.mark.usefixtures("small_limits")
def test_adding_a_known_message_changes_nothing():
    delays = filled(10)
    for n in (0, 5, 9):
        assert delays.add(at(n), 9_999)
    assert len(delays) == 10
    assert [delays.deliver_at(at(n)) for n in (0, 5, 9, 10)] == [1_000, 1_005, 1_009, None]
    assert delays.changes(()).put.keys() == {"delays-1", "delays-2"}


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("n", [1, 9])
def test_a_cancelled_message_is_gone(n: int):
    """Message 1 is in a bucket, message 9 in the open part."""
    delays = filled(10)
    assert delays.cancel(at(n))
    assert not delays.cancel(at(n))
    assert not delays.cancel(at(77))
    assert delays.deliver_at(at(n)) is None
    assert len(delays) == 9
    assert delays.due(2_000, 20) == [at(m) for m in range(10) if m != n]


def test_a_message_that_is_added_again_with_a_later_time_is_not_due_at_the_first():
    delays = DelayIndex()
    delays.add(at(0), 1_000)
    delays.cancel(at(0))
    delays.add(at(0), 2_000)
    assert delays.next_due_ms() == 2_000
    assert delays.due(1_999, 1) == []
    assert delays.due(2_000, 5) == [at(0)]


@pytest.mark.usefixtures("small_limits")
def test_acknowledged_messages_are_forgotten():
    delays = filled(30)
    assert delays.forget([at(2), at(3), at(29), at(2), at(99)]) == 3
    assert delays.forget_upto(at(11)) == 10
    assert delays.forget_upto(at(11)) == 0
    delays.check()
    assert len(delays) == 17
    assert delays.due(9_999, 99) == [at(n) for n in range(12, 29)]


@pytest.mark.usefixtures("small_limits")
def test_entries_that_need_not_be_read_are_ranges():
    delays = filled(30)
    delays.forget([at(12), at(15), at(16)])
    assert delays.delayed_in(1, 0, 9) == [(0, 1), (3, 4), (7, 9)]
    assert delays.delayed_in(1, 1, 7) == [(1, 1), (3, 4), (7, 7)]
    assert delays.delayed_in(2, 0, 99) == [(0, 9)]
    assert delays.delayed_in(3, 0, 99) == []
    delays.due(1_000 + 100, 25)
    assert delays.delayed_in(2, 0, 99) == [(8, 9)]


# -- storing


class Store:
    """What a cursor keeps of the index, and the owner's part of a restart."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {"another": b"x"}
        self.names_seen: set[str] = set()

    def save(self, delays: DelayIndex) -> None:
        put, remove = delays.changes(self.blobs.keys())
        assert self.names_seen.isdisjoint(put), "a name is used once"
        self.names_seen |= put.keys()
        for name in remove:
            del self.blobs[name]
        self.blobs |= put
        assert len(self.blobs) <= 1 + index.BUCKETS_MAX
        assert all(len(blob) <= BLOB_SIZE_MAX for blob in self.blobs.values())
        assert delays.changes(self.blobs.keys()) == ({}, [])

    def positions(self) -> Iterator[Position]:
        for name, blob in self.blobs.items():
            if name == "another":
                continue
            columns = decode_bucket(blob)
            for i, ledger_id in enumerate(columns.ledgers):
                for offset in columns.entries[columns.starts[i] : columns.end(i)]:
                    yield Position(ledger_id, columns.firsts[i] + offset)


@pytest.mark.usefixtures("small_limits")
def test_what_is_sealed_and_stored_is_there_after_a_restart():
    store, delays = Store(), filled(31)
    assert delays.seal()
    assert delays.seal(), "an empty open part needs no bucket"
    store.save(delays)
    again = DelayIndex()
    assert again.restore(store.blobs, nothing_acked) == {}
    again.check()
    assert len(again) == 31
    assert again.covered_upto == at(30)
    assert again.due(1_100, 99) == [at(n) for n in range(31)], "by tick, then by position"
    assert again.next_due_ms() is None


@pytest.mark.usefixtures("small_limits")
def test_messages_that_became_due_are_due_again_after_a_crash_unless_they_are_acknowledged():
    store, delays = Store(), filled(8)
    store.save(delays)
    assert delays.due(1_100, 6) == [at(n) for n in range(6)]
    assert delays.changes(store.blobs.keys()) == ({}, ["delays-1"]), "no write is needed for what remains"
    again = DelayIndex()
    again.restore(store.blobs, lambda position: position in {at(1), at(4)})
    assert len(again) == 6
    assert again.due(1_100, 99) == [at(n) for n in (0, 2, 3, 5, 6, 7)]


@pytest.mark.usefixtures("small_limits")
def test_a_damaged_blob_costs_only_its_messages():
    store, delays = Store(), filled(8)
    store.save(delays)
    store.blobs["delays-1"] = store.blobs["delays-1"][:-1] + b"\0"
    again = DelayIndex()
    damaged = again.restore(store.blobs, nothing_acked)
    assert {name: type(error) for name, error in damaged.items()} == {"delays-1": Corrupt}
    assert again.delayed_in(0, 0, 9) == [(4, 7)]
    assert again.changes(store.blobs.keys()) == ({}, ["delays-1"])
    for n in range(8):  # the owner reads what is not in the index
        again.add(at(n), 1_000 + n)
    assert again.due(2_000, 9) == [at(n) for n in range(8)]


@pytest.mark.usefixtures("small_limits")
def test_a_name_is_not_used_again_although_its_blob_was_not_restored():
    delays = DelayIndex()
    delays.clear(["another", "delays-7", "delays-x"])
    for n in range(4):
        delays.add(at(n), 5_000)
    delays.seal()
    changes = delays.changes(["another", "delays-7"])
    assert (changes.put.keys(), changes.remove) == ({"delays-8"}, ["delays-7"])


@pytest.mark.usefixtures("small_limits")
def test_a_name_is_not_used_again_after_a_restart_and_after_clearing():
    store, delays = Store(), filled(12)
    store.save(delays)
    delays.clear()
    assert (len(delays), delays.covered_upto) == (0, EARLIEST)
    for n in range(4):
        delays.add(at(n), 5_000)
    store.save(delays)
    assert store.blobs.keys() == {"another", "delays-4"}
    again = DelayIndex()
    again.restore(store.blobs, nothing_acked)
    for n in range(4, 8):
        again.add(at(n), 5_000)
    store.save(again)
    assert store.blobs.keys() == {"another", "delays-4", "delays-5"}


@pytest.mark.usefixtures("small_limits")
def test_the_number_of_blobs_in_one_change_can_be_limited():
    delays = filled(12)
    first = delays.changes((), puts_max=2)
    assert len(first.put) == 2
    assert delays.changes(first.put.keys(), puts_max=2).put.keys().isdisjoint(first.put)


# -- limits


@pytest.mark.usefixtures("small_limits")
def test_a_full_index_refuses_new_messages_and_loses_none():
    delays = DelayIndex()
    count = 0
    while delays.add(at(count), 1_000 + count):
        count += 1
        assert delays.room() > 0 or len(delays) == count
    assert delays.room() == 0
    assert not delays.seal()
    assert len(delays) == count
    assert 6 * 20 // 2 <= count <= 6 * 20 + 4
    assert delays.add(at(0), 1_000), "a known message needs no room"
    delays.check()
    assert delays.changes(()).put.keys() == {f"delays-{n}" for n in delays._buckets}
    taken = delays.due(9_999, 40)
    assert delays.room() > 0
    assert delays.add(at(count), 1_000 + count)
    rest = delays.due(9_999, 999)
    assert taken + rest == [at(n) for n in range(count + 1)]


@pytest.mark.usefixtures("small_limits")
def test_room_is_what_can_be_added():
    delays = DelayIndex()
    count = 0
    while room := delays.room():
        for _ in range(room):
            assert delays.add(at(count), 1_000)
            count += 1
    assert not delays.add(at(count), 1_000)


@pytest.mark.usefixtures("small_limits")
def test_rows_of_removed_messages_are_given_up():
    """Of each bucket one message stays for a year. The index keeps less than one bucket of rows for them."""
    delays = DelayIndex()
    for n in range(80):
        assert delays.add(at(n), 10**12 if n % 10 == 0 else 1_000)
    for _ in range(40):
        delays.due(2_000, 2)
    assert len(delays) == 8
    assert delays._rows <= 2 * 8 + 20
    delays.check()


@pytest.mark.usefixtures("small_limits")
def test_stale_heap_entries_are_bounded():
    delays = DelayIndex()
    delays.add(at(0), 10**12)
    for n in range(2_000):
        delays.add(at(1), 10**12 + n)
        delays.cancel(at(1))
    assert len(delays._heap) <= 2 * 2 + 64
    for n in range(2_000):
        delays.add(at(n), 10**12)
        if n >= 4:
            delays.cancel(at(n - 4))
    assert len(delays._heads) <= 2 * 6 + 65


@pytest.mark.parametrize("order", ["random", "fifo"])
def test_memory_for_each_message(order: str):
    """24 bytes for each of 50,000 messages leave less than 24 MiB for a million, and less than 64 MiB at the limit."""
    chance, count = random.Random(1), 50_000
    tracemalloc.start()
    try:
        delays = DelayIndex()
        for n in range(count):
            delay = chance.randrange(864_000_000) if order == "random" else n
            delays.add(Position(n // 12_500, n % 12_500), 1_700_000_000_000 + delay)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(delays) == count
    assert used < 24 * count


# -- model


class Model:
    """A dict of what is delayed, beside the index under test; its restarts read again what the index lacks."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.tick_ms = self.chance.choice((1, 10, 100))
        self.delays = DelayIndex(tick_ms=self.tick_ms)
        self.store = Store()
        self.now_ms = 1_000_000
        self.times: dict[Position, int] = {}
        """Delivery time of each message ever read: a fact that never changes."""
        self.acked: set[Position] = set()
        self.delayed: dict[Position, int] = {}
        self.next = 0

    def slot(self, position: Position) -> int:
        return -(-self.delayed[position] // self.tick_ms)

    def read(self, position: Position) -> None:
        if position not in self.times:
            spread = self.chance.choice((5, 500, 20_000))
            self.times[position] = self.now_ms + 1 + self.chance.randrange(spread)
        at_ms = self.times[position]
        if position in self.acked or (at_ms <= self.now_ms and position not in self.delayed):
            return
        if position in self.delayed:
            assert self.delays.add(position, at_ms)
        elif self.delays.room():
            assert self.delays.add(position, at_ms)
            self.delayed[position] = at_ms
        else:
            full = not self.delays.add(position, at_ms)
            if not full:  # room is a lower bound while removed rows are in the way
                self.delayed[position] = at_ms

    def step(self) -> None:
        chance = self.chance
        match chance.choices(
            ["read", "again", "due", "cancel", "forget", "upto", "save", "crash", "seal", "back", "clear"],
            [30, 3, 10, 3, 2, 1, 3, 1, 0.5, 1, 0.3],
        )[0]:
            case "read":
                for _ in range(chance.randint(1, 9)):
                    self.next += chance.choice((1, 1, 1, 4))
                    self.read(at(self.next))
            case "again":
                self.read(at(chance.randint(0, self.next)))
            case "due":
                self.now_ms += chance.choice((1, 50, 3_000))
                count_max = chance.choice((1, 5, 100))
                want = sorted((self.slot(p), p) for p in self.delayed if self.slot(p) * self.tick_ms <= self.now_ms)
                got = self.delays.due(self.now_ms, count_max)
                assert got == [position for _, position in want[:count_max]]
                for position in got:
                    assert self.times[position] <= self.now_ms
                    del self.delayed[position]
            case "cancel":
                position = at(chance.randint(0, self.next))
                assert self.delays.cancel(position) == (position in self.delayed)
                self.ack(position)
            case "forget":
                positions = [at(chance.randint(0, self.next)) for _ in range(5)]
                assert self.delays.forget(positions) == len(self.delayed.keys() & positions)
                for position in positions:
                    self.ack(position)
            case "upto":
                upto = at(chance.randint(0, self.next) // 2)
                gone = [position for position in self.times if position <= upto]
                assert self.delays.forget_upto(upto) == len(self.delayed.keys() & gone)
                for position in gone:
                    self.ack(position)
            case "save":
                self.store.save(self.delays)
            case "seal":
                self.delays.seal()
                self.store.save(self.delays)
            case "back":
                self.now_ms -= chance.choice((1, 1_000, 5_000))
            case "clear":
                self.delays.clear()
                self.delayed.clear()
                self.read_all()
            case "crash":
                self.crash()

    def ack(self, position: Position) -> None:
        self.acked.add(position)
        self.delayed.pop(position, None)

    def crash(self) -> None:
        blobs = list(self.store.blobs.items())
        self.chance.shuffle(blobs)
        stored = list(self.store.positions())
        assert len(stored) == len(set(stored)), "a position is stored twice"
        self.delays = DelayIndex(tick_ms=self.tick_ms)
        for name, blob in blobs:
            assert self.delays.restore({name: blob}, self.acked.__contains__) == {}
        self.delayed = {position: self.times[position] for position in stored if position not in self.acked}
        self.compare()
        self.read_all()

    def read_all(self) -> None:
        """Read each message that is not in the index, as the owner does after a restart."""
        for position in sorted(self.times):
            ledger_id, entry_id = position
            if not self.delays.delayed_in(ledger_id, entry_id, entry_id):
                assert position not in self.delayed
                self.read(position)

    def compare(self) -> None:
        self.delays.check()
        assert len(self.delays) == len(self.delayed)
        due = min((self.slot(position) * self.tick_ms for position in self.delayed), default=None)
        assert self.delays.next_due_ms() == due
        for position in (at(self.chance.randint(0, self.next)) for _ in range(5)):
            assert self.delays.deliver_at(position) == self.delayed.get(position)
        ledger_id = self.chance.randint(0, self.next) // 10
        entries = [e for first, last in self.delays.delayed_in(ledger_id, 2, 8) for e in range(first, last + 1)]
        assert entries == [e for e in range(2, 9) if (ledger_id, e) in self.delayed]
        assert all(self.delays.covered_upto >= position for position in self.delayed)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("seed", range(SEED_COUNT))
def test_any_history_equals_that_of_a_dict(seed: int):
    model = Model(seed)
    for _ in range(150):
        model.step()
        model.compare()
    model.now_ms = 10**9
    rest = []
    while part := model.delays.due(model.now_ms, 50):
        rest += part
    assert sorted(rest) == sorted(model.delayed), "nothing is lost"
