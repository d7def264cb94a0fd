"""Scans find every intact record, report every damaged byte, and take bounded steps."""

import random
from typing import Any

import pytest
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log import EntryLogWriter
from bindery_bookie.storage.entry_log.entry_log_scan import DamagedRegion, EntryLogScanner, LogRecord
from bindery_simulation.disk import CrashableDisk

DIRECTORY = "/ledgers/current"
PATH = f"{DIRECTORY}/1.log"


def make_log(
    kit: Any, *, payloads: list[bytes], sealed: bool = True, ledgers: int = 3
) -> tuple[CrashableDisk, list[Any]]:
    """Return a log with one entry per payload, and (offset of body, body) of each."""
    disk = CrashableDisk()
    logs = EntryLogWriter(disk, DIRECTORY, log_id=0, offset=0, sync_size=1 << 20)
    placed = []
    for number, payload in enumerate(payloads):
        body = kit.entry(number % ledgers, number, payload)
        log_id, offset = logs.next_place
        record = fmt.pack_record(body)
        logs.append(record, log_id=log_id, offset=offset, sizes={number % ledgers: len(record)})
        placed.append((offset + fmt.RECORD_HEADER_SIZE, body))
    if sealed:
        logs.close()
    else:
        logs.sync()
    return disk, placed


def overwrite(disk: CrashableDisk, offset: int, data: bytes) -> None:
    disk.open_read(PATH).write_at(data, offset)


def scan(disk: Any) -> tuple[list[tuple[int, bytes]], list[DamagedRegion]]:
    found = list(EntryLogScanner(disk, DIRECTORY).scan(1))
    records = [item for item in found if isinstance(item, LogRecord)]
    return [(item.offset, item.body) for item in records], [item for item in found if isinstance(item, DamagedRegion)]


@pytest.mark.parametrize("sealed", [True, False])
def test_an_intact_log_is_scanned_completely(kit: Any, sealed: bool) -> None:
    disk, placed = make_log(kit, payloads=[b"x" * n for n in range(50)], sealed=sealed)
    scanner = EntryLogScanner(disk, DIRECTORY)
    assert scanner.log_ids() == [1]
    records, damage = scan(disk)
    assert (records, damage) == (placed, [])
    ledgers = scanner.ledgers(1)
    expected = {n: sum(len(body) + 8 for _, body in placed[n::3]) for n in range(3)}
    assert (ledgers.sizes, ledgers.is_complete, ledgers.is_sealed) == (expected, True, sealed)
    first = next(iter(scanner.scan(1)))
    assert isinstance(first, LogRecord)
    assert (first.ledger_id, first.entry_id, first.location, first.is_anchored) == (0, 0, 1 << 32 | 40, True)


def test_a_damaged_body_loses_one_record(kit: Any) -> None:
    disk, placed = make_log(kit, payloads=[b"x" * 100] * 9)
    disk.corrupt(PATH, placed[4][0] + 50)
    records, (region,) = scan(disk)
    assert records == placed[:4] + placed[5:]
    assert (region.path, region.offset, region.size) == (PATH, placed[4][0] - 8, len(placed[4][1]) + 8)
    assert region.reason == "entry digest mismatch"
    assert [item.is_anchored for item in EntryLogScanner(disk, DIRECTORY).scan(1) if isinstance(item, LogRecord)] == [
        *[True] * 4,
        *[False] * 4,
    ]


def test_a_damaged_size_word_loses_one_record(kit: Any) -> None:
    disk, placed = make_log(kit, payloads=[b"x" * 100] * 9)
    disk.corrupt(PATH, placed[4][0] - 3)
    records, (region,) = scan(disk)
    assert records == placed[:4] + placed[5:]
    assert (region.offset, region.size) == (placed[4][0] - 8, len(placed[4][1]) + 8)


def test_a_truncated_log_reports_the_missing_bytes(kit: Any) -> None:
    disk, placed = make_log(kit, payloads=[b"x" * 100] * 9, sealed=False)
    end = placed[-1][0] + len(placed[-1][1])
    disk.truncate(PATH, placed[7][0] + 5)
    *records, torn, missing = EntryLogScanner(disk, DIRECTORY).scan(1, stop=end)
    assert [item.offset for item in records] == [offset for offset, _ in placed[:7]]
    assert (torn.offset, torn.offset + torn.size) == (placed[7][0] - 8, missing.offset)
    assert isinstance(missing, DamagedRegion)
    assert missing.offset + missing.size == end
    assert not EntryLogScanner(disk, DIRECTORY).ledgers(1, stop=end).is_complete


