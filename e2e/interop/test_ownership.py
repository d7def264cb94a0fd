"""One writer: fencing, recovery and deletion across the two clients."""

import asyncio

import pytest

from e2e.interop.conftest import Side

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("table_place")]


async def test_fences_the_other(side: Side) -> None:
    """open with recovery fences the other client's live writer"""
    writer = await side.other.create()
    await writer.add(10)
    reader = await side.actor.open(writer.ledger)
    assert await reader.known_lac() == 9
    assert await reader.read(0, 9) == 10
    # The other client is refused by a bookie, or by its own watch of the metadata if that event arrives first.
    with pytest.raises(Exception, match=r"Fenced|LedgerClosed"):
        await writer.add(1, first=10)


async def test_is_fenced_by_the_other(side: Side) -> None:
    """a live writer is fenced by the other client: its next add"""
    writer = await side.actor.create()
    await writer.add(10)
    reader = await side.other.open(writer.ledger)
    await side.refused(writer.add(1, first=10), java="LedgerFenced (-101)", ours="LedgerFenced")
    assert await reader.known_lac() == 9


async def test_fenced_writer_in_full_flight(side: Side) -> None:
    """fenced with adds in flight: every acknowledged add is readable afterwards"""
    writer = await side.actor.create()
    acknowledged = -1

    async def write() -> None:
        nonlocal acknowledged
        while True:
            await writer.add(10, first=acknowledged + 1)
            acknowledged += 10

    writing = asyncio.create_task(write())
    while acknowledged < 200:
        await asyncio.sleep(0.01)
        assert not writing.done(), writing.exception()
    reader = await side.other.open(writer.ledger)
    # Apache's client reports the second error for an add after it detected the fence.
    await side.refused(writing, java="LedgerFenced (-101) or LedgerClosed (-11)", ours="LedgerFenced")
    last = await reader.known_lac()
    assert last >= acknowledged
    assert await reader.read(0, last) == last + 1


async def test_recovers_a_crashed_writer(side: Side) -> None:
    """recover a ledger whose writer, the other client, crashed"""
    writer = await side.other.create()
    await writer.add(50)
    await writer.crash()
    reader = await side.actor.open(writer.ledger)
    assert await reader.known_lac() == 49
    assert await reader.read(0, 49) == 50
    closed = await side.other.metadata(writer.ledger)
    assert (closed["state"], closed["last"]) == ("CLOSED", 49)
    assert closed["length"] == sum(100 + entry % 7 for entry in range(50))


async def test_recovers_an_empty_ledger(side: Side) -> None:
    """recover an empty ledger of the other client"""
    writer = await side.other.create()
    await writer.crash()
    reader = await side.actor.open(writer.ledger)
    assert await reader.known_lac() == -1
    closed = await side.other.metadata(writer.ledger)
    assert (closed["state"], closed["last"], closed["length"]) == ("CLOSED", -1, 0)


async def test_both_recover_at_once(side: Side) -> None:
    """both clients recover one ledger at the same time, with the same last entry"""
    writer = await side.other.create()
    await writer.add(30)
    await writer.crash()
    handles = await asyncio.gather(*(client.open(writer.ledger) for client in (side.actor, side.other) * 2))
    assert {await handle.known_lac() for handle in handles} == {29}


async def test_writes_on_after_close(side: Side) -> None:
    """add to a handle that was closed"""
    writer = await side.actor.create()
    await writer.add(3)
    await writer.close()
    await side.refused(writer.add(1, first=3), java="LedgerClosed (-11)", ours="LedgerClosed")


async def test_close_after_the_other_closed(side: Side) -> None:
    """close an idle writer whose ledger the other client recovered"""
    writer = await side.actor.create()
    await writer.add(4)
    await side.other.open(writer.ledger)
    await writer.close()
    assert (await side.other.metadata(writer.ledger))["last"] == 3


async def test_deleted_by_the_other(side: Side) -> None:
    """open a ledger that the other client deleted"""
    writer = await side.actor.create()
    await writer.add(3)
    await writer.close()
    await side.other.delete(writer.ledger)
    await side.refused(
        side.actor.open(writer.ledger), java="NoSuchLedgerExistsOnMetadataServer (-25)", ours="NoSuchLedger"
    )


async def test_delete_twice(side: Side) -> None:
    """delete a ledger that is deleted already"""
    writer = await side.other.create()
    await writer.close()
    await side.other.delete(writer.ledger)
    await side.actor.delete(writer.ledger)


async def test_wrong_password(side: Side) -> None:
    """open with the wrong password"""
    writer = await side.other.create(password="right")
    await writer.add(3)
    await side.refused(
        side.actor.open(writer.ledger, password="wrong"), java="UnauthorizedAccess (-102)", ours="Unauthorized"
    )
    await writer.add(3, first=3)  # the writer was not fenced


async def test_empty_password(side: Side) -> None:
    """recover a ledger with an empty password"""
    writer = await side.other.create(password="")
    await writer.add(3)
    await writer.crash()
    reader = await side.actor.open(writer.ledger, password="")
    assert await reader.read(0, 2) == 3


async def test_reads_past_the_end(side: Side) -> None:
    """read past the end of a closed ledger"""
    writer = await side.other.create()
    await writer.add(3)
    await writer.close()
    reader = await side.actor.open(writer.ledger)
    await side.refused(reader.read(0, 3), java="Read (-1)", ours="BadRequest")


async def test_too_few_bookies(side: Side) -> None:
    """create a ledger with more bookies than exist"""
    await side.refused(side.actor.create(e=9, qw=3, qa=2), java="NotEnoughBookies (-6)", ours="NotEnoughBookies")


async def test_bad_quorums(side: Side) -> None:
    """create a ledger with Qa > Qw"""
    await side.refused(side.actor.create(e=3, qw=2, qa=3), java="IncorrectParameter (-14)", ours="BadRequest")
