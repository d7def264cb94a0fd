"""Which reads the check of a ledger sends, in batches of which size, and how responses become findings."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.errors import BinderyError
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import Status
from bindery_recovery.budget import MIB, RepairBudget
from bindery_recovery.checks.checker import (
    ALL,
    ENDS,
    Depth,
    FragmentState,
    LedgerCheck,
    OpenTail,
    check_ledger,
    timed_read,
)
from scripted import ledger
from simulated import simulate

LEDGER = LedgerId(7)
B1, B2, B3 = (BookieId(name) for name in ("b1", "b2", "b3"))
Answer = tuple[Verdict, Status, str]
GOOD: Answer = (Verdict.GOOD, Status.OK, "")
ABSENT: Answer = (Verdict.ABSENT, Status.NO_ENTRY, "")
CORRUPT: Answer = (Verdict.CORRUPT, Status.OK, "entry digest mismatch")
SILENT: Answer = (Verdict.ERROR, Status.IO_ERROR, "no answer in time")
BUSY: Answer = (Verdict.ERROR, Status.TOO_MANY_REQUESTS, "bookie is too busy")
LIMBO: Answer = (Verdict.ERROR, Status.UNKNOWN_LEDGER_STATE, "bookie answers UNKNOWN_LEDGER_STATE")


class Client:
    """Answers reads of b1 as the test decides; other bookies have all entries."""

    def __init__(self, answer: Callable[[int], Answer] = lambda _: GOOD, *, size: int = 100) -> None:
        self.answer = answer
        self.size = size
        self.latency_s = 0.0
        self.batches: list[list[int]] = []
        """The entries of each request to b1."""

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], Any],
    ) -> list[Any]:
        if bookie_id == B1:
            self.batches.append([int(entry_id) for entry_id in entry_ids])
        results = []
        for entry_id in entry_ids:
            await asyncio.sleep(self.latency_s)
            verdict, status, reason = self.answer(entry_id) if bookie_id == B1 else GOOD
            frame = b"x" * self.size if verdict in (Verdict.GOOD, Verdict.CORRUPT) else None
            results.append(
                take(ReplicaRead(ledger_id, entry_id, bookie_id, int(status), frame, verdict, reason=reason))
            )
        return results

    def check(self, last: int, *, metadata: LedgerMetadata | None = None, **options: Any) -> LedgerCheck:
        """Check a ledger of three bookies whose last entry is `last`."""

        async def run() -> LedgerCheck:
            budget = RepairBudget(**options.pop("budget")) if "budget" in options else None
            return await check_ledger(
                self,  # type: ignore[arg-type]
                LEDGER,
                metadata or ledger(("b1", "b2", "b3"), last=last, length=10 * (last + 1)),
                **{"bookies": dict.fromkeys((B1, B2, B3), True), "depth": ALL, "budget": budget, **options},
            )

        return simulate(run())


def bad_of(check: LedgerCheck) -> tuple[FragmentState, tuple[int, ...], str]:
    (bad,) = check.bad
    return bad.state, bad.bad_entry_ids, bad.reason


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_double_from_eight_to_a_hundred_entries() -> None:
    client = Client()
    check = client.check(299)
    assert [len(batch) for batch in client.batches] == [8, 16, 32, 64, 100, 80]
    assert (check.entries_read, check.bytes_read) == (900, 90_000)


@pytest.mark.parametrize(("limit", "sizes"), [(5, [5, 5, 5, 5]), (11, [8, 11, 1])])
def test_batches_have_at_most_the_entries_in_flight_of_the_budget(limit: int, sizes: list[int]) -> None:
    client = Client()
    client.check(19, budget={"entries_in_flight_max": limit})
    assert [len(batch) for batch in client.batches] == sizes


def test_a_budget_does_not_make_batches_larger() -> None:
    client = Client()
    client.check(299, budget={"entries_in_flight_max": 1000})
    assert max(len(batch) for batch in client.batches) == 100


def test_the_largest_entry_of_a_batch_limits_the_next_one() -> None:
    client = Client(size=MIB // 10)
    client.check(50)
    assert [len(batch) for batch in client.batches] == [8, 10, 10, 10, 10, 3]
    larger = Client(size=2 * MIB)
    larger.check(10)
    assert [len(batch) for batch in larger.batches] == [8, 1, 1, 1]


def test_an_entry_without_a_frame_has_no_size() -> None:
    assert Client(lambda _: ABSENT).check(9).bytes_read == 2 * 10 * 100


# --- findings ---------------------------------------------------------------------------------------------------------


def test_the_first_entry_that_is_not_good_is_the_reason() -> None:
    answers = {3: CORRUPT, 5: ABSENT}
    found = bad_of(Client(lambda entry_id: answers.get(entry_id, GOOD)).check(9))
    assert found == (FragmentState.MISSING, (3, 5), "entry 3: entry digest mismatch")


def test_an_entry_that_is_missing_counts_although_another_one_is_uncertain() -> None:
    answers = {3: BUSY, 5: ABSENT}
    found = bad_of(Client(lambda entry_id: answers.get(entry_id, GOOD)).check(9))
    assert found == (FragmentState.MISSING, (5,), "entry 3: bookie is too busy")


def test_a_bookie_that_lost_its_storage_lacks_nothing_whatever_it_answered_before() -> None:
    answers = {0: ABSENT, 9: LIMBO}
    found = bad_of(Client(lambda entry_id: answers.get(entry_id, GOOD)).check(9))
    assert found == (FragmentState.REFILLING, (), "entry 9: bookie lost its storage and is refilling it")


def test_without_a_digest_type_a_digest_mismatch_is_uncertain() -> None:
    metadata = ledger(("b1", "b2", "b3")).with_changes(digest_type=None)
    found = bad_of(Client(lambda entry_id: CORRUPT if entry_id == 4 else GOOD).check(9, metadata=metadata))
    reason = "entry 4: the metadata does not record its digest type, and it is not the default"
    assert found == (FragmentState.UNSURE, (), reason)


def test_a_bookie_that_answers_again_is_read_to_the_end() -> None:
    """Reads stop only after two batches in a row without an answer."""
    client = Client(lambda entry_id: SILENT if entry_id < 8 or 24 <= entry_id < 56 else GOOD)
    state, _, reason = bad_of(client.check(99))
    assert [len(batch) for batch in client.batches] == [8, 16, 32, 44]
    assert (state, reason) == (FragmentState.UNSURE, "entry 0: no answer in time")


def test_a_bookie_that_refuses_reads_does_answer() -> None:
    client = Client(lambda _: BUSY)
    client.check(99)
    assert [len(batch) for batch in client.batches] == [8, 16, 32, 44]


def test_bookies_that_are_not_read_have_a_reason() -> None:
    check = Client().check(9, bookies={B2: True, B3: True}, leaving=[B3])
    assert [(one.state, one.fragment.bookie_id, one.reason) for one in check.bad] == [
        (FragmentState.LOST, B1, "bookie is not registered"),
        (FragmentState.LEAVING, B3, "bookie is leaving"),
    ]
    assert (check.missing_entries, check.missing_bytes) == (20, 200)


def test_a_ledger_without_entries_has_no_missing_bytes() -> None:
    assert Client().check(-1, bookies={}).missing_bytes == 0


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("is_leaving", [False, True])
def test_an_open_segment_is_whole_if_no_member_is_lost_or_leaving(is_lost: bool, is_leaving: bool) -> None:
    tail = OpenTail(0, (B1, B2), lost={0: B1} if is_lost else {}, leaving={1: B2} if is_leaving else {})
    assert tail.is_whole is not (is_lost or is_leaving)


def test_a_leaving_member_of_an_open_segment_that_is_not_registered_is_lost_only() -> None:
    metadata = ledger(("b1", "b2", "b3"), last=None)
    tail = Client().check(0, metadata=metadata, bookies={B2: True, B3: True}, leaving=[B1, B2]).tail
    assert tail is not None
    assert (tail.segment_first, tail.ensemble) == (0, (B1, B2, B3))
    assert (dict(tail.lost), dict(tail.leaving)) == ({0: B1}, {1: B2})


def test_without_a_random_source_the_middle_of_each_part_is_read() -> None:
    client = Client()
    client.check(9, depth=Depth(20))
    assert client.batches == [[0, 2, 7, 9]]
    ends = Client()
    ends.check(9, depth=ENDS)
    assert ends.batches == [[0, 9]]


# --- latency ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "expected"), [(GOOD, [0.5]), (ABSENT, [0.5]), (SILENT, [])], ids=["good", "absent", "silent"]
)
def test_the_latency_of_the_first_response_is_reported_if_it_is_one(first: Answer, expected: list[float]) -> None:
    async def run() -> list[float]:
        observed: list[float] = []
        budget = RepairBudget()
        budget.observe = observed.append  # type: ignore[method-assign]
        client = Client(lambda entry_id: first if entry_id == 0 else GOOD)
        client.latency_s = 0.5
        ids = [EntryId(0), EntryId(1), EntryId(2)]
        metadata = ledger(("b1", "b2", "b3"))
        taken = await timed_read(client, budget, LEDGER, metadata, B1, ids, lambda replica: replica.entry_id)  # type: ignore[arg-type]
        assert taken == ids
        return observed

    assert simulate(run()) == pytest.approx(expected)


def test_the_entries_of_a_read_are_in_flight_in_the_budget() -> None:
    async def run() -> list[int]:
        in_flight: list[int] = []
        budget = RepairBudget()

        def answer(entry_id: int) -> Answer:
            in_flight.append(budget.entries_in_flight)
            return GOOD

        await check_ledger(
            Client(answer),  # type: ignore[arg-type]
            LEDGER,
            ledger(("b1",), last=4, ack_quorum=1),
            bookies={B1: True},
            depth=ALL,
            budget=budget,
        )
        assert budget.entries_in_flight == 0
        assert budget.bytes_paid == 500
        return in_flight

    assert simulate(run()) == [5] * 5


def test_an_error_of_a_read_ends_the_check() -> None:
    def fail(_: int) -> Answer:
        raise BinderyError("broken")

    with pytest.raises(BinderyError, match="broken"):
        Client(fail).check(9)
