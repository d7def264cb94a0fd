"""Adds and reads: both clients can read the entries of either."""

import asyncio

import pytest

from e2e.interop.actors import OurActor
from e2e.interop.conftest import Side

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("table_place")]


async def test_write_and_read(side: Side) -> None:
    """write 300 entries (E=3 Qw=3 Qa=2), read them back, close, read by both clients"""
    writer = await side.actor.create()
    await writer.add(300)
    assert await writer.read(0, 299) == 300
    await writer.close()
    for reader in (side.actor, side.other):
        handle = await reader.open(writer.ledger)
        assert await handle.known_lac() == 299
        assert await handle.read(0, 299) == 300


async def test_read_what_the_other_wrote(side: Side) -> None:
    """read a closed ledger that the other client wrote"""
    writer = await side.other.create()
    await writer.add(300)
    await writer.close()
    handle = await side.actor.open(writer.ledger)
    assert await handle.read(0, 299) == 300
    assert (await side.actor.metadata(writer.ledger))["length"] == sum(100 + entry % 7 for entry in range(300))


@pytest.mark.parametrize("quorums", ["E=4 Qw=3 Qa=2", "E=4 Qw=2 Qa=2", "E=1 Qw=1 Qa=1"])
async def test_striping(side: Side, quorums: str) -> None:
    """stripe entries over {quorums}, read by both"""
    e, qw, qa = (int(word.partition("=")[2]) for word in quorums.split())
    writer = await side.actor.create(e=e, qw=qw, qa=qa)
    await writer.add(50)
    await writer.close()
    for reader in (side.actor, side.other):
        handle = await reader.open(writer.ledger)
        assert await handle.read(0, 49) == 50


@pytest.mark.parametrize("digest", ["CRC32", "CRC32C", "MAC", "DUMMY"])
async def test_digests(side: Side, digest: str) -> None:
    """digest {digest}, verified by both, also on recovery"""
    writer = await side.actor.create(digest=digest)
    await writer.add(20)
    handle = await side.other.open(writer.ledger)
    assert await handle.read(0, 19) == 20
    back = await side.other.create(digest=digest)
    await back.add(20)
    handle = await side.actor.open(back.ledger)
    assert await handle.read(0, 19) == 20
    assert (await side.actor.metadata(back.ledger))["digest"] == digest


async def test_large_and_empty_entries(side: Side) -> None:
    """entries of 2 MiB, and empty ones"""
    for size, count in ((2 * 1024 * 1024, 4), (0, 10)):
        writer = await side.actor.create()
        await writer.add(count, size=size)
        await writer.close()
        for reader in (side.actor, side.other):
            handle = await reader.open(writer.ledger)
            assert await handle.read(0, count - 1, size=size) == count


async def test_metadata(side: Side) -> None:
    """custom metadata, password, quorums and segments, as the other client reads them"""
    custom = {"application": "interop", "empty": ""}
    writer = await side.actor.create(qw=2, qa=1, custom=custom, digest="CRC32")
    await writer.add(5)
    await writer.close()
    seen = [await reader.metadata(writer.ledger) for reader in (side.actor, side.other)]
    for facts in seen:
        assert facts["custom"] == custom
        assert (facts["e"], facts["qw"], facts["qa"], facts["digest"]) == (3, 2, 1, "CRC32")
        assert (facts["state"], facts["last"], facts["password"]) == ("CLOSED", 4, "secret")
    assert seen[0]["segments"] == seen[1]["segments"]


async def test_ids_never_collide(side: Side) -> None:
    """ledger ids that both clients create concurrently are unique"""
    handles = await asyncio.gather(*(client.create() for client in (side.actor, side.other) * 10))
    assert len({handle.ledger for handle in handles}) == 20


async def test_batch_read(side: Side) -> None:
    """batch read by count and by size; Bindery's client uses it for all consecutive entries"""
    writer = await side.other.create()
    await writer.add(100, size=1000)
    await writer.close()
    handle = await side.actor.open(writer.ledger)
    if isinstance(side.actor, OurActor):
        assert await handle.read(0, 99, size=1000) == 100
        assert side.actor.single_readers == frozenset()
        side.say("ok" if side.is_v2 else "one by one")
        return
    if not side.is_v2:
        await side.refused(handle.batch_read(0, max_count=40, max_size=1 << 20), java="UnsupportedOperation", ours="")
        return
    assert await handle.batch_read(0, max_count=40, max_size=1 << 20, size=1000) == 40
    got = await handle.batch_read(10, max_count=0, max_size=10_000, size=1000)
    assert got == 9


async def test_read_unconfirmed(side: Side) -> None:
    """read entries beyond the last add confirmed"""
    writer = await side.other.create()
    await writer.add(10)
    if not side.is_java:
        side.say("not offered")
        return
    handle = await side.actor.open(writer.ledger, recover=False)
    assert await handle.read_unconfirmed(0, 9) == 10


async def test_read_what_is_nowhere(side: Side) -> None:
    """read an entry that no bookie has, beyond the last add confirmed"""
    writer = await side.other.create()
    await writer.add(10)
    if not side.is_java:
        side.say("not offered")
        return
    handle = await side.actor.open(writer.ledger, recover=False)
    await side.refused(handle.read_unconfirmed(10, 10), java="NoSuchEntry (-13)", ours="")


async def test_list_of_entries(side: Side) -> None:
    """request the list of entries from one bookie"""
    writer = await side.other.create(e=3, qw=2, qa=2)
    await writer.add(9)
    await writer.close()
    ensemble = (await side.actor.metadata(writer.ledger))["segments"][0]["ensemble"]
    for index, bookie_id in enumerate(ensemble):
        if "DbLedgerStorage" in side.cluster.bookie(bookie_id).storage:
            continue  # does not support it and never responds
        if side.is_java and side.is_v2:
            await side.refused(
                side.actor.entries(writer.ledger, bookie_id, 8), java="BookieHandleNotAvailable (-8)", ours=""
            )
            continue
        present = await side.actor.entries(writer.ledger, bookie_id, 8)
        assert present == [entry for entry in range(9) if index in (entry % 3, (entry + 1) % 3)]