def test_a_record_inside_a_payload_is_never_anchored(kit: Any) -> None:
    """A client that stores chosen bytes must not be able to forge entries of another ledger."""
    forged = fmt.pack_record(kit.entry(2, 777, b"forged"))
    disk, placed = make_log(kit, payloads=[b"a" * 40, b"p" * 16 + forged + b"q" * 16, b"b" * 40])
    assert scan(disk)[0] == placed
    disk.corrupt(PATH, placed[1][0] - 4)
    for item in EntryLogScanner(disk, DIRECTORY).scan(1):
        if isinstance(item, LogRecord):
            assert item.is_anchored == (item.offset == placed[0][0])


def test_all_other_records_are_found_and_every_damaged_byte_is_reported(kit: Any) -> None:
    for seed in range(150):
        lots = random.Random(seed)
        sealed = lots.random() < 0.7
        payloads = [lots.randbytes(lots.choice((0, 10, 300, 3000))) for _ in range(lots.randint(1, 40))]
        disk, placed = make_log(kit, payloads=payloads, sealed=sealed)
        size = len(disk.contents(PATH))
        hit: set[int] = set()
        for _ in range(lots.randint(1, 4)):
            at, length = lots.randrange(size), lots.choice((1, 4, 30, 2000))
            before = disk.contents(PATH)[at : at + length]
            data = lots.choice((bytes(length), lots.randbytes(length), b"\xff" * length))[: len(before)]
            overwrite(disk, at, data)
            hit |= {at + n for n in range(len(data)) if data[n] != before[n]}
        records, damage = scan(disk)
        spans = {(offset - 8, offset + len(body)): (offset, body) for offset, body in placed}
        untouched = [item for (start, end), item in spans.items() if hit.isdisjoint(range(start, end))]
        touched = [item for item in placed if item not in untouched]
        assert [item for item in records if item not in touched] == untouched, seed
        assert not set(touched) & set(records), seed
        told = {n for region in damage for n in range(region.offset, region.offset + region.size)}
        zeros = set(range(20, 32))  # zeros of the header, which are checked together
        assert hit <= told | zeros, seed
        kept = {n for start, end in spans if spans[start, end] in untouched for n in range(start, end)}
        assert not told & kept, seed
        assert told | kept | zeros >= set(range(32, size if not sealed else placed[-1][0] + len(placed[-1][1]))), seed


def test_a_search_through_a_large_damaged_region_has_bounded_steps(kit: Any) -> None:
    lots = random.Random(1)
    disk, placed = make_log(kit, payloads=[b"first", lots.randbytes(3_000_000), b"last"], sealed=False)
    overwrite(disk, placed[1][0] - 8, lots.randbytes(2_900_000))
    sizes = []
    records = []
    for step in EntryLogScanner(disk, DIRECTORY).steps(1, step_size=128 * 1024):
        sizes.append(step.work_size)
        records += [(record.offset, record.body) for record in step.records]
    assert records == [placed[0], placed[2]]
    assert len(sizes) >= 3_000_000 // 128 // 1024
    assert max(sizes) < 2 * 128 * 1024 + 2 * 3_000_100, "a step may include one large candidate"


class BadSector:
    """A disk with an unreadable sector."""

    def __init__(self, disk: CrashableDisk, start: int) -> None:
        self.disk, self.start = disk, start

    def __getattr__(self, name: str) -> Any:
        return getattr(self.disk, name)

    def open_read(self, path: str) -> Any:
        file = self.disk.open_read(path)
        plain = file.read_at

        def read_at(offset: int, size: int) -> bytes:
            if offset < self.start + 4096 and offset + size > self.start:
                raise OSError(5, "Input/output error")
            return plain(offset, size)

        file.read_at = read_at  # type: ignore[attr-defined]
        return file


def test_an_unreadable_sector_loses_only_its_records(kit: Any) -> None:
    disk, placed = make_log(kit, payloads=[b"x" * 1000] * 30)
    records, (region,) = scan(BadSector(disk, 8192))
    lost = [item for item in placed if item[0] - 8 < 8192 + 4096 and item[0] + len(item[1]) > 8192]
    assert records == [item for item in placed if item not in lost]
    assert "Input/output error" in region.reason
    assert (region.offset, region.offset + region.size) == (lost[0][0] - 8, lost[-1][0] + len(lost[-1][1]))
