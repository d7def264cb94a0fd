"""The sanity check writes a ledger to this bookie alone, reads it back, and deletes it."""

import asyncio

import pytest
from bindery_bookie.admin.sanity import check_sanity
from bindery_core.digest import Digester
from bindery_core.entry import pack_many
from bindery_core.errors import BookieUnavailable, Corrupt
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_core.wire.messages import AddRequest, Status


async def test_the_sanity_check_writes_reads_and_deletes_its_ledger(admin) -> None:
    assert (await admin.http.get("/api/v1/bookie/sanity")).json() == {"passed": True, "readOnly": False}
    assert admin.store.groups == [10], "it wrote nothing"
    assert admin.store.read_groups == [10]
    assert not admin.store.ledgers
    assert [ledger_id async for ledger_id in admin.manager.list()] == []


async def test_the_sanity_check_detects_a_store_that_returns_other_bytes(admin, monkeypatch) -> None:
    def lying(keys, done) -> None:  # type: ignore[no-untyped-def]
        bodies = [admin.store.ledgers[ledger_id].entries[0] for ledger_id, _ in keys]
        done(bodies)

    monkeypatch.setattr(admin.store, "read_many", lying)
    answer = (await admin.http.get("/api/v1/bookie/sanity")).json()
    assert answer["passed"] is False
    assert "a different entry" in answer["reason"]
    assert not admin.store.ledgers


async def test_an_entry_with_another_payload_is_corrupt(admin, monkeypatch) -> None:
    def lying(adds, done) -> None:  # type: ignore[no-untyped-def]
        digester = Digester(DigestType.CRC32C, b"sanity")
        ledger_id = adds[0].ledger_id
        payloads = [b"sanity check, entry 0", *[b"another"] * 9]
        bodies = pack_many(digester, payloads, ledger_id=ledger_id, first_entry_id=0, lac=-1, length=0)
        for at, body in enumerate(bodies):
            admin.store._add(AddRequest(0, ledger_id, at, adds[0].master_key, body))
        done([0] * len(adds))

    monkeypatch.setattr(admin.store, "add_many", lying)
    with pytest.raises(Corrupt, match="differs from the entry that was written") as raised:
        await check_sanity(admin.app._context)
    assert raised.value.facts == {"ledger_id": 0, "entry_id": 1}
    assert not admin.store.ledgers


async def test_an_add_that_fails_is_reported_with_its_status(admin, monkeypatch) -> None:
    monkeypatch.setattr(admin.store, "add_many", lambda adds, done: [admin.store._add(adds[0]), done([0, -105])])
    with pytest.raises(BookieUnavailable, match="the bookie could not add its own entry") as raised:
        await check_sanity(admin.app._context)
    assert raised.value.facts == {"status": -105}
    assert not admin.store.ledgers
    assert [ledger_id async for ledger_id in admin.manager.list()] == []


async def test_a_read_that_fails_is_reported_with_its_status(admin, monkeypatch) -> None:
    monkeypatch.setattr(admin.store, "read_many", lambda keys, done: done([b"", int(Status.NO_ENTRY)]))
    with pytest.raises(BookieUnavailable, match="the bookie could not read its own entry") as raised:
        await check_sanity(admin.app._context)
    assert raised.value.facts == {"status": int(Status.NO_ENTRY)}
    assert not admin.store.ledgers


async def test_the_ledger_is_on_this_bookie_alone(admin, monkeypatch) -> None:
    created: list[LedgerMetadata] = []

    class Recorder:
        async def create(self, metadata: LedgerMetadata) -> tuple[int, None]:
            created.append(metadata)
            return await admin.manager.create(metadata)  # type: ignore[no-any-return]

        async def delete(self, ledger_id: int) -> None:
            await admin.manager.delete(ledger_id)

    keys: list[tuple[int, int]] = []
    read_many = admin.store.read_many
    monkeypatch.setattr(admin.store, "read_many", lambda wanted, done: [keys.extend(wanted), read_many(wanted, done)])
    monkeypatch.setattr(type(admin.app._context), "ledger_manager", lambda context: Recorder())
    await check_sanity(admin.app._context)
    (metadata,) = created
    assert (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum) == (1, 1, 1)
    assert metadata.segments == (Segment(EntryId(0), (BookieId("bookie-0"),)),)
    assert keys == [(0, entry_id) for entry_id in range(10)]


async def test_a_late_result_of_a_cancelled_check_is_dropped(admin, monkeypatch) -> None:
    late = []
    monkeypatch.setattr(admin.store, "add_many", lambda adds, done: [admin.store._add(adds[0]), late.append(done)])
    task = asyncio.create_task(check_sanity(admin.app._context))
    while not late:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    late[0]([0])
    assert not admin.store.ledgers
