"""The ledger writer compared with a naive model, and its state. Sequences of events: transcripts/."""

from random import Random

import pytest
from bindery_core.digest import Digester
from bindery_core.entry import Entry, unpack
from bindery_core.errors import LedgerClosed, MetadataUnavailable, NotEnoughBookies
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import (
    ChangeEnsemble,
    Confirm,
    Degraded,
    Fail,
    SealLedger,
    SendAdds,
    SendLac,
    WriterAction,
)
from bindery_core.ledger.ledger_plans import plan_ensemble_change
from bindery_core.ledger.ledger_writer import LedgerWriter, WriterSettings
from bindery_core.placement.write_set import write_set
from bindery_core.wire.messages import AddResponse, Status
from hypothesis import given, settings
from hypothesis import strategies as st

LEDGER_ID = LedgerId(7)
DIGESTER = Digester(DigestType.CRC32C)


def ledger(*, ensemble_size: int = 3, write_quorum: int = 3, ack_quorum: int = 2) -> LedgerMetadata:
    ensemble = tuple(BookieId(f"b{i}") for i in range(ensemble_size))
    return LedgerMetadata(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        segments=(Segment(EntryId(0), ensemble),),
    )


def writer_of(**limits: float | None) -> LedgerWriter:
    return LedgerWriter(LEDGER_ID, ledger(), digester=DIGESTER, settings=WriterSettings(**limits))  # type: ignore[arg-type]


def ack(writer: LedgerWriter, name: str, *entry_ids: int, now: float = 0.0) -> list[WriterAction]:
    answers = [AddResponse(0, Status.OK, LEDGER_ID, entry_id) for entry_id in entry_ids]
    return writer.receive_many(BookieId(name), answers, now=now)


def replace_all(writer: LedgerWriter, change: WriterAction, *names: str, now: float = 0.0) -> list[WriterAction]:
    assert isinstance(change, ChangeEnsemble)
    changed = plan_ensemble_change(
        writer.metadata,
        failed=change.failed,
        first_entry_id=change.first_entry_id,
        choose=lambda _, failed: dict(zip(sorted(failed), map(BookieId, names), strict=False)),
    )
    assert changed is not None
    return writer.ensemble_changed(changed, now=now)


