"""One contract for every KV: LevelDB, in memory, with fault injection but without faults, and of crash tests."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bindery_bookie.storage.io.fault_injection import DrillControl, FaultyKV, SlowKV
from bindery_bookie.storage.io.kv import KV, LevelDbKV, MemoryKV
from bindery_bookie.storage.io.leveldb_handle import LevelDbHandle
from bindery_core.errors import DamagedStorage
from bindery_simulation.disk import CrashableDisk, CrashableKV
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(params=["leveldb", "memory", "crashable", "faulty", "slow", "drilled"])
def kv(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KV]:
    makers: dict[str, Callable[[], KV]] = {
        "leveldb": lambda: LevelDbKV(str(tmp_path / "db")),
        "memory": MemoryKV,
        "crashable": lambda: CrashableKV(CrashableDisk()),
        "faulty": lambda: FaultyKV(LevelDbKV(str(tmp_path / "db")), "db", lambda operation, path: None),
        "slow": lambda: SlowKV(MemoryKV(), "db", lambda operation, path: 0.001, lambda seconds: None),
        "drilled": lambda: DrillControl(sleep=lambda seconds: None).wrap_open_kv(LevelDbKV)(str(tmp_path / "db")),
    }
    store = makers[request.param]()
    yield store
    store.close()


def test_get_returns_the_value_of_a_put(kv: KV) -> None:
    kv.write_batch([(b"a", b"1"), (b"b", b"")], sync=True)
    assert kv.get(b"a") == b"1"
    assert kv.get_many([b"b", b"c", b"a"]) == [b"", None, b"1"]


def test_a_batch_deletes_before_it_puts(kv: KV) -> None:
    kv.write_batch([(b"a", b"1"), (b"b", b"2")])
    kv.write_batch([(b"a", b"3")], [b"a", b"b", b"never there"])
    assert kv.get_many([b"a", b"b"]) == [b"3", None]


def test_a_scan_includes_the_start_and_excludes_the_stop(kv: KV) -> None:
    kv.write_batch([(bytes([i]), b"v") for i in range(10)])
    assert [key for key, _ in kv.scan(start=b"\x03", stop=b"\x06")] == [b"\x03", b"\x04", b"\x05"]
    assert list(kv.scan(start=b"\x0b", stop=b"\xff")) == []


def test_a_scan_shows_the_store_as_it_was_when_it_began(kv: KV) -> None:
    kv.write_batch([(b"a", b"1"), (b"b", b"2")])
    pairs = kv.scan(start=b"a", stop=b"z")
    kv.write_batch([(b"c", b"3")], [b"b"])
    assert list(pairs) == [(b"a", b"1"), (b"b", b"2")]


def test_compaction_changes_no_values(kv: KV) -> None:
    kv.write_batch([(bytes([i]), b"v" * 100) for i in range(1, 50)])
    kv.write_batch([], [bytes([i]) for i in range(1, 50, 2)])
    kv.compact(start=b"\x01", stop=b"\x20")
    kv.compact(start=b"\x20", stop=b"\xff")
    assert [key for key, _ in kv.scan(start=b"\x01", stop=b"\xff")] == [bytes([i]) for i in range(2, 50, 2)]


@pytest.mark.parametrize("lowest", [b"", b"b"])
def test_floor_finds_a_single_pair_at_or_below_the_key(kv: KV, lowest: bytes) -> None:
    kv.write_batch([(b"b", b"2")])
    assert kv.floor(lowest=lowest, key=b"b") == (b"b", b"2")
    assert kv.floor(lowest=lowest, key=b"c") == (b"b", b"2")
    assert kv.floor(lowest=lowest, key=b"a") is None


def test_floor_does_not_go_below_the_lowest(kv: KV) -> None:
    kv.write_batch([(b"a", b"1"), (b"d", b"4")])
    assert kv.floor(lowest=b"b", key=b"c") is None
    assert kv.floor(lowest=b"b", key=b"e") == (b"d", b"4")


@settings(max_examples=60, deadline=None)
@given(
    present=st.sets(st.binary(min_size=1, max_size=2), max_size=8),
    lowest=st.binary(max_size=2),
    key=st.binary(max_size=2),
)
def test_all_stores_agree_on_scan_and_floor(
    tmp_path_factory: pytest.TempPathFactory, present: set[bytes], lowest: bytes, key: bytes
) -> None:
    level = LevelDbKV(str(tmp_path_factory.mktemp("db")))
    stores: list[KV] = [level, MemoryKV(), CrashableKV(CrashableDisk())]
    for store in stores:
        store.write_batch([(one, one) for one in present])
    expected = max((one for one in present if lowest <= one <= key), default=None)
    for store in stores:
        assert store.floor(lowest=lowest, key=key) == (None if expected is None else (expected, expected))
        assert [k for k, _ in store.scan(start=lowest, stop=key)] == sorted(k for k in present if lowest <= k < key)
    level.close()


def test_leveldb_keeps_its_data_and_reports_damage(tmp_path: Path) -> None:
    path = str(tmp_path / "db")
    store = LevelDbKV(path)
    store.write_batch([(b"key%d" % i, b"v" * 100) for i in range(1000)], sync=True)
    store.close()
    store = LevelDbKV(path)  # moves the log into a table
    assert store.get(b"key7") == b"v" * 100
    store.close()
    for table in (tmp_path / "db").glob("*.ldb"):
        data = bytearray(table.read_bytes())
        for at in range(0, len(data), 64):
            data[at] ^= 0x40
        table.write_bytes(data)

    def read() -> None:
        damaged = LevelDbKV(path)
        try:
            damaged.get(b"key7")
        finally:
            damaged.close()

    with pytest.raises(DamagedStorage):
        read()


class Store:
    """A store that is open or closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_store_is_closed_after_its_last_reader() -> None:
    store = Store()
    handle = LevelDbHandle(lambda: store, has_room=lambda: True)
    closing = threading.Thread(target=handle.close)
    with handle.reading() as db:
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        assert not db.is_closed
        with pytest.raises(OSError, match="closed"), handle.reading():
            pass
    closing.join(30)
    assert store.is_closed
    with pytest.raises(OSError, match="closed"), handle.writing():
        pass


def test_a_long_reader_keeps_its_store_open_and_does_not_block_the_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bindery_bookie.storage.io.leveldb_handle.SWITCH_WAIT_MAX_S", 0.01)
    store = Store()
    handle = LevelDbHandle(lambda: store, has_room=lambda: True)
    with handle.reading():
        handle.close()
        assert not store.is_closed


def test_a_write_after_the_close_does_not_reopen_the_store() -> None:
    opened: list[Store] = []

    def open_db() -> Store:
        opened.append(Store())
        return opened[-1]

    handle = LevelDbHandle(open_db, has_room=lambda: True)
    with pytest.raises(ValueError, match="full"), handle.writing():
        raise ValueError("full")
    handle.close()
    with pytest.raises(OSError, match="closed"), handle.writing():
        pass
    assert [store.is_closed for store in opened] == [True]
