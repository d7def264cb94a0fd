"""ReadHandle with bookies and a metadata store that are fakes: which requests it sends, and what responses change."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from bindery_client.ledger.api import Entry
from bindery_client.ledger.reader import PIGGYBACKED_ENTRIES_MAX, ReadHandle
from bindery_client.settings import ClientSettings
from bindery_core.digest import Digester
from bindery_core.entry import pack, pack_lac
from bindery_core.errors import BadRequest, BookieUnavailable, NoSuchEntry, NoSuchLedger, TryAgain
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import SendReads
from bindery_core.wire.messages import ErrorResponse, ReadLacResponse, ReadResponse, Response, Status
from bindery_metadata.stores.versioned import Versioned

LEDGER = LedgerId(7)
DIGESTER = Digester(DigestType.CRC32C)
A, B, C, D = (BookieId(name) for name in "abcd")
OPEN = LedgerMetadata(ensemble_size=3, write_quorum=3, ack_quorum=2, segments=(Segment(EntryId(0), (A, B, C)),))
SETTINGS = ClientSettings(long_poll_s=10.0, read_timeout_s=5.0, lac_refresh_s=0.2)
PAYLOAD = b"ten bytes."
DOWN = BookieUnavailable("down")


def closed(last_entry_id: int) -> LedgerMetadata:
    return OPEN.with_changes(
        state=LedgerState.CLOSED, last_entry_id=EntryId(last_entry_id), length=len(PAYLOAD) * (last_entry_id + 1)
    )


def frame(entry_id: int) -> bytes:
    length = len(PAYLOAD) * (entry_id + 1)
    return pack(DIGESTER, ledger_id=LEDGER, entry_id=entry_id, lac=entry_id - 1, length=length, payload=PAYLOAD)


class Poll:
    """A long poll that was sent."""

    def __init__(self, bookie_id: BookieId, sink: Any, previous_lac: int, wait_s: float, timeout_s: float) -> None:
        self.bookie_id = bookie_id
        self.previous_lac = previous_lac
        self.limits = wait_s, timeout_s
        self._sink = sink

    def answer(self, response: Response) -> None:
        self._sink.answered(self.bookie_id, [response])

    def confirm(self, lac: int, *, entry_id: int | None = None) -> None:
        body = frame(entry_id) if entry_id is not None else None
        self.answer(ReadResponse(0, Status.OK, LEDGER, -1 if entry_id is None else entry_id, body, lac))

    def fail(self) -> None:
        self._sink.failed(self.bookie_id, DOWN)

    def expire(self) -> None:
        self._sink.expired(self.bookie_id, BookieUnavailable("no answer in time"))


class Cluster:
    """Requests, connections and ledger manager of one reader. Long polls wait until a test answers them."""

    ledger_id = LEDGER
    digester = DIGESTER

    def __init__(self, metadata: LedgerMetadata = OPEN, *, version: int = 1) -> None:
        self.found: Versioned[LedgerMetadata] | None = Versioned(metadata, version)
        self.pool = self
        self.missing: set[int] = set()
        """Entries that no bookie has."""
        self.read_requests: list[int] = []
        """Number of entries of each read request."""
        self.metadata_reads = 0
        self.polls: list[Poll] = []
        self.lac_answers: dict[BookieId, Response | BookieUnavailable] = {}
        self.listener: Callable[[Versioned[LedgerMetadata] | None], None] | None = None

    def open(self, settings: ClientSettings = SETTINGS) -> ReadHandle:
        assert self.found is not None
        return ReadHandle(self.found, requests=self, manager=self, settings=settings)  # type: ignore[arg-type]

    def change(self, metadata: LedgerMetadata | None) -> None:
        """Store this metadata, and notify the reader if it watches; None: the ledger was deleted."""
        assert self.found is not None
        self.found = None if metadata is None else Versioned(metadata, self.found.version + 1)
        if self.listener is not None:
            self.listener(self.found)

    def open_polls(self) -> dict[BookieId, Poll]:
        """Return the last poll of each bookie."""
        return {poll.bookie_id: poll for poll in self.polls}

    # -- the pool, the ledger manager and the requests ----------------------------------------------------------------

    def to_avoid(self) -> frozenset[BookieId]:
        return frozenset()

    def watch(self, ledger_id: LedgerId, listener: Any) -> Callable[[], None]:
        self.listener = listener

        def unwatch() -> None:
            assert self.listener is not None, "it was called before"
            self.listener = None

        return unwatch

    async def read(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        self.metadata_reads += 1
        if self.found is None:
            raise NoSuchLedger("no such ledger", ledger_id=ledger_id)
        return self.found

    def send_reads(self, action: SendReads, sink: Any, *, timeout_s: float) -> None:
        self.read_requests.append(len(action.entry_ids))
        responses = [
            ReadResponse(0, Status.NO_ENTRY, LEDGER, entry_id)
            if entry_id in self.missing
            else ReadResponse(0, Status.OK, LEDGER, entry_id, frame(entry_id))
            for entry_id in action.entry_ids
        ]
        asyncio.get_running_loop().call_soon(sink.answered, action.bookie_id, responses)

    def send_long_poll(
        self, bookie_id: BookieId, sink: Any, *, previous_lac: int, wait_s: float, timeout_s: float
    ) -> None:
        self.polls.append(Poll(bookie_id, sink, previous_lac, wait_s, timeout_s))

    def send_lac_read(self, bookie_id: BookieId, sink: Any, *, timeout_s: float) -> None:
        answer = self.lac_answers.get(bookie_id)
        loop = asyncio.get_running_loop()
        if isinstance(answer, BookieUnavailable):
            loop.call_soon(sink.failed, bookie_id, answer)
        elif answer is not None:
            loop.call_soon(sink.answered, bookie_id, [answer])


async def start_waiting(reader: ReadHandle, entry_id: int, *, timeout_s: float = 100.0) -> "asyncio.Task[bool]":
    """Return after the first polls were sent."""
    waiting = asyncio.ensure_future(reader.wait_for_entry(EntryId(entry_id), timeout_s=timeout_s))
    await asyncio.sleep(0)
    return waiting


def ids(entries: list[Entry]) -> list[int]:
    return [entry.entry_id for entry in entries]


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "last"), [(0, 2), (1, 0), (-1, 0), (2, 2)])
async def test_a_range_outside_the_confirmed_entries_is_refused_and_no_bookie_asked(first: int, last: int) -> None:
    cluster = Cluster(closed(1))
    with pytest.raises(BadRequest) as refused:
        await cluster.open().read(EntryId(first), EntryId(last))
    assert refused.value.facts == {"ledger_id": LEDGER, "first": first, "last": last, "last_add_confirmed": 1}
    assert cluster.read_requests == []


async def test_an_entry_that_every_bookie_denies_is_searched_again_only_if_copies_moved() -> None:
    cluster = Cluster(closed(1))
    cluster.missing = {1}
    reader = cluster.open()
    with pytest.raises(NoSuchEntry):
        await reader.read(EntryId(1), EntryId(1))
    assert (len(cluster.read_requests), cluster.metadata_reads) == (3, 1), "each of the three bookies once"
    cluster.change(closed(1).with_changes(segments=(Segment(EntryId(0), (A, B, D)),)))
    with pytest.raises(NoSuchEntry):
        await reader.read(EntryId(1), EntryId(1))
    assert (len(cluster.read_requests), cluster.metadata_reads) == (9, 2), "both ensembles"


async def test_a_read_of_a_deleted_ledger_fails_with_the_answer_of_the_bookies() -> None:
    cluster = Cluster(closed(1))
    cluster.missing = {0}
    reader = cluster.open()
    cluster.change(None)
    with pytest.raises(NoSuchEntry):
        await reader.read(EntryId(0), EntryId(0))


async def test_the_first_step_is_small_and_later_ones_fit_the_sizes_that_were_read() -> None:
    """Before any entry was read, each is assumed to have 64 KiB, so that a step of 16 MiB is 256 entries."""
    cluster = Cluster(closed(999))
    reader = cluster.open()
    for expected in (256, 400):
        cluster.read_requests.clear()
        assert len(await reader.read(EntryId(0), EntryId(399))) == 400
        assert cluster.read_requests[:3] == [expected // 3 + (n < expected % 3) for n in range(3)]


async def test_entries_of_a_ledger_with_empty_payloads_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PAYLOAD", b"")
    reader = Cluster(closed(4)).open()
    for _ in range(2):
        assert ids(await reader.read(EntryId(0), EntryId(4))) == [0, 1, 2, 3, 4]


async def test_a_tail_yields_steps_of_limited_size_up_to_the_last_entry() -> None:
    reader = Cluster(closed(4)).open(ClientSettings(read_batch_entries_max=2))
    assert [ids(entries) async for entries in reader.tail(EntryId(0))] == [[0, 1], [2, 3], [4]]


# --- long polls -------------------------------------------------------------------------------------------------------


async def test_a_long_poll_names_the_last_entry_known_and_its_connection_waits_longer_than_the_bookie() -> None:
    cluster = Cluster()
    reader = cluster.open()
    waiting = await start_waiting(reader, 1)
    assert [(poll.bookie_id, poll.previous_lac, poll.limits) for poll in cluster.polls] == [
        (bookie_id, -1, (10.0, 15.0)) for bookie_id in (A, B, C)
    ]
    cluster.polls[0].confirm(0)
    assert [(poll.bookie_id, poll.previous_lac) for poll in cluster.polls[3:]] == [(A, 0)], "polled again at once"
    cluster.polls[3].confirm(1)
    assert await waiting
    assert len(cluster.polls) == 4, "nobody waits any more"


async def test_a_caller_is_woken_by_its_own_entry_only() -> None:
    cluster = Cluster()
    reader = cluster.open()
    waiting = [await start_waiting(reader, entry_id) for entry_id in (0, 2)]
    cluster.polls[0].confirm(1)
    cluster.polls[1].confirm(1)
    await asyncio.sleep(1)
    assert [task.done() for task in waiting] == [True, False]
    cluster.polls[2].confirm(2)
    assert await asyncio.gather(*waiting) == [True, True]


async def test_a_caller_that_has_waited_long_enough_is_forgotten() -> None:
    cluster = Cluster()
    reader = cluster.open()
    assert not await reader.wait_for_entry(EntryId(0), timeout_s=0.5)
    assert not reader._waiters
    cluster.polls[0].confirm(0)
    assert len(cluster.polls) == 3
    assert await reader.wait_for_entry(EntryId(0), timeout_s=0.5)


REFUSED = ReadResponse(0, Status.NO_LEDGER, LEDGER, -1, None, 5)


@pytest.mark.parametrize(
    "end", [Poll.fail, Poll.expire, lambda poll: poll.answer(REFUSED)], ids=["failed", "expired", "refused"]
)
async def test_a_poll_that_failed_is_repeated_after_a_delay(end: Callable[[Poll], None]) -> None:
    """A bookie refuses long polls until it stores the first entry of the ledger."""
    cluster = Cluster()
    reader = cluster.open()
    waiting = await start_waiting(reader, 0)
    end(cluster.polls[0])
    await asyncio.sleep(0.19)
    assert len(cluster.polls) == 3
    await asyncio.sleep(0.02)
    assert [poll.bookie_id for poll in cluster.polls[3:]] == [A]
    assert reader.last_add_confirmed == -1
    cluster.polls[3].confirm(0)
    assert await waiting


async def test_a_poll_that_failed_is_not_repeated_when_another_caller_starts_to_wait() -> None:
    cluster = Cluster()
    reader = cluster.open()
    waiting = [await start_waiting(reader, 0)]
    cluster.polls[0].fail()
    waiting.append(await start_waiting(reader, 0))
    assert len(cluster.polls) == 3, "two polls are open and one is delayed"
    cluster.polls[1].confirm(0)
    assert await asyncio.gather(*waiting) == [True, True]


async def test_a_new_member_of_the_ensemble_is_polled_and_a_former_one_is_not() -> None:
    cluster = Cluster()
    reader = cluster.open()
    waiting = await start_waiting(reader, 0)
    cluster.change(OPEN.with_changes(segments=(Segment(EntryId(0), (D, B, C)),)))
    assert [poll.bookie_id for poll in cluster.polls] == [A, B, C, D]
    former, newcomer = cluster.polls[0], cluster.polls[3]
    former.fail()
    await asyncio.sleep(1)
    assert len(cluster.polls) == 4
    newcomer.confirm(0)
    assert await waiting


async def test_metadata_that_changes_while_nobody_waits_sends_no_poll() -> None:
    cluster = Cluster()
    reader = cluster.open()
    cluster.change(OPEN.with_changes(segments=(Segment(EntryId(0), (D, B, C)),)))
    assert cluster.polls == []
    assert reader.metadata.last_segment.ensemble == (D, B, C)


async def test_responses_after_the_release_change_nothing() -> None:
    cluster = Cluster()
    reader = cluster.open()
    began = asyncio.get_running_loop().time()
    waiting = await start_waiting(reader, 0)
    await reader.release()
    assert not await waiting
    assert asyncio.get_running_loop().time() == began, "the wait ended at once"
    assert cluster.listener is None, "the metadata is not watched any more"
    cluster.polls[0].confirm(0, entry_id=0)
    cluster.polls[1].fail()
    await asyncio.sleep(1)
    assert reader.last_add_confirmed == -1
    assert len(cluster.polls) == 3
    await reader.release()


async def test_a_wait_ends_when_the_ledger_is_closed_or_deleted() -> None:
    for change, last_add_confirmed in ((closed(3), 3), (None, -1)):
        cluster = Cluster()
        reader = cluster.open()
        began = asyncio.get_running_loop().time()
        reached, beyond = [await start_waiting(reader, entry_id) for entry_id in (3, 4)]
        cluster.change(change)
        assert await asyncio.gather(reached, beyond) == [change is not None, False]
        assert asyncio.get_running_loop().time() == began, "both waits ended at once"
        assert reader.last_add_confirmed == last_add_confirmed


async def test_a_closed_ledger_is_neither_watched_nor_asked_for_its_last_entry() -> None:
    cluster = Cluster(closed(3))
    reader = cluster.open()
    assert cluster.listener is None
    assert await reader.read_last_confirmed() == 3, "no bookie answers"
    assert not await reader.wait_for_entry(EntryId(4), timeout_s=100)
    assert cluster.polls == []
    await reader.release()


# --- entries in responses to long polls -------------------------------------------------------------------------------


async def confirm_entries(cluster: Cluster, reader: ReadHandle, count: int) -> None:
    """Confirm the entries one after the other by long polls that return them."""
    for entry_id in range(count):
        waiting = await start_waiting(reader, entry_id)
        cluster.open_polls()[A].confirm(entry_id, entry_id=entry_id)
        assert await waiting


async def test_the_entry_in_a_response_is_read_from_a_bookie_the_second_time() -> None:
    cluster = Cluster()
    reader = cluster.open()
    await confirm_entries(cluster, reader, 1)
    for requests in (0, 1):
        assert await reader.read(EntryId(0), EntryId(0)) == [(0, PAYLOAD, 10)]
        assert len(cluster.read_requests) == requests


async def test_a_range_that_begins_with_the_entry_in_a_response_is_read_as_a_whole() -> None:
    cluster = Cluster()
    reader = cluster.open()
    await confirm_entries(cluster, reader, 2)
    assert ids(await reader.read(EntryId(0), EntryId(1))) == [0, 1]


async def test_an_entry_that_was_in_no_response_is_read_from_a_bookie() -> None:
    cluster = Cluster(closed(3))
    assert ids(await cluster.open().read(EntryId(2), EntryId(2))) == [2]
    assert cluster.read_requests == [1]


async def test_only_the_newest_entries_in_responses_are_kept() -> None:
    cluster = Cluster()
    reader = cluster.open()
    await confirm_entries(cluster, reader, PIGGYBACKED_ENTRIES_MAX + 1)
    for entry_id in range(1, PIGGYBACKED_ENTRIES_MAX + 1):
        assert ids(await reader.read(EntryId(entry_id), EntryId(entry_id))) == [entry_id]
    assert cluster.read_requests == []
    assert ids(await reader.read(EntryId(0), EntryId(0))) == [0]
    assert cluster.read_requests == [1]


async def test_a_corrupt_entry_in_a_response_is_read_from_a_bookie() -> None:
    cluster = Cluster()
    reader = cluster.open()
    waiting = await start_waiting(reader, 0)
    damaged = frame(0)[:-1] + b"!"
    cluster.polls[0].answer(ReadResponse(0, Status.OK, LEDGER, 0, damaged, 0))
    assert await waiting, "the response still confirms the entry"
    assert await reader.read(EntryId(0), EntryId(0)) == [(0, PAYLOAD, 10)]
    assert cluster.read_requests == [1]


# --- the last confirmed entry -----------------------------------------------------------------------------------------


def lac_of(last: int) -> ReadLacResponse:
    return ReadLacResponse(0, Status.OK, LEDGER, pack_lac(DIGESTER, ledger_id=LEDGER, lac=last), None)


@pytest.mark.parametrize("bad", [DOWN, ErrorResponse(0, 1, 502)], ids=["failed", "another response"])
async def test_the_last_confirmed_entry_is_known_despite_one_bookie_and_not_despite_two(
    bad: BookieUnavailable | ErrorResponse,
) -> None:
    cluster = Cluster()
    reader = cluster.open()
    cluster.lac_answers = {A: bad, B: lac_of(4), C: lac_of(5)}
    assert await reader.read_last_confirmed() == 5
    assert reader.last_add_confirmed == 5
    cluster.lac_answers = {A: lac_of(6), B: bad, C: bad}
    async with asyncio.timeout(100):
        with pytest.raises(TryAgain, match="too few bookies") as refused:
            await reader.read_last_confirmed()
    reason = "down" if bad is DOWN else "not an answer to READ_LAC"
    assert refused.value.facts["missing"] == f"b: {reason}; c: {reason}"
    assert reader.last_add_confirmed == 5