class NaiveWriter:
    """Records the bookies that stored each entry, and computes the confirmations from scratch each time."""

    def __init__(self, metadata: LedgerMetadata) -> None:
        self.metadata = metadata
        self.ensemble = list(metadata.last_segment.ensemble)
        self.stored: list[set[BookieId]] = []
        self.lac = -1
        self.is_changing = False

    def holders(self, entry_id: int) -> set[BookieId]:
        sizes = {"ensemble_size": self.metadata.ensemble_size, "write_quorum": self.metadata.write_quorum}
        return {self.ensemble[index] for index in write_set(entry_id=entry_id, **sizes)}

    def confirmable(self) -> int:
        lac = self.lac
        while not self.is_changing and lac + 1 < len(self.stored):
            if len(self.stored[lac + 1] & self.holders(lac + 1)) < self.metadata.ack_quorum:
                break
            lac += 1
        return lac


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), ensemble_size=st.integers(1, 5), data=st.data())
def test_the_writer_confirms_exactly_when_the_naive_writer_does(
    seed: int, ensemble_size: int, data: st.DataObject
) -> None:
    """Adds, acks in any order, failures with spares: after each event both agree on the last add confirmed."""
    write_quorum = data.draw(st.integers(1, ensemble_size))
    ack_quorum = data.draw(st.integers(1, write_quorum))
    metadata = ledger(ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum)
    writer = LedgerWriter(LEDGER_ID, metadata, digester=DIGESTER)
    naive = NaiveWriter(metadata)
    rng = Random(seed)
    sent: dict[BookieId, list[int]] = {}
    change: ChangeEnsemble | None = None
    spare = 100
    for _ in range(60):
        actions: list[WriterAction] = []
        draw = rng.random()
        if draw < 0.3:
            payloads = [b"x"] * rng.randint(1, 5)
            actions = writer.add_many(payloads, now=0.0)
            naive.stored += [set() for _ in payloads]
        elif draw < 0.85:
            waiting = [name for name, ids in sent.items() if ids]
            if waiting:
                name = rng.choice(waiting)
                rng.shuffle(sent[name])
                ids = [sent[name].pop() for _ in range(rng.randint(1, len(sent[name])))]
                actions = ack(writer, name, *ids)
                for entry_id in ids:
                    if name in naive.ensemble:
                        naive.stored[entry_id].add(name)
        elif draw < 0.92:
            actions = writer.bookie_failed(rng.choice(naive.ensemble), "lost", now=0.0)
        elif change is not None:
            names = [f"s{spare + i}" for i in range(len(change.failed))]
            spare += len(names)
            for name_before, name in zip([change.failed[i] for i in sorted(change.failed)], names, strict=True):
                naive.ensemble[naive.ensemble.index(name_before)] = BookieId(name)
            asked, change = change, None
            naive.is_changing = False
            actions = replace_all(writer, asked, *names)
        for action in actions:
            if isinstance(action, SendAdds):
                sent.setdefault(action.bookie_id, []).extend(action.entry_ids)
            elif isinstance(action, ChangeEnsemble):
                assert change is None
                change = action
                naive.is_changing = True
            elif isinstance(action, Confirm):
                assert action.first_entry_id == naive.lac + 1
                assert action.last_entry_id == naive.confirmable()
                naive.lac = action.last_entry_id
            else:
                assert isinstance(action, Degraded)
        assert writer.lac == naive.lac == naive.confirmable()
        assert writer.is_changing == naive.is_changing


def test_frames_carry_ids_lac_and_cumulative_length() -> None:
    writer = writer_of()
    (first, *_) = writer.add_many([b"ab", b"", b"cde"], now=0.0)
    assert isinstance(first, SendAdds)
    ack(writer, "b0", 0, 1)
    ack(writer, "b1", 0, 1)
    (second, *_) = writer.add_many([b"f"], now=0.0)
    assert isinstance(second, SendAdds)
    frames = [*zip(first.entry_ids, first.frames, strict=True), *zip(second.entry_ids, second.frames, strict=True)]
    entries = [unpack(DIGESTER, frame, ledger_id=LEDGER_ID, entry_id=entry_id) for entry_id, frame in frames]
    assert [(e.lac, e.length, e.payload) for e in entries] == [
        (-1, 2, b"ab"),
        (-1, 2, b""),
        (-1, 5, b"cde"),
        (1, 6, b"f"),
    ]
    assert (writer.length, writer.confirmed_length, writer.pending_count) == (6, 2, 2)


def test_entries_that_all_members_stored_are_dropped() -> None:
    """Goal: memory depends on the entries in flight, not on those written."""
    writer = writer_of()
    for round_ in range(50):
        writer.add_many([b"x"] * 10, now=0.0)
        ids = range(10 * round_, 10 * round_ + 10)
        ack(writer, "b0", *ids)
        ack(writer, "b1", *ids)
        assert writer.unsettled_count == 10
        ack(writer, "b2", *ids)
        assert writer.unsettled_count == 0
    assert writer.lac == 499
    assert not writer._acks.acks
    assert not writer._frames
    assert not writer._add_deadlines
    assert not writer._quorum_deadlines


def test_entries_missing_on_a_failed_member_are_dropped_too() -> None:
    writer = writer_of()
    writer.add_many([b"x"] * 10, now=0.0)
    ack(writer, "b0", *range(10))
    ack(writer, "b1", *range(10))
    degraded, change = writer.bookie_failed(BookieId("b2"), "lost", now=0.0)
    assert degraded == Degraded(BookieId("b2"), 0, "lost")
    replace_all(writer, change, "b3")
    assert writer.unsettled_count == 0
    assert not writer._acks.lost
    assert writer.degraded == {"b2"}


