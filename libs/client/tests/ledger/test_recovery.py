"""`recover` over bookies, a pool and metadata in memory, with a simulated clock: requests, replacements and closing."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from bindery_client.ledger.recovery import recover
from bindery_client.settings import ClientSettings
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.errors import (
    BookieUnavailable,
    MetadataUnavailable,
    NotEnoughBookies,
    TryAgain,
    Unauthorized,
)
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import SendAdds, SendReads
from bindery_core.wire.messages import AddResponse, ReadResponse, Response, Status
from bindery_metadata.ledgers.closing_records import ClosingCause
from bindery_metadata.stores.versioned import Versioned

LEDGER = LedgerId(7)
DIGESTER = Digester(DigestType.CRC32C)
A, B, C, D = (BookieId(name) for name in "abcd")
OPEN = LedgerMetadata(ensemble_size=3, write_quorum=3, ack_quorum=2, segments=(Segment(EntryId(0), (A, B, C)),))
OPEN_ALL = OPEN.with_changes(ack_quorum=3)
"""Every copy is needed for an acknowledgement."""
SETTINGS = ClientSettings(
    read_timeout_s=5.0,
    add_timeout_s=4.0,
    recovery_timeout_s=60.0,
    recovery_batch_entries=4,
    replacement_retry_s=10.0,
)
PAYLOAD = b"ten bytes."
DOWN = BookieUnavailable("down")


def frame(entry_id: int, lac: int) -> bytes:
    length = len(PAYLOAD) * (entry_id + 1)
    return pack(DIGESTER, ledger_id=LEDGER, entry_id=entry_id, lac=lac, length=length, payload=PAYLOAD)


class Cluster:
    """Bookies, the pool, the ledger manager and the closing records of one recovery.

    Responses arrive in a later turn of the event loop.
    """

    ledger_id = LEDGER
    digester = DIGESTER

    def __init__(self, metadata: LedgerMetadata = OPEN, *, spares: Sequence[BookieId] = ()) -> None:
        self.pool = self
        self.stored = Versioned(metadata, 1)
        self.entries: dict[BookieId, dict[int, bytes]] = {b: {} for b in (A, B, C, D)}
        self.spares = spares
        self.silent: set[BookieId] = set()
        self.silent_to_adds: set[BookieId] = set()
        self.down: set[BookieId] = set()
        self.read_statuses: dict[BookieId, int] = {}
        self.add_statuses: dict[BookieId, int] = {}
        self.metadata_delay_s = 0.0
        self.metadata_errors: dict[str, Exception] = {}
        """Step of `events` -> the error with which it fails."""
        self.before_record: Callable[[], LedgerMetadata] | None = None
        """Returns the metadata that another client stores before the closing record is added."""
        self.events: list[str] = []
        """Changes of the metadata and of the closing records, in order."""
        self.updates_from: list[int] = []
        """Version of the metadata from which each change began."""
        self.reads: list[tuple[BookieId, tuple[int, ...], bool, float]] = []
        """Bookie, entries, whether it fences, and timeout of each read request."""
        self.adds: list[tuple[BookieId, tuple[int, ...], bool, float]] = []
        """Bookie, entries, whether it is a recovery add, and timeout of each add request."""
        self.add_calls = 0
        self.quarantined: list[tuple[BookieId, str]] = []
        self.choices: list[tuple[tuple[BookieId, ...], dict[int, BookieId], int, set[BookieId]]] = []
        """Ensemble, failed members, write quorum and excluded bookies of each search for replacements."""
        self.degraded: list[tuple[LedgerId, BookieId, str]] = []
        self.sink: Any = None

    def store(self, bookies: Sequence[BookieId], count: int, *, lac: int = -1) -> None:
        """Store the first entries at these bookies. The last confirmed entry in them is `lac`."""
        for bookie_id in bookies:
            self.entries[bookie_id] = {n: frame(n, min(lac, n - 1)) for n in range(count)}

    async def recover(self, settings: ClientSettings = SETTINGS, **changes: Any) -> Versioned[LedgerMetadata]:
        return await recover(
            self.stored,
            requests=self,  # type: ignore[arg-type]
            manager=self,  # type: ignore[arg-type]
            closing_records=self,  # type: ignore[arg-type]
            settings=replace(settings, **changes),
            on_degraded=lambda *facts: self.degraded.append(facts),
        )

    # -- requests -----------------------------------------------------------------------------------------------------

    def send_reads(self, action: SendReads, sink: Any, *, timeout_s: float) -> None:
        self.reads.append((action.bookie_id, tuple(action.entry_ids), action.fence, timeout_s))
        self._respond(action.bookie_id, sink, [self._read(action.bookie_id, n) for n in action.entry_ids])

    def _read(self, bookie_id: BookieId, entry_id: int) -> ReadResponse:
        entries = self.entries[bookie_id]
        body = entries.get(max(entries, default=-1) if entry_id == -1 else entry_id)
        status = self.read_statuses.get(bookie_id, Status.OK if body is not None else Status.NO_ENTRY)
        return ReadResponse(0, status, LEDGER, entry_id, body)

    def send_adds(self, actions: Sequence[SendAdds], sink: Any, *, timeout_s: float) -> None:
        self.add_calls += 1
        for action in actions:
            self.adds.append((action.bookie_id, tuple(action.entry_ids), action.recovery, timeout_s))
            status = self.add_statuses.get(action.bookie_id, Status.OK)
            if status == Status.OK:
                self.entries[action.bookie_id].update(zip(action.entry_ids, action.frames, strict=True))
            if action.bookie_id not in self.silent_to_adds:
                self._respond(action.bookie_id, sink, [AddResponse(0, status, LEDGER, n) for n in action.entry_ids])

    def _respond(self, bookie_id: BookieId, sink: Any, responses: Sequence[Response]) -> None:
        self.sink = sink
        loop = asyncio.get_running_loop()
        if bookie_id in self.down:
            loop.call_soon(sink.failed, bookie_id, DOWN)
        elif bookie_id not in self.silent:
            loop.call_soon(sink.answered, bookie_id, responses)

    # -- the pool -----------------------------------------------------------------------------------------------------

    def quarantine(self, bookie_id: BookieId, reason: str) -> None:
        self.quarantined.append((bookie_id, reason))

    def choose_replacements(
        self,
        ensemble: tuple[BookieId, ...],
        failed: Mapping[int, BookieId],
        *,
        write_quorum: int,
        exclude: Mapping[BookieId, str],
    ) -> dict[int, BookieId]:
        self.choices.append((ensemble, dict(failed), write_quorum, set(exclude)))
        free = [b for b in self.spares if b not in ensemble and b not in exclude]
        if not free:
            raise NotEnoughBookies("no spare")
        return dict(zip(failed, free, strict=False))

    # -- metadata -----------------------------------------------------------------------------------------------------

    async def update(
        self,
        ledger_id: LedgerId,
        transform: Callable[[LedgerMetadata], LedgerMetadata | None],
        *,
        known: Versioned[LedgerMetadata],
    ) -> Versioned[LedgerMetadata]:
        assert ledger_id == LEDGER
        self.updates_from.append(known.version)
        changed = transform(self.stored.value)
        step = changed.state.name if changed is not None else "unchanged"
        await asyncio.sleep(self.metadata_delay_s)
        if error := self.metadata_errors.get(step):
            raise error
        self.events.append(step)
        if changed is not None:
            self.stored = Versioned(changed, self.stored.version + 1)
        return self.stored

    async def add(self, ledger_id: LedgerId, cause: ClosingCause) -> None:
        assert ledger_id == LEDGER
        await asyncio.sleep(0)
        if self.before_record is not None:
            self.stored = Versioned(self.before_record(), self.stored.version + 1)
        if error := self.metadata_errors.get("record"):
            raise error
        self.events.append(f"record: {cause}")


# --- without failures -------------------------------------------------------------------------------------------------


async def test_a_ledger_is_closed_at_its_last_entry_after_its_closing_record() -> None:
    cluster = Cluster()
    cluster.store([A, B, C], 3, lac=0)
    found = await cluster.recover()
    assert found is cluster.stored
    assert (found.value.state, found.value.last_entry_id, found.value.length) == (LedgerState.CLOSED, 2, 30)
    assert found.value.segments == OPEN.segments
    assert cluster.events == ["IN_RECOVERY", "record: recovered", "CLOSED"]
    assert cluster.updates_from == [1, 2], "the second change begins from the result of the first"
    assert cluster.degraded == []


async def test_the_fencing_and_the_copies_have_the_timeouts_of_the_settings_and_a_second_more() -> None:
    cluster = Cluster()
    cluster.store([A, B, C], 2, lac=0)
    await cluster.recover()
    assert cluster.reads[:3] == [(b, (-1,), True, 6.0) for b in (A, B, C)]
    assert {timeout_s for *_, timeout_s in cluster.reads} == {6.0}
    assert cluster.adds == [(b, (1,), True, 5.0) for b in (A, B, C)]
    assert cluster.add_calls == 1, "the copies of one entry are sent together"


async def test_an_entry_after_the_confirmed_ones_is_copied_to_every_bookie() -> None:
    cluster = Cluster()
    cluster.store([A, B, C], 1)
    cluster.store([B], 3, lac=0)
    found = await cluster.recover()
    assert found.value.last_entry_id == 2
    assert [sorted(cluster.entries[b]) for b in (A, B, C)] == [[0, 1, 2]] * 3


async def test_a_ledger_without_entries_is_closed_without_a_closing_record() -> None:
    cluster = Cluster()
    found = await cluster.recover()
    assert (found.value.state, found.value.last_entry_id, found.value.length) == (LedgerState.CLOSED, -1, 0)
    assert cluster.events == ["IN_RECOVERY", "CLOSED"]


async def test_a_ledger_with_one_entry_has_a_closing_record() -> None:
    cluster = Cluster()
    cluster.store([A, B, C], 1)
    assert (await cluster.recover()).value.last_entry_id == 0
    assert cluster.events == ["IN_RECOVERY", "record: recovered", "CLOSED"]


async def test_a_ledger_that_another_client_closed_is_returned_unchanged() -> None:
    closed = OPEN.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(4), length=50)
    cluster = Cluster(closed)
    assert await cluster.recover() == Versioned(closed, 1)
    assert cluster.events == ["unchanged"]
    assert cluster.reads == []


async def test_as_many_entries_are_read_ahead_as_the_settings_allow() -> None:
    cluster = Cluster()
    cluster.store([A, B, C], 9, lac=0)
    await cluster.recover(recovery_batch_entries=4)
    assert [ids for bookie_id, ids, _, _ in cluster.reads if bookie_id == A][:2] == [(-1,), (1, 2, 3, 4)]


async def test_no_more_bytes_are_read_ahead_than_the_settings_allow() -> None:
    cluster = Cluster()
    cluster.store([A, B, C], 3, lac=0)
    await cluster.recover(read_batch_bytes_max=2 * len(PAYLOAD), recovery_batch_entries=100)
    assert max(len(ids) for _, ids, _, _ in cluster.reads) == 2


# --- bookies that fail ------------------------------------------------------------------------------------------------


async def test_a_wrong_password_is_reported() -> None:
    cluster = Cluster()
    cluster.read_statuses[B] = Status.UNAUTHORIZED
    with pytest.raises(Unauthorized):
        await cluster.recover()
    assert cluster.stored.value.state is LedgerState.IN_RECOVERY


async def test_with_two_bookies_down_recovery_fails_with_the_reason_of_each() -> None:
    cluster = Cluster()
    cluster.down = {A, B}
    with pytest.raises(TryAgain) as failed:
        await cluster.recover()
    assert failed.value.facts["missing"] == "a: down; b: down"
    assert cluster.events == ["IN_RECOVERY"]


async def test_silent_bookies_count_as_failed_at_the_read_timeout() -> None:
    cluster = Cluster()
    cluster.silent = {A, B}
    began_at = asyncio.get_running_loop().time()
    with pytest.raises(TryAgain, match="too few bookies"):
        await cluster.recover()
    assert asyncio.get_running_loop().time() - began_at == pytest.approx(5.0)


async def test_a_bookie_that_is_down_is_replaced_and_the_new_ensemble_is_published_at_the_close() -> None:
    cluster = Cluster(spares=[D])
    cluster.store([A, B, C], 3, lac=0)
    cluster.down = {C}
    found = await cluster.recover()
    assert cluster.quarantined == [(C, "a recovery add failed")]
    assert cluster.choices == [((A, B, C), {2: C}, 3, set())]
    assert found.value.segments == (Segment(EntryId(0), (A, B, C)), Segment(EntryId(1), (A, B, D)))
    assert sorted(cluster.entries[D]) == [1, 2]
    assert cluster.events == ["IN_RECOVERY", "record: recovered", "CLOSED"]


async def test_without_a_spare_recovery_continues_and_reports_the_missing_copies() -> None:
    cluster = Cluster()
    cluster.store([A, B, C], 3, lac=0)
    cluster.add_statuses[A] = Status.IO_ERROR
    found = await cluster.recover()
    assert (found.value.state, found.value.last_entry_id) == (LedgerState.CLOSED, 2)
    assert found.value.segments == OPEN.segments
    assert cluster.degraded == [(LEDGER, A, "no spare")]


async def test_the_caller_need_not_be_told_about_missing_copies() -> None:
    cluster = Cluster()
    cluster.store([A, B, C], 3, lac=0)
    cluster.add_statuses[A] = Status.IO_ERROR
    found = await recover(
        cluster.stored,
        requests=cluster,  # type: ignore[arg-type]
        manager=cluster,  # type: ignore[arg-type]
        closing_records=cluster,  # type: ignore[arg-type]
        settings=SETTINGS,
    )
    assert found.value.last_entry_id == 2
    assert cluster.quarantined == [(A, "a recovery add failed")]


async def test_bookies_that_refuse_every_add_do_not_replace_each_other_for_ever() -> None:
    """Each may return once; then it is excluded, and this ledger needs every copy."""
    cluster = Cluster(OPEN_ALL, spares=[C, D])
    cluster.store([A, B, C], 2, lac=0)
    cluster.add_statuses = {C: Status.IO_ERROR, D: Status.IO_ERROR}
    with pytest.raises(TryAgain):
        await cluster.recover()
    assert [(failed, excluded) for _, failed, _, excluded in cluster.choices] == [
        ({2: C}, set()),
        ({2: D}, set()),
        ({2: C}, {C}),
        ({2: D}, {C, D}),
    ]
    assert cluster.stored.value.state is LedgerState.IN_RECOVERY


async def test_a_bookie_without_an_answer_to_a_copy_is_replaced_at_the_add_timeout() -> None:
    cluster = Cluster(OPEN_ALL, spares=[D])
    cluster.store([A, B, C], 2, lac=0)
    cluster.silent_to_adds = {C}
    began_at = asyncio.get_running_loop().time()
    found = await cluster.recover()
    assert asyncio.get_running_loop().time() - began_at == pytest.approx(4.0)
    assert found.value.last_segment.ensemble == (A, B, D)


# --- metadata that fails, and the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "events"),
    [("IN_RECOVERY", []), ("record", ["IN_RECOVERY"]), ("CLOSED", ["IN_RECOVERY", "record: recovered"])],
)
async def test_a_metadata_change_that_fails_ends_the_recovery(step: str, events: list[str]) -> None:
    cluster = Cluster()
    cluster.store([A, B, C], 3, lac=0)
    error = cluster.metadata_errors[step] = MetadataUnavailable("away")
    with pytest.raises(MetadataUnavailable) as failed:
        await cluster.recover()
    assert failed.value is error
    assert cluster.events == events


async def test_a_recovery_that_takes_too_long_fails_and_its_metadata_change_is_cancelled() -> None:
    cluster = Cluster()
    cluster.metadata_delay_s = 100.0
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    with pytest.raises(TryAgain, match="recovery did not finish in time") as failed:
        await cluster.recover(recovery_timeout_s=30.0)
    assert loop.time() - began_at == pytest.approx(30.0)
    assert (failed.value.facts["ledger_id"], failed.value.facts["timeout_s"]) == (7, 30.0)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing of it runs on"
    await asyncio.sleep(200.0)
    assert cluster.events == []


async def test_responses_after_the_end_are_ignored() -> None:
    cluster = Cluster()
    cluster.store([A, B, C], 3, lac=0)
    cluster.silent = {A, B, C}
    with pytest.raises(TryAgain, match="did not finish in time"):
        await cluster.recover(recovery_timeout_s=1.0)
    requests = len(cluster.reads), len(cluster.adds)
    body = frame(2, 0)
    for bookie_id in (A, B, C):
        cluster.sink.answered(bookie_id, [ReadResponse(0, Status.OK, LEDGER, -1, body)])
        cluster.sink.failed(bookie_id, DOWN)
        cluster.sink.expired(bookie_id, DOWN)
    await asyncio.sleep(100.0)
    assert (len(cluster.reads), len(cluster.adds)) == requests


async def test_a_ledger_whose_ensemble_changed_meanwhile_keeps_that_change() -> None:
    """Re-replication may replace a bookie while the ledger is recovered."""
    cluster = Cluster()
    cluster.store([A, B, C], 3, lac=0)
    moved = (Segment(EntryId(0), (A, B, D)),)
    cluster.before_record = lambda: cluster.stored.value.with_changes(segments=moved)
    found = await cluster.recover()
    assert (found.value.state, found.value.segments) == (LedgerState.CLOSED, moved)


async def test_a_recovery_that_changed_ensembles_gives_up_if_another_client_changed_them_too() -> None:
    cluster = Cluster(spares=[D])
    cluster.store([A, B, C], 3, lac=0)
    cluster.down = {A}
    moved = (Segment(EntryId(0), (D, B, C)),)
    cluster.before_record = lambda: cluster.stored.value.with_changes(segments=moved)
    with pytest.raises(TryAgain, match="another client changed the ensembles"):
        await cluster.recover()
    assert cluster.stored.value.state is LedgerState.IN_RECOVERY
