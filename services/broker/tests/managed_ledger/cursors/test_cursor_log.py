"""Reading a subscription log from a ledger: which records are read, in parts, and what a torn or damaged one means."""

import pytest
from bindery_broker.managed_ledger.cursors.cursor_log import READ_ENTRIES_MAX, LoadedLog, read_log
from bindery_client.ledger.api import Entry, ReadHandle
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.errors import BookieUnavailable, Corrupt, DigestMismatch, NoSuchEntry, TryAgain
from bindery_core.ids import EntryId
from bindery_pulsar.ack_ranges import AckRanges
from bindery_pulsar.managed_ledger_codec import CursorState, encode_position
from bindery_pulsar.message_id import Position
from bindery_pulsar.subscription_log import CursorChange, encode_change, encode_snapshot

LARGE = CursorState(mark_delete=Position(0, 4), blobs={str(i): bytes([i]) * 2**20 for i in range(4)})


def change(mark_delete: int, *, snapshot_entry: int, entry_id: int) -> bytes:
    acked = AckRanges()
    acked.add(0, mark_delete + 2)
    made = CursorChange(mark_delete=Position(0, mark_delete), acked=acked)
    return encode_change(made, snapshot_entry=snapshot_entry, entry_id=entry_id)[0]


class Recorder:
    """A reader of a ledger that notes its reads."""

    def __init__(self, inner: ReadHandle) -> None:
        self._inner = inner
        self.reads: list[tuple[int, int]] = []
        self.fails: dict[int, Exception] = {}

    @property
    def last_add_confirmed(self) -> int:
        return self._inner.last_add_confirmed

    async def read(self, first: EntryId, last: EntryId) -> list[Entry]:
        self.reads.append((first, last))
        for entry_id, error in self.fails.items():
            if first <= entry_id <= last:
                raise error
        return await self._inner.read(first, last)


async def ledger_of(records: list[bytes]) -> Recorder:
    client = MemoryLedgerClient(MemoryLedgers())
    handle = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
    for record in records:
        await handle.add(record)
    await handle.close()
    return Recorder(await client.open(handle.ledger_id))


async def loaded(reader: Recorder) -> LoadedLog | None:
    return await read_log(reader, timeout_s=1)  # type: ignore[arg-type]


async def test_an_empty_ledger_has_no_state() -> None:
    assert await loaded(await ledger_of([])) is None


async def test_only_the_last_snapshot_and_what_follows_is_read_in_growing_parts() -> None:
    records = [b"never read", b"never read", *encode_snapshot(CursorState(mark_delete=Position(0, 4)), entry_id=2)]
    records += [change(5 + i, snapshot_entry=2, entry_id=3 + i) for i in range(600)]
    reader = await ledger_of(records)
    log = await loaded(reader)
    assert log is not None
    assert log.state.mark_delete == Position(0, 604)
    assert list(log.state.acked) == [(0, 605, 606)]
    assert not log.is_snapshot
    assert reader.reads[:4] == [(602, 602), (2, 2), (3, 4), (5, 8)]
    sizes = [last - first + 1 for first, last in reader.reads]
    assert max(sizes) == READ_ENTRIES_MAX
    assert len(sizes) == 11


async def test_large_records_are_read_one_at_a_time() -> None:
    reader = await ledger_of(list(encode_snapshot(LARGE, entry_id=0)))
    log = await loaded(reader)
    assert log == (LARGE, True)
    assert reader.reads == [(3, 3), (0, 0), (1, 1), (2, 2), (3, 3)]


async def test_a_record_of_pulsar_is_a_snapshot() -> None:
    state = CursorState(mark_delete=Position(0, 9))
    reader = await ledger_of([b"never read", encode_position(state)])
    assert await loaded(reader) == (state, True)


async def test_a_snapshot_that_is_not_complete_leaves_the_state_before_it() -> None:
    before = [
        *encode_snapshot(CursorState(mark_delete=Position(0, 1)), entry_id=0),
        change(2, snapshot_entry=0, entry_id=1),
    ]
    snapshot = list(encode_snapshot(LARGE, entry_id=2))
    for count in range(len(snapshot)):
        log = await loaded(await ledger_of([*before, *snapshot[:count]]))
        assert log is not None
        assert log.state.mark_delete == Position(0, 2)
        assert not log.is_snapshot
    assert await loaded(await ledger_of([*before, *snapshot])) == (LARGE, True)


async def test_a_torn_snapshot_after_a_complete_one_is_followed_by_another() -> None:
    """Pulsar reads the torn one, so it must not count as a clean end."""
    state = CursorState(mark_delete=Position(0, 1))
    torn = next(iter(encode_snapshot(LARGE, entry_id=1)))
    assert await loaded(await ledger_of([*encode_snapshot(state, entry_id=0), torn])) == (state, False)


async def test_a_log_that_begins_with_a_torn_snapshot_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="no complete snapshot"):
        await loaded(await ledger_of(list(encode_snapshot(LARGE, entry_id=0))[:2]))


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (NoSuchEntry("made up"), Corrupt, "lost"),
        (DigestMismatch("made up"), Corrupt, "made up"),
        (BookieUnavailable("made up"), TryAgain, "made up"),
    ],
)
async def test_a_missing_record_is_corrupt_and_an_unreachable_one_is_not(
    error: Exception, raised: type[Exception], text: str
) -> None:
    records = [
        *encode_snapshot(CursorState(mark_delete=Position(0, 1)), entry_id=0),
        *[change(2 + i, snapshot_entry=0, entry_id=1 + i) for i in range(5)],
    ]
    for entry_id in range(len(records)):
        reader = await ledger_of(records)
        reader.fails[entry_id] = error
        with pytest.raises(raised, match=text):
            await loaded(reader)


async def test_a_damaged_record_anywhere_after_the_snapshot_is_corrupt() -> None:
    records = [
        *encode_snapshot(CursorState(mark_delete=Position(0, 1)), entry_id=0),
        *[change(2 + i, snapshot_entry=0, entry_id=1 + i) for i in range(5)],
    ]
    for entry_id in range(len(records)):
        with pytest.raises(Corrupt):
            await loaded(await ledger_of([*records[:entry_id], b"\xff", *records[entry_id + 1 :]]))
