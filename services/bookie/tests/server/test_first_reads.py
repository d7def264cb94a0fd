"""FirstReads: connections of several addresses begin in turns."""

import asyncio
from functools import partial

from bindery_bookie.server.first_reads import FIRST_READS_MAX, FirstReads


async def test_addresses_begin_in_turns_and_a_few_per_turn_of_the_loop() -> None:
    reads, calls = FirstReads(), []
    for name in ("a1", "a2", "a3", "a4", "a5", "b1", "a6"):
        reads.queue(partial(calls.append, name), group=name[0])
    assert (calls, len(reads)) == ([], 7)
    await asyncio.sleep(0)
    assert calls == ["a1", "b1", "a2", "a3"]
    assert len(calls) == FIRST_READS_MAX
    await asyncio.sleep(0)
    assert calls[4:] == ["a4", "a5", "a6"]
    assert len(reads) == 0
    reads.queue(partial(calls.append, "b2"), group="b")
    await asyncio.sleep(0)
    assert calls[-1] == "b2"


async def test_a_connection_that_ends_before_its_turn_is_forgotten() -> None:
    reads, calls = FirstReads(), []
    gone, there = partial(calls.append, "gone"), partial(calls.append, "there")
    for one in (gone, there):
        reads.queue(one, group="a")
    for _ in range(2):
        reads.forget(gone, group="a")
    await asyncio.sleep(0)
    assert calls == ["there"]
    reads.forget(there, group="a")
    assert len(reads) == 0