def test_bookies_with_missing_copies_of_a_sealed_ledger_are_reported() -> None:
    """An ack quorum is enough to seal a ledger. Later responses still count, and missing ones are reported."""
    writer = writer_of()
    writer.add_many([b"x"] * 10, now=0.0)
    ack(writer, "b0", *range(10))
    ack(writer, "b1", *range(10))
    ack(writer, "b2", *range(4))
    assert writer.close(now=0.0) == [SealLedger(9, 10)]
    assert writer.unanswered() == {"b2": 4}
    ack(writer, "b2", 4, 5, 7)
    assert writer.unanswered() == {"b2": 6}
    ack(writer, "b2", 6, 8, 9)
    assert writer.unanswered() == {}


def test_copies_that_were_unanswered_at_an_error_are_reported_after_it() -> None:
    """The ledger can be sealed at its last confirmed entry, and then these copies must be checked."""
    writer = writer_of(quorum_timeout_s=10.0, add_timeout_s=60.0)
    writer.add_many([b"x"] * 3, now=0.0)
    ack(writer, "b0", 0, 1)
    ack(writer, "b1", 0, 1)
    ack(writer, "b2", 0)
    assert [type(action) for action in writer.tick(now=10.0)] == [Fail]
    assert writer.close(now=11.0) == [SealLedger(1, 2)]
    assert writer.unanswered() == {"b2": 1}
    ack(writer, "b2", 1)
    assert writer.unanswered() == {"b2": 1}, "responses after the error are ignored"


def test_a_bookie_without_outstanding_adds_may_restart() -> None:
    """An idle ledger keeps its ensemble."""
    writer = writer_of()
    writer.add_many([b"x"], now=0.0)
    for name in ("b0", "b1", "b2"):
        ack(writer, name, 0)
    assert writer.bookie_failed(BookieId("b2"), "restarted", now=0.0) == []
    assert writer.bookie_failed(BookieId("nobody"), "restarted", now=0.0) == []


def test_deadlines_exist_while_entries_are_in_flight() -> None:
    writer = writer_of(add_timeout_s=10.0, quorum_timeout_s=30.0, explicit_lac_idle_s=None)
    assert writer.next_deadline() is None
    writer.add_many([b"x"], now=5.0)
    assert writer.next_deadline() == 15.0
    assert writer.tick(now=14.9) == []
    for name in ("b0", "b1", "b2"):
        ack(writer, name, 0)
    assert writer.next_deadline() is None


def test_a_new_member_has_its_own_timeout() -> None:
    """The deadline of the bookie that it replaced does not apply to it."""
    writer = writer_of(add_timeout_s=10.0)
    writer.add_many([b"x"], now=0.0)
    (change,) = writer.bookie_failed(BookieId("b2"), "lost", now=9.0)
    replace_all(writer, change, "b3", now=9.0)
    ack(writer, "b0", 0, now=9.0)
    ack(writer, "b1", 0, now=9.0)
    assert not any(isinstance(action, ChangeEnsemble) for action in writer.tick(now=18.9))
    late = writer.tick(now=19.0)
    assert ChangeEnsemble({2: BookieId("b3")}, 1) in late


def test_the_newest_lac_is_sent_once_after_a_delay() -> None:
    writer = writer_of(explicit_lac_idle_s=0.1)
    writer.add_many([b"x"], now=0.0)
    ack(writer, "b0", 0, now=1.0)
    ack(writer, "b1", 0, now=1.0)
    ack(writer, "b2", 0, now=1.0)
    assert writer.next_deadline() == 1.1
    assert writer.tick(now=1.1) == [SendLac((BookieId("b0"), BookieId("b1"), BookieId("b2")), 0)]
    assert writer.next_deadline() is None


