"""MetadataChanges with a pool and a metadata store in memory: what it quarantines, plans, records and repeats."""

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
from bindery_client.ledger.metadata_changes import MetadataChanges
from bindery_client.settings import ClientSettings
from bindery_core.errors import LedgerFenced, MetadataOutcomeUnknown, MetadataUnavailable
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import ChangeEnsemble
from bindery_metadata.ledgers.closing_records import ClosingCause
from bindery_metadata.stores.versioned import Versioned

LEDGER = LedgerId(7)
A, B, C, D = (BookieId(name) for name in "abcd")
OPEN = LedgerMetadata(ensemble_size=3, write_quorum=3, ack_quorum=2, segments=(Segment(EntryId(0), (A, B, C)),))
AWAY = MetadataUnavailable("away")
UNKNOWN = MetadataOutcomeUnknown("lost")


class Cluster:
    """The pool, the ledger manager and the closing records of one writer."""

    def __init__(self) -> None:
        self.stored = Versioned(OPEN, 1)
        self.quarantined: list[tuple[BookieId, str]] = []
        self.choices: list[tuple[tuple[BookieId, ...], dict[int, BookieId], int, set[BookieId]]] = []
        self.events: list[str] = []
        """Changes, records and reads, each with its time."""
        self.errors: list[Exception | None] = []
        """Results of the next metadata requests; None: it succeeds."""
        self.known: list[int | None] = []
        """Version from which each change began."""
        self.changes = MetadataChanges(
            self.stored,
            requests=SimpleNamespace(ledger_id=LEDGER, pool=self),  # type: ignore[arg-type]
            manager=self,  # type: ignore[arg-type]
            closing_records=self,  # type: ignore[arg-type]
            settings=ClientSettings(replacement_retry_s=10.0, metadata_timeout_s=15.0),
            is_abandoned=lambda: False,
        )

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
        (free,) = {C, D} - set(ensemble)
        return dict.fromkeys(failed, free)

    def _request(self, event: str) -> None:
        self.events.append(f"{event} at {asyncio.get_running_loop().time() - self.began_at:.1f}")
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error

    began_at = 0.0

    def begin(self, *errors: Exception | None) -> None:
        self.began_at = asyncio.get_running_loop().time()
        self.errors = list(errors)

    async def update(
        self,
        ledger_id: LedgerId,
        plan: Callable[[LedgerMetadata], LedgerMetadata | None],
        *,
        known: Versioned[LedgerMetadata],
    ) -> Versioned[LedgerMetadata]:
        assert ledger_id == LEDGER
        self.known.append(known.version)
        self._request("update")
        changed = plan(self.stored.value)
        if changed is not None:
            self.stored = Versioned(changed, self.stored.version + 1)
        return self.stored

    async def read_newest(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        assert ledger_id == LEDGER
        self._request("read")
        return self.stored

    async def add(self, ledger_id: LedgerId, cause: ClosingCause) -> None:
        assert ledger_id == LEDGER
        self._request(f"record {cause}")


def close(metadata: LedgerMetadata) -> LedgerMetadata:
    return metadata.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(4), length=50)


# --- ensembles --------------------------------------------------------------------------------------------------------


async def test_failed_bookies_are_quarantined_with_the_reason_and_replaced() -> None:
    cluster = Cluster()
    cluster.changes.add_failure(C, "connection reset")
    found = await cluster.changes.change_ensemble(ChangeEnsemble({2: C}, 5))
    assert cluster.quarantined == [(C, "connection reset")]
    assert cluster.choices == [((A, B, C), {2: C}, 3, set())]
    assert found.value.segments == (Segment(EntryId(0), (A, B, C)), Segment(EntryId(5), (A, B, D)))
    assert cluster.changes.committed == Versioned(OPEN, 1), "the writer takes the result over itself"


async def test_the_reason_of_a_failure_is_used_once() -> None:
    cluster = Cluster()
    cluster.changes.add_failure(C, "connection reset")
    cluster.changes.ensemble_changed(await cluster.changes.change_ensemble(ChangeEnsemble({2: C}, 5)))
    assert cluster.changes.committed is cluster.stored
    cluster.changes.ensemble_changed(await cluster.changes.change_ensemble(ChangeEnsemble({2: D}, 7)))
    await cluster.changes.change_ensemble(ChangeEnsemble({2: C}, 9))
    assert cluster.quarantined == [
        (C, "connection reset"),
        (D, "it refused an add, or did not answer in time"),
        (C, "it refused an add, or did not answer in time"),
    ]


async def test_a_bookie_that_failed_again_after_its_return_is_excluded_for_the_retry_interval() -> None:
    cluster = Cluster()
    for failed, first in ((C, 5), (D, 7), (C, 9)):
        action = ChangeEnsemble({2: failed}, first)
        cluster.changes.ensemble_changed(await cluster.changes.change_ensemble(action))
    assert [excluded for *_, excluded in cluster.choices] == [set(), set(), {C}]
    await asyncio.sleep(11)
    await cluster.changes.change_ensemble(ChangeEnsemble({2: D}, 11))
    assert cluster.choices[-1][-1] == set()


# --- repetition -------------------------------------------------------------------------------------------------------


async def test_a_change_begins_from_the_committed_metadata() -> None:
    cluster = Cluster()
    cluster.begin()
    found = await cluster.changes.update(close)
    assert found is cluster.stored
    assert (cluster.events, cluster.known) == (["update at 0.0"], [1])


@pytest.mark.parametrize("error", [AWAY, UNKNOWN])
async def test_a_change_is_repeated_after_the_metadata_was_read_again(error: Exception) -> None:
    cluster = Cluster()
    cluster.stored = Versioned(OPEN, 3)
    cluster.begin(error, None, error, None, None)
    await cluster.changes.update(close)
    assert cluster.events == ["update at 0.0", "read at 0.1", "update at 0.1", "read at 0.3", "update at 0.3"]
    assert cluster.known == [1, 3, 3]


async def test_a_read_that_fails_is_repeated_too() -> None:
    cluster = Cluster()
    cluster.begin(AWAY, AWAY, None, None)
    await cluster.changes.update(close)
    assert cluster.events == ["update at 0.0", "read at 0.1", "read at 0.3", "update at 0.3"]


async def test_a_change_is_given_up_before_its_timeout_would_be_exceeded() -> None:
    cluster = Cluster()
    cluster.begin(*[AWAY] * 100)
    with pytest.raises(MetadataUnavailable, match="away"):
        await cluster.changes.update(close)
    ended_s = asyncio.get_running_loop().time() - cluster.began_at
    assert 13 <= ended_s <= 15
    times = [float(event.split()[-1]) for event in cluster.events]
    assert times[:6] == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.5, 3.1])
    assert times[6] - times[5] == pytest.approx(2.0), "the pause has a maximum"


async def test_an_error_of_the_plan_is_not_repeated() -> None:
    def refuse(metadata: LedgerMetadata) -> LedgerMetadata | None:
        raise LedgerFenced("fenced")

    cluster = Cluster()
    cluster.begin()
    with pytest.raises(LedgerFenced):
        await cluster.changes.update(refuse)
    assert cluster.events == ["update at 0.0"]


async def test_a_closing_record_is_added_before_each_attempt() -> None:
    cluster = Cluster()
    cluster.begin(AWAY, None, AWAY, None, None, None)
    await cluster.changes.update(close, closing_cause=ClosingCause.DEGRADED)
    assert cluster.events == [
        "record degraded at 0.0",
        "record degraded at 0.1",
        "read at 0.1",
        "record degraded at 0.3",
        "read at 0.3",
        "update at 0.3",
    ]
