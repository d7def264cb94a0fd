"""Helpers of the tests of under-replication marks."""

import random
from collections.abc import Awaitable, Callable

import pytest
from bindery_core.ids import LedgerId
from bindery_metadata.coordination.election import Leadership
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

LAYOUT = LedgersLayout()
ROOT = LAYOUT.underreplication
FIVE, SIX, FAR = LedgerId(5), LedgerId(6), LedgerId(4294967301)
NOW_MS = 1_700_000_000_000


def manager_of(store: MetadataStore, *, name: str = "worker-1", seed: int = 1) -> UnderreplicationManager:
    return UnderreplicationManager(
        store, LAYOUT, randomness=random.Random(seed), clock_ms=lambda: NOW_MS, worker_name=name
    )


async def marked(manager: UnderreplicationManager) -> list[int]:
    return [mark.ledger_id async for mark in manager.list()]


async def leader(store: MetadataStore) -> Leadership:
    vote = await store.create(f"{LAYOUT.auditor_election}/V_", ephemeral=True, sequential=True, make_parents=True)
    return Leadership(store, name="n", vote_path=vote, version=0, session_id=store.session_id)


def just_before_the_next(
    monkeypatch: pytest.MonkeyPatch, store: MetadataStore, operation: str, happens: Callable[[], Awaitable[object]]
) -> None:
    """Run `happens` once, just before `store` carries out its next `operation`."""
    original = getattr(store, operation)

    async def after_that(*args, **kwargs):
        monkeypatch.undo()
        await happens()
        return await original(*args, **kwargs)

    monkeypatch.setattr(store, operation, after_that)