def test_a_lac_that_an_add_carried_is_not_sent_again() -> None:
    writer = writer_of(explicit_lac_idle_s=0.1)
    writer.add_many([b"x"], now=0.0)
    for name in ("b0", "b1", "b2"):
        ack(writer, name, 0)
    writer.add_many([b"y"], now=0.05)
    assert not any(isinstance(action, SendLac) for action in writer.tick(now=0.2))


def test_a_failed_metadata_change_breaks_the_handle() -> None:
    writer = writer_of()
    writer.add_many([b"x"], now=0.0)
    writer.bookie_failed(BookieId("b0"), "lost", now=0.0)
    error = MetadataUnavailable("no session")
    assert writer.ensemble_change_failed(error, now=0.0) == [Fail(error)]
    assert ack(writer, "b1", 0) == ack(writer, "b2", 0) == []
    assert writer.next_deadline() is None
    with pytest.raises(MetadataUnavailable):
        writer.add_many([b"y"], now=0.0)


def test_closing_waits_for_an_ensemble_change() -> None:
    writer = writer_of()
    writer.add_many([b"x"], now=0.0)
    ack(writer, "b0", 0)
    (change,) = writer.bookie_failed(BookieId("b1"), "lost", now=0.0)
    assert ack(writer, "b2", 0) == []
    assert writer.close(now=0.0) == []
    assert SealLedger(0, 1) in replace_all(writer, change, "b3")
    assert writer.close(now=0.0) == []
    with pytest.raises(LedgerClosed):
        writer.add_many([b"y"], now=0.0)


def test_a_sealed_writer_requests_no_more_actions() -> None:
    writer = writer_of()
    writer.add_many([b"x"], now=0.0)
    ack(writer, "b0", 0)
    ack(writer, "b1", 0)
    assert writer.close(now=0.0) == [SealLedger(0, 1)]
    refusal = AddResponse(0, Status.IO_ERROR, LEDGER_ID, 0)
    assert writer.receive_many(BookieId("b2"), [refusal], now=0.0) == []
    assert writer.bookie_failed(BookieId("b2"), "lost", now=0.0) == []
    assert writer.tick(now=1e9) == []


def test_an_add_that_cannot_reach_its_ack_quorum_fails_at_once() -> None:
    """Qa = Qw, and a member of a striped ledger failed without a spare: entries of its write sets cannot be written."""
    metadata = ledger(ensemble_size=4, write_quorum=2, ack_quorum=2)
    writer = LedgerWriter(LEDGER_ID, metadata, digester=DIGESTER)
    writer.add_many([b"x"], now=0.0)  # on b0 b1
    ack(writer, "b0", 0)
    ack(writer, "b1", 0)
    writer.add_many([b"x"], now=0.0)  # on b1 b2
    ack(writer, "b1", 1)
    assert writer.bookie_failed(BookieId("b3"), "lost", now=0.0) == []  # no add is outstanding there
    writer.add_many([b"x"], now=0.0)  # on b2 b3
    writer.bookie_failed(BookieId("b3"), "lost", now=0.0)
    error = NotEnoughBookies("no spare")
    assert writer.ensemble_change_failed(error, now=0.0)[-1] == Fail(error)


def test_recovered_entries_keep_their_ids_and_lengths_and_carry_the_lac_of_recovery() -> None:
    metadata = ledger().with_changes(state=LedgerState.IN_RECOVERY)
    writer = LedgerWriter(LEDGER_ID, metadata, digester=DIGESTER, recovery=True, lac=4)
    entries = [Entry(7, 5, 3, 66, b"x"), Entry(7, 6, 3, 99, b"y")]
    (send, *_) = writer.add_recovered(entries, now=0.0)
    assert isinstance(send, SendAdds)
    assert send.recovery
    assert list(send.entry_ids) == [5, 6]
    first = unpack(DIGESTER, send.frames[0], ledger_id=LEDGER_ID, entry_id=5)
    assert (first.lac, first.length) == (4, 66)
    assert writer.length == 99
