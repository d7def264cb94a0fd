"""MemoryReplicas: which bookie holds which entry, and what a bookie answers after a fault was injected."""

import pytest
from bindery_client.ledger.api import Entry
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_client.memory.memory_replicas import MemoryReplicas
from bindery_core.digest import Digester
from bindery_core.entry import unpack
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import Status

LEDGER = LedgerId(7)
A, B, C = BookieId("a"), BookieId("b"), BookieId("c")
METADATA = LedgerMetadata(
    ensemble_size=3,
    write_quorum=2,
    ack_quorum=2,
    segments=(Segment(EntryId(0), (A, B, C)),),
    digest_type=DigestType.MAC,
    password=b"pw",
)
ENTRIES = [Entry(EntryId(n), b"payload %d" % n, 9 * (n + 1)) for n in range(6)]


@pytest.fixture
def replicas() -> MemoryReplicas:
    """Six entries, each on two of three bookies in rotation."""
    replicas = MemoryReplicas(LEDGER)
    for entry in ENTRIES:
        replicas.add(METADATA, entry.entry_id)
    return replicas


def read(replicas: MemoryReplicas, bookie_id: BookieId, entry_id: int, status: int | None = None) -> ReplicaRead:
    bookies = dict.fromkeys((A, B, C), True)
    return replicas.read(METADATA, ENTRIES, bookie_id, EntryId(entry_id), bookies=bookies, status=status)


def test_a_copy_has_the_digest_of_its_ledger_and_the_entry_before_it_as_last_confirmed(
    replicas: MemoryReplicas,
) -> None:
    frame = read(replicas, A, 3).frame
    assert frame is not None
    entry = unpack(Digester(DigestType.MAC, b"pw"), frame, ledger_id=LEDGER, entry_id=3)
    assert (entry.payload, entry.length, entry.lac) == (b"payload 3", 36, 2)


def test_entries_that_were_cut_off_are_on_no_bookie(replicas: MemoryReplicas) -> None:
    replicas.cut(4)
    assert {bookie: replicas.runs(bookie) for bookie in (A, B, C)} == {
        A: [(0, 1), (2, 2)],
        B: [(0, 2), (3, 1)],
        C: [(1, 2)],
    }


def test_runs_are_as_long_as_the_entries_are_consecutive(replicas: MemoryReplicas) -> None:
    for entry in ENTRIES:
        replicas.add(METADATA.with_changes(write_quorum=3), entry.entry_id)
    assert replicas.runs(A) == [(0, 6)]
    replicas.lose(A, 1)
    assert replicas.runs(A) == [(0, 1), (2, 4)]


def test_a_lost_entry_is_denied_and_others_stay(replicas: MemoryReplicas) -> None:
    replicas.lose(A, 0, 3)
    lost = read(replicas, A, 0)
    assert (lost.verdict, lost.status, lost.frame) == (Verdict.ABSENT, Status.NO_ENTRY, None)
    assert replicas.runs(A) == [(2, 1), (5, 1)]
    assert read(replicas, B, 0).verdict is Verdict.GOOD


def test_a_bookie_that_lost_the_whole_ledger_denies_the_ledger(replicas: MemoryReplicas) -> None:
    replicas.lose(A)
    replicas.lose(A)
    assert (read(replicas, A, 0).verdict, read(replicas, A, 0).status) == (Verdict.ABSENT, Status.NO_LEDGER)
    assert replicas.runs(A) == []
    assert read(replicas, B, 0).verdict is Verdict.GOOD


def test_a_damaged_copy_has_the_same_size_and_contradicts_its_digest(replicas: MemoryReplicas) -> None:
    intact = read(replicas, A, 2).frame
    replicas.damage(METADATA, ENTRIES, A, 2)
    damaged = read(replicas, A, 2)
    assert damaged.verdict is Verdict.CORRUPT
    assert intact is not None
    assert damaged.frame == intact[:-1] + b"3", "the last character of the payload was 2"
    assert read(replicas, C, 2).verdict is Verdict.GOOD, "the other copy"
    replicas.store(A, [intact])
    assert read(replicas, A, 2).verdict is Verdict.GOOD


def test_an_injected_status_is_returned_instead_of_the_entry(replicas: MemoryReplicas) -> None:
    replica = read(replicas, A, 0, status=Status.IO_ERROR)
    assert (replica.verdict, replica.status, replica.frame) == (Verdict.ERROR, Status.IO_ERROR, None)


def test_a_bookie_that_is_not_registered_cannot_be_read(replicas: MemoryReplicas) -> None:
    replica = read(replicas, BookieId("gone"), 0)
    assert (replica.verdict, replica.status) == (Verdict.ERROR, Status.IO_ERROR)
    assert replica.reason == "bookie is not registered"
