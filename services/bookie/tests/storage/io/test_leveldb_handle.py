"""LevelDbHandle: a store is reopened after a failed write, never used once closed, and closed only without readers."""

from collections.abc import Callable

import pytest
from bindery_bookie.storage.io import leveldb_handle
from bindery_bookie.storage.io.leveldb_handle import LevelDbHandle


class Store:
    """An open store that records its closing."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Stores:
    """Opens stores, unless `error` is set."""

    def __init__(self) -> None:
        self.opened: list[Store] = []
        self.error: OSError | None = None
        self.room = True

    def open(self) -> Store:
        if self.error is not None:
            raise self.error
        assert all(store.is_closed for store in self.opened), "opened twice"
        self.opened.append(Store())
        return self.opened[-1]

    def handle(self) -> LevelDbHandle:
        return LevelDbHandle(self.open, has_room=lambda: self.room)


@pytest.fixture
def stores() -> Stores:
    return Stores()


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leveldb_handle, "SWITCH_WAIT_MAX_S", 0.0)


def fail_to_write(handle: LevelDbHandle) -> None:
    with pytest.raises(RuntimeError), handle.writing():
        raise RuntimeError("disk")


def test_reads_and_writes_use_one_store(stores: Stores) -> None:
    handle = stores.handle()
    with handle.reading() as first, handle.writing() as second:
        assert first is second is stores.opened[0]
    with handle.writing() as third:
        assert third is stores.opened[0]
    assert len(stores.opened) == 1


def test_the_write_after_a_failed_one_reopens_the_store_and_reads_do_not(stores: Stores) -> None:
    handle = stores.handle()
    fail_to_write(handle)
    with handle.reading() as db:
        assert db is stores.opened[0]
    with handle.writing() as db:
        assert db is stores.opened[1]
    assert stores.opened[0].is_closed
    with handle.writing() as db:
        assert db is stores.opened[1]
    assert len(stores.opened) == 2


def test_a_failed_read_does_not_reopen_the_store(stores: Stores) -> None:
    handle = stores.handle()
    with pytest.raises(RuntimeError), handle.reading():
        raise RuntimeError("disk")
    with handle.writing() as db:
        assert db is stores.opened[0]


def test_without_room_the_old_store_stays_open_for_reads(stores: Stores) -> None:
    handle = stores.handle()
    fail_to_write(handle)
    stores.room = False
    with pytest.raises(OSError, match="no disk space to reopen"), handle.writing():
        pass
    with handle.reading() as db:
        assert db is stores.opened[0]
    assert not stores.opened[0].is_closed


def test_a_failed_reopening_is_repeated_by_reads_and_writes(stores: Stores) -> None:
    handle = stores.handle()
    fail_to_write(handle)
    stores.error = OSError("broken")
    for use in (handle.writing, handle.reading, handle.writing):
        with pytest.raises(OSError, match="broken"), use():
            pass
    assert stores.opened[0].is_closed
    stores.error = None
    with handle.reading() as db:
        assert db is stores.opened[1]


def test_a_reader_prevents_the_reopening(stores: Stores, no_wait: None) -> None:
    handle = stores.handle()
    fail_to_write(handle)
    with handle.reading(), pytest.raises(OSError, match="readers prevent"), handle.writing():
        pass
    assert not stores.opened[0].is_closed
    with handle.writing() as db:
        assert db is stores.opened[1]


def test_a_closed_handle_accepts_no_user(stores: Stores) -> None:
    handle = stores.handle()
    handle.close()
    assert stores.opened[0].is_closed
    uses: list[Callable[[], object]] = [handle.reading().__enter__, handle.writing().__enter__]
    for use in uses:
        with pytest.raises(OSError, match="closed"):
            use()
    handle.close()
    assert len(stores.opened) == 1


def test_a_closed_handle_is_not_reopened_after_a_failed_write(stores: Stores) -> None:
    handle = stores.handle()
    fail_to_write(handle)
    handle.close()
    with pytest.raises(OSError, match="closed"), handle.writing():
        pass
    assert len(stores.opened) == 1


def test_a_store_in_use_is_not_closed_under_its_reader(stores: Stores, no_wait: None) -> None:
    handle = stores.handle()
    with handle.reading() as db:
        handle.close()
        assert not db.is_closed
