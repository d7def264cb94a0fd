"""WatchedKV: passes every call on, and reports damage before it is raised."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bindery_bookie.storage.io.errors import DamagedIndex
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.io.kv_watch import WatchedKV


class DamagedKV:
    """A KV in which every read and write finds damage."""

    def fail(self, *_: Any, **__: Any) -> Any:
        raise DamagedIndex("checksum mismatch")

    get = get_many = write_batch = floor = compact = fail

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        yield b"a", b"1"
        raise DamagedIndex("checksum mismatch")


class UnscannableKV(DamagedKV):
    """A KV whose scan fails before it begins."""

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        raise DamagedIndex("no table")


CALLS: dict[str, Callable[[Any], Any]] = {
    "get": lambda kv: kv.get(b"a"),
    "get_many": lambda kv: kv.get_many([b"a"]),
    "write_batch": lambda kv: kv.write_batch([(b"a", b"1")]),
    "scan": lambda kv: list(kv.scan(start=b"", stop=b"z")),
    "floor": lambda kv: kv.floor(lowest=b"", key=b"z"),
    "compact": lambda kv: kv.compact(start=b"", stop=b"z"),
}


@pytest.mark.parametrize("name", CALLS)
def test_damage_is_reported_once_and_raised(name: str) -> None:
    reported: list[str] = []
    with pytest.raises(DamagedIndex) as raised:
        CALLS[name](WatchedKV(DamagedKV(), reported.append))  # type: ignore[arg-type]
    assert reported == [str(raised.value)]
    assert "checksum mismatch" in reported[0]


def test_damage_at_the_start_of_a_scan_is_reported() -> None:
    reported: list[str] = []
    with pytest.raises(DamagedIndex):
        WatchedKV(UnscannableKV(), reported.append).scan(start=b"", stop=b"z")  # type: ignore[arg-type]
    assert len(reported) == 1


def test_rows_before_the_damage_are_returned() -> None:
    rows = WatchedKV(DamagedKV(), lambda text: None).scan(start=b"", stop=b"z")  # type: ignore[arg-type]
    assert next(rows) == (b"a", b"1")


def test_all_calls_reach_the_other_store() -> None:
    inner = MemoryKV()
    kv = WatchedKV(inner, lambda text: pytest.fail(text))
    kv.write_batch([(b"a", b"1"), (b"b", b"2"), (b"c", b"3")])
    kv.write_batch([], [b"c"], sync=True)
    assert inner.get(b"a") == kv.get(b"a") == b"1"
    assert kv.get_many([b"b", b"c"]) == [b"2", None]
    assert list(kv.scan(start=b"a", stop=b"b")) == [(b"a", b"1")]
    assert kv.floor(lowest=b"a", key=b"bb") == (b"b", b"2")
    assert kv.approximate_size() == inner.approximate_size()
    kv.compact(start=b"", stop=b"z")
    kv.close()


def test_arguments_are_passed_unchanged_and_the_store_is_closed() -> None:
    calls: list[tuple[str, Any]] = []

    class Recorder:
        def write_batch(self, puts: Any, deletes: Any = (), *, sync: bool = False) -> None:
            calls.append(("write_batch", (puts, deletes, sync)))

        def compact(self, *, start: bytes, stop: bytes) -> None:
            calls.append(("compact", (start, stop)))

        def close(self) -> None:
            calls.append(("close", None))

    kv = WatchedKV(Recorder(), lambda text: None)  # type: ignore[arg-type]
    kv.write_batch([(b"a", b"1")])
    kv.write_batch([], [b"a"], sync=True)
    kv.compact(start=b"a", stop=b"b")
    kv.close()
    assert calls == [
        ("write_batch", ([(b"a", b"1")], (), False)),
        ("write_batch", ([], [b"a"], True)),
        ("compact", (b"a", b"b")),
        ("close", None),
    ]
