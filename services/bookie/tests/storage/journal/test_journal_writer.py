"""JournalWriter: files are durable before their groups, linked, and shortened when there is little space."""

import pytest
from bindery_bookie.storage.io.errors import JournalFull
from bindery_bookie.storage.io.reserve import Reserve
from bindery_bookie.storage.journal import journal_format as fmt
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.journal_writer import JournalWriter, Link
from bindery_simulation.disk import CrashableDisk

MIB = 1024 * 1024
FILE_SIZE = 4 * MIB


class Clock:
    """Advances by a quarter of a second per call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


def writer_on(disk: CrashableDisk, *, reserve: Reserve | None = None, file_size: int = FILE_SIZE) -> JournalWriter:
    return JournalWriter(disk, "/j", file_size=file_size, clock=Clock(), reserve=reserve)


def group(journal_id: int, sequence: int, size: int = 5) -> bytes:
    return fmt.pack_group(b"\0\0\0\1x" * (size // 5), journal_id=journal_id, sequence=sequence)


def test_a_new_file_has_its_header_and_is_durable() -> None:
    disk = CrashableDisk()
    writer = writer_on(disk)
    writer.create(10)
    assert writer.path == "/j/a.txn"
    assert (writer.room, writer.is_short) == (FILE_SIZE, False)
    assert disk.log == ["create /j/a.txn", "write /j/a.txn", "sync /j/a.txn", "sync_directory /j"]
    assert disk.contents("/j/a.txn") == fmt.pack_file_header(10, file_size=FILE_SIZE).ljust(FILE_SIZE, b"\0")


def test_a_group_is_written_and_synced_and_its_seconds_are_returned() -> None:
    disk = CrashableDisk()
    writer = writer_on(disk)
    writer.create(10)
    del disk.log[:]
    packed = group(10, 1)
    assert writer.write(packed, JournalPosition(10, 512, 1), lambda: disk.log.append("written")) == 0.25
    assert disk.log == ["write /j/a.txn", "written", "datasync /j/a.txn"]
    assert disk.contents("/j/a.txn")[512:1024] == packed


def test_zeros_are_written_ahead_up_to_a_block_boundary_and_once_for_many_groups() -> None:
    disk = CrashableDisk()
    sizes: list[tuple[int, int]] = []
    writer = writer_on(disk)
    writer.create(10)
    file = type(disk.open_read("/j/a.txn"))
    with pytest.MonkeyPatch.context() as patch:
        original = file.write_at

        def write_at(self: object, data: bytes, offset: int) -> None:
            sizes.append((offset, len(data)))
            original(self, data, offset)  # type: ignore[arg-type]

        patch.setattr(file, "write_at", write_at)
        writer.write(group(10, 1), JournalPosition(10, 512, 1), None)
        writer.write(group(10, 2), JournalPosition(10, 1024, 2), None)
        writer.write(group(10, 3, 70_000), JournalPosition(10, 300_000 // 512 * 512, 3), None)
        writer.write(group(10, 4), JournalPosition(10, 256 * 1024, 4), None)
        writer.write(group(10, 5), JournalPosition(10, FILE_SIZE - 1024, 5), None)
    assert sizes == [
        (512, 256 * 1024 - 512),
        (1024, 512),
        (299_520, 70_144),
        (256 * 1024, 256 * 1024),
        (FILE_SIZE - 1024, 1024),
    ]


def test_the_link_is_written_after_the_next_file_is_durable() -> None:
    disk = CrashableDisk()
    writer = writer_on(disk)
    writer.create(10)
    writer.write(group(10, 1), JournalPosition(10, 512, 1), None)
    del disk.log[:]
    link = fmt.pack_link(journal_id=10, sequence=2, next_journal_id=11)
    writer.write(group(11, 3), JournalPosition(11, 512, 3), None, Link(link, 1024))
    assert disk.log == [
        *("create /j/b.txn", "write /j/b.txn", "sync /j/b.txn", "sync_directory /j"),
        *("write /j/a.txn", "datasync /j/a.txn"),
        *("write /j/b.txn", "datasync /j/b.txn"),
    ]
    assert disk.contents("/j/a.txn")[1024:1536] == link
    assert disk.paths() == ["/j/a.txn", "/j/b.txn"]


def test_a_file_without_a_link_is_recorded_as_needed_before_its_first_group() -> None:
    disk = CrashableDisk()
    writer = writer_on(disk)
    writer.write(group(10, 1), JournalPosition(10, 512, 1), None)
    assert disk.log[4:] == [
        *("create /j/a.txn.needed", "sync_directory /j", "write /j/a.txn", "datasync /j/a.txn"),
    ]
    writer.write(group(10, 2), JournalPosition(10, 1024, 2), None)
    assert disk.log[8:] == ["write /j/a.txn", "datasync /j/a.txn"]


def test_a_required_needed_file_is_written() -> None:
    disk = CrashableDisk()
    writer = writer_on(disk)
    writer.create(10)
    writer.require_needed_file()
    writer.write(group(10, 1), JournalPosition(10, 512, 1), None)
    assert disk.paths() == ["/j/a.txn", "/j/a.txn.needed"]


def test_a_file_has_room_for_a_large_group_and_a_link() -> None:
    disk = CrashableDisk()
    writer = writer_on(disk, file_size=4096)
    writer.create(10, group_size=8192)
    assert writer.room == 512 + 8192 + 512
    writer.create(11, group_size=3072)
    assert writer.room == 4096


def test_without_a_reserve_no_space_refuses_the_file_and_leaves_none() -> None:
    disk = CrashableDisk(capacity=FILE_SIZE - 1)
    with pytest.raises(JournalFull) as raised:
        writer_on(disk).create(10)
    assert raised.value.facts == {"path": "/j/a.txn", "size": FILE_SIZE}
    assert disk.paths() == []


def test_a_short_file_is_created_before_the_reserve_is_released() -> None:
    disk = CrashableDisk(capacity=100 * MIB)
    reserve = Reserve(disk, "/j", size=MIB)
    assert reserve.restore()
    writer = writer_on(disk, reserve=reserve)
    disk.taken = disk.capacity - disk.used - 2 * MIB
    writer.create(10)
    assert (writer.room, writer.is_short, reserve.size_held) == (MIB, True, MIB)
    disk.fill()
    writer.create(11)
    assert (writer.room, writer.is_short, reserve.size_held) == (MIB, True, 0)
    with pytest.raises(JournalFull) as raised:
        writer.create(12)
    assert raised.value.facts == {"path": "/j/c.txn", "size": MIB}


def test_no_space_for_the_needed_file_is_a_full_journal_and_is_repeated() -> None:
    disk = CrashableDisk()
    writer = writer_on(disk)

    def refuse(name: str, path: str) -> None:
        if path.endswith(".needed"):
            raise OSError(28, "No space left on device", path)

    disk.before_change = refuse
    for _ in range(2):
        with pytest.raises(JournalFull) as raised:
            writer.write(group(10, 1), JournalPosition(10, 512, 1), None)
        assert raised.value.facts == {"path": "/j/a.txn"}
    disk.before_change = None
    writer.write(group(10, 1), JournalPosition(10, 512, 1), None)
    assert disk.paths() == ["/j/a.txn", "/j/a.txn.needed"]


@pytest.mark.parametrize("operation", ["write", "sync", "sync_directory"])
def test_a_failed_creation_is_raised_and_leaves_no_file(operation: str) -> None:
    disk = CrashableDisk()
    writer = writer_on(disk)

    def fail(name: str, path: str) -> None:
        if name == operation:
            raise OSError(5, "Input/output error", path)

    disk.before_change = fail
    with pytest.raises(OSError, match="Input/output error"):
        writer.create(10)
    assert disk.paths() == []
    disk.before_change = None
    writer.create(10)
    assert disk.paths() == ["/j/a.txn"]


def test_a_file_that_a_failed_creation_left_is_replaced() -> None:
    disk = CrashableDisk()
    writer = writer_on(disk)

    def fail(name: str, path: str) -> None:
        if name in ("sync", "remove"):
            raise OSError(5, "Input/output error", path)

    disk.before_change = fail
    with pytest.raises(OSError, match="Input/output error"):
        writer.create(10)
    assert disk.paths() == ["/j/a.txn"]
    disk.before_change = None
    writer.create(10)
    assert writer.room == FILE_SIZE


def test_a_file_of_another_writer_is_never_replaced() -> None:
    disk = CrashableDisk()
    writer_on(disk).create(10)
    with pytest.raises(FileExistsError):
        writer_on(disk).create(10)


def test_a_closed_writer_has_no_room() -> None:
    writer = writer_on(CrashableDisk())
    writer.create(10)
    writer.close()
    assert (writer.room, writer.is_short) == (0, True)
