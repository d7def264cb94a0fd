"""One contract for every KV: LevelDB, memory, and the one that crash tests use."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bindery_bookie.storage.kv import KV, LevelDbKV, MemoryKV
from bindery_core.errors import DamagedStorage
from bindery_simulation.disk import CrashableDisk, CrashableKV
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(params=["leveldb", "memory", "crashable"])
def kv(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KV]:
    makers: dict[str, Callable[[], KV]] = {
        "leveldb": lambda: LevelDbKV(str(tmp_path / "db")),
        "memory": MemoryKV,
        "crashable": lambda: CrashableKV(CrashableDisk()),
    }
    store = makers[request.param]()
    yield store
    store.close()


def test_gets_what_was_put(kv: KV) -> None:
    kv.write_batch([(b"a", b"1"), (b"b", b"")], sync=True)
    assert kv.get(b"a") == b"1"
    assert kv.get_many([b"b", b"c", b"a"]) == [b"", None, b"1"]


def test_a_batch_deletes_before_it_puts(kv: KV) -> None:
    kv.write_batch([(b"a", b"1"), (b"b", b"2")])
    kv.write_batch([(b"a", b"3")], [b"a", b"b", b"never there"])
    assert kv.get_many([b"a", b"b"]) == [b"3", None]


def test_scan_takes_the_start_and_leaves_out_the_stop(kv: KV) -> None:
    kv.write_batch([(bytes([i]), b"v") for i in range(10)])
    assert [key for key, _ in kv.scan(start=b"\x03", stop=b"\x06")] == [b"\x03", b"\x04", b"\x05"]
    assert list(kv.scan(start=b"\x0b", stop=b"\xff")) == []


def test_a_scan_shows_the_store_as_it_was_when_it_began(kv: KV) -> None:
    kv.write_batch([(b"a", b"1"), (b"b", b"2")])
    pairs = kv.scan(start=b"a", stop=b"z")
    kv.write_batch([(b"c", b"3")], [b"b"])
    assert list(pairs) == [(b"a", b"1"), (b"b", b"2")]


@pytest.mark.parametrize("lowest", [b"", b"b"])
def test_floor_finds_a_lone_pair_at_or_below_the_key(kv: KV, lowest: bytes) -> None:
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
def test_all_agree_on_scan_and_floor(
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


def test_leveldb_keeps_its_data_and_reports_damage_as_damage(tmp_path: Path) -> None:
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
