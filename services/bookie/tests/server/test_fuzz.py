"""Frames generated from a seed never harm a server: the next client is always served, and no state is left."""

import asyncio
import contextlib

import pytest
from bindery_core.wire import messages as m
from bindery_simulation import wire_fuzz
from bindery_simulation.wire_fuzz import plan

SEED = 20


async def send(client, one: wire_fuzz.Plan) -> None:  # type: ignore[no-untyped-def]
    """Send all of one plan, then wait until its bytes are processed or the connection is closed."""
    with contextlib.suppress(ConnectionError):
        for piece, _ in one.pieces(SEED):
            client.writer.write(piece)
            if len(piece) > 1000:
                await client.writer.drain()
        client.writer.write_eof()
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            while await client.reader.read(65536):
                pass


@pytest.mark.parametrize("first", range(0, 120, 20))
async def test_hostile_connections_do_not_harm_others(bookie, first) -> None:
    healthy = await bookie.connect()
    for number in range(first, first + 20):
        client = await bookie.connect()
        await send(client, plan(SEED, number))
        answer = await healthy.ask(m.AddRequest(1, 2**50, number, b"k" * 20, (2**50).to_bytes(8, "big") + bytes(28)))
        assert answer == m.AddResponse(1, 0, 2**50, number)
    operations = bookie.server.operations
    async with asyncio.timeout(30):
        while bookie.server.connection_count > 1 or operations.long_polls or operations.pending_reads:
            await asyncio.sleep(0.001)
        while operations.adds_budget.used or operations.reads_budget.used:
            await asyncio.sleep(0.001)


def test_a_plan_is_a_function_of_seed_and_number() -> None:
    assert plan(3, 17) == plan(3, 17)
    assert list(plan(3, 17).pieces(3)) == list(plan(3, 17).pieces(3))
    assert plan(3, 17) != plan(3, 18) != plan(4, 18)
    for number in range(50):
        one = plan(5, number)
        pieces = list(one.pieces(5))
        assert b"".join(piece for piece, _ in pieces) == b"".join(one.frames)
        assert sum(complete for _, complete in pieces) == len(one.frames)


def test_plans_cover_valid_and_malformed_frames_of_both_protocols() -> None:
    """The fuzzer covers the cases that it documents."""
    plans = [plan(6, number) for number in range(300)]
    assert {one.damaged_share for one in plans} == set(wire_fuzz.DAMAGED_SHARES)
    first_bytes = {frame[4] for one in plans if not one.damaged_share for frame in one.frames}
    assert first_bytes == {0x02, 0x0A}
    assert {one.tls for one in plans} == {one.token for one in plans} == {True, False}
