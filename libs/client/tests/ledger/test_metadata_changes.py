"""A replacement without a spare bookie: unreachable bookies are tried once more, and the writer waits for an excluded
bookie only if every copy is needed. The pool and the metadata store are fakes."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_client.ledger import metadata_changes
from bindery_client.ledger.metadata_changes import MetadataChanges
from bindery_client.settings import ClientSettings
from bindery_core.errors import NotEnoughBookies
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import ChangeEnsemble
from bindery_metadata.stores.versioned import Versioned

NAMES = [BookieId(f"b{n}") for n in range(4)]
CHANGE = ChangeEnsemble({0: NAMES[0]}, EntryId(0), publish=True)


class Store:
    """A ledger manager whose first `failures` updates find no bookie, and a pool that reaches an unreachable bookie
    again if `is_reachable`."""

    def __init__(self, *, ack_quorum: int, failures: int = 0) -> None:
        self.metadata = LedgerMetadata(
            ensemble_size=3,
            write_quorum=3,
            ack_quorum=ack_quorum,
            segments=(Segment(EntryId(0), tuple(NAMES[:3])),),
        )
        self.failures = failures
        self.updates = self.revisits = 0
        self.is_reachable = True

    def changes(self, *, is_abandoned: Callable[[], bool] = lambda: False) -> MetadataChanges:
        return MetadataChanges(
            Versioned(self.metadata, 0),
            requests=SimpleNamespace(ledger_id=LedgerId(7), pool=self),  # type: ignore[arg-type]
            manager=self,  # type: ignore[arg-type]
            closing_records=self,  # type: ignore[arg-type]
            settings=ClientSettings(replacement_retry_s=1.0),
            is_abandoned=is_abandoned,
        )

    async def update(self, ledger_id: LedgerId, plan: Any, *, known: Any) -> Versioned[LedgerMetadata]:
        self.updates += 1
        if self.updates <= self.failures:
            raise NotEnoughBookies("no spare bookie")
        return Versioned(self.metadata, self.updates)

    async def revisit(self) -> bool:
        self.revisits += 1
        return self.is_reachable

    def quarantine(self, bookie_id: BookieId, reason: str) -> None:
        pass


async def test_without_a_spare_an_unreachable_bookie_that_is_back_is_chosen_at_once() -> None:
    store = Store(ack_quorum=2, failures=1)
    assert (await store.changes().change_ensemble(CHANGE)).version == 2
    assert store.revisits == 1


async def test_unreachable_bookies_are_tried_once_and_then_the_writer_continues_without_a_spare() -> None:
    store = Store(ack_quorum=2, failures=100)
    with pytest.raises(NotEnoughBookies):
        await store.changes().change_ensemble(CHANGE)
    assert (store.updates, store.revisits) == (2, 1)


async def test_if_no_bookie_is_reachable_the_change_is_not_repeated() -> None:
    store = Store(ack_quorum=2, failures=100)
    store.is_reachable = False
    with pytest.raises(NotEnoughBookies):
        await store.changes().change_ensemble(CHANGE)
    assert (store.updates, store.revisits) == (1, 1)


async def changes_with_an_excluded_bookie(
    store: Store, *, failures: int, is_abandoned: Callable[[], bool] = lambda: False
) -> MetadataChanges:
    """b0 failed, was replaced by b3, and returned, so it may not be chosen again at once. The next updates fail."""
    changes = store.changes(is_abandoned=is_abandoned)
    await changes.change_ensemble(CHANGE)
    replaced = store.metadata.with_changes(segments=(Segment(EntryId(0), (NAMES[3], NAMES[1], NAMES[2])),))
    changes.ensemble_changed(Versioned(replaced, 1))
    changes.ensemble_changed(Versioned(store.metadata, 2))
    store.failures, store.updates = failures, 0
    return changes


async def test_a_ledger_that_needs_every_copy_waits_until_a_bookie_may_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata_changes, "REPLACEMENT_POLL_S", 0.02)
    store = Store(ack_quorum=3)
    changes = await changes_with_an_excluded_bookie(store, failures=3)
    began = asyncio.get_running_loop().time()
    assert (await changes.change_ensemble(CHANGE)).version == 4
    assert asyncio.get_running_loop().time() - began > 0.03, "two polls"
    assert store.revisits == 1


async def test_a_ledger_with_an_ack_quorum_does_not_wait() -> None:
    store = Store(ack_quorum=2)
    changes = await changes_with_an_excluded_bookie(store, failures=100)
    with pytest.raises(NotEnoughBookies):
        await changes.change_ensemble(CHANGE)
    assert store.updates == 2


async def test_the_wait_ends_when_the_writer_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata_changes, "REPLACEMENT_POLL_S", 0.001)
    store = Store(ack_quorum=3)
    changes = await changes_with_an_excluded_bookie(store, failures=3, is_abandoned=lambda: True)
    with pytest.raises(NotEnoughBookies):
        await changes.change_ensemble(CHANGE)
    assert store.updates == 2
