"""Last add confirmed: how far a reader of an open ledger may read."""

import asyncio
import time

import pytest

from e2e.interop.actors import Actor, Handle, JavaHandle
from e2e.interop.conftest import Side

NO_LONG_POLL = "answers at once, no entry"
"""Version 2 has no long poll: Apache's client sends an ordinary read of the last entry instead."""
LONG_S = 15.0
"""Timeout in seconds of a long poll that must be answered before. The timeout of the driver is longer."""
SHORT_S = 1.0
COMES_S = 30.0
"""Seconds after which messages in flight have arrived, even on a slow machine."""

pytestmark = [pytest.mark.interop, pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("table_place")]


async def test_reader_follows_writer(side: Side) -> None:
    """open without recovery, read LAC, follow the other client's writer; the writer is not disturbed"""
    writer = await side.other.create()
    await add_one_by_one(writer, range(10))
    reader = await side.actor.open(writer.ledger, recover=False)
    assert await reader.read_lac() >= 8  # an entry is confirmed by the next one
    await add_one_by_one(writer, range(10, 20))
    assert await reader.read_lac() >= 18
    assert await reader.read(0, 18) == 19
    await writer.close()
    assert (await side.actor.metadata(writer.ledger))["last"] == 19


async def test_explicit_lac(side: Side, explicit_lac: Actor) -> None:
    """explicit LAC: an idle writer of the other client sends the LAC of its last entry"""
    writer = await explicit_lac.create()
    await writer.add(5)
    reader = await side.actor.open(writer.ledger, recover=False)
    read_lac = reader.explicit_lac if isinstance(reader, JavaHandle) else reader.read_lac
    deadline = time.monotonic() + COMES_S
    while await read_lac() < 4:
        assert time.monotonic() < deadline, "the explicit LAC never came"
        await asyncio.sleep(0.05)
    assert await reader.read(4, 4) == 1


async def test_long_poll(side: Side, explicit_lac: Actor) -> None:
    """long poll: answered when the other client adds an entry"""
    writer = await explicit_lac.create()
    await add_one_by_one(writer, range(3))
    reader = await side.actor.open(writer.ledger, recover=False)
    if side.is_java and side.is_v2:
        assert not await reader.wait_for(3, timeout_s=LONG_S)
        side.say(NO_LONG_POLL)
        return
    deadline = time.monotonic() + COMES_S
    while await reader.read_lac() < 2:
        assert time.monotonic() < deadline, "the explicit LAC never came"
        await asyncio.sleep(0.05)
    waiting = asyncio.create_task(reader.wait_for(3, timeout_s=LONG_S))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    begun = time.monotonic()
    await writer.add(2, first=3)
    assert await waiting
    assert time.monotonic() - begun < LONG_S - 1, "that was the timeout"
    assert await reader.read(3, 3) == 1


async def test_long_poll_times_out(side: Side) -> None:
    """long poll of an idle ledger: ends at its timeout"""
    writer = await side.other.create()
    await writer.add(3)
    reader = await side.actor.open(writer.ledger, recover=False)
    if side.is_java and side.is_v2:
        assert await seconds_without_entry(reader, timeout_s=LONG_S) < LONG_S / 2
        side.say(NO_LONG_POLL)
        return
    # Apache's client returns early if it receives a later LAC, even one before the requested entry, and Bindery's idle
    # writer sends an explicit LAC at its interval. Only a poll without a new LAC shows the timeout.
    known, waited = -2, 0.0
    while (lac := await reader.known_lac()) > known:
        known, waited = lac, await seconds_without_entry(reader, timeout_s=SHORT_S)
    assert known <= 2
    assert waited > 0.9 * SHORT_S


async def seconds_without_entry(reader: Handle, *, timeout_s: float) -> float:
    """Duration of a poll for an entry that is never added."""
    begun = time.monotonic()
    assert not await reader.wait_for(3, timeout_s=timeout_s)
    return time.monotonic() - begun


async def test_deferred_sync(side: Side) -> None:
    """deferred sync: adds are confirmed only by force"""
    writer = await side.actor.create(deferred=True)
    if side.is_java and side.is_v2:
        await side.refused(writer.add(5), java="IllegalOp (-100)", ours="")
        return
    await writer.add(5)
    assert await writer.known_lac() == -1
    assert await writer.force() == 4
    await writer.close()
    reader = await side.other.open(writer.ledger)
    assert await reader.read(0, 4) == 5


async def add_one_by_one(writer: Handle, entries: range) -> None:
    """Add entries one by one, so that each entry confirms all previous ones."""
    for entry in entries:
        await writer.add(1, first=entry)
