"""Three ZooKeeper servers: their leader dies, their quorum is lost, sessions end. Entries and services do not mind.

`BINDERY_HEALING_OUTAGE_S=120` is the form that docs/reliability.md records.
"""

import asyncio
import os
import re
import time
from collections.abc import Iterator
from typing import Final

import httpx
import pytest
from bindery_client.client import LedgerClient
from bindery_core.errors import BinderyError
from bindery_core.ids import EntryId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.embedded import four_letter_word

from e2e.healing.world import (
    MIB,
    TOPICS,
    Load,
    World,
    check_messages,
    entry_payload,
    forget,
    inspect,
    say,
    until,
    world,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
SERVERS: Final = 3
OUTAGE_S: Final = float(os.environ.get("BINDERY_HEALING_OUTAGE_S", "20"))
RESUME_S_MAX: Final = 10.0
"""From the quorum's return to the first answer to each writer."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[World]:
    with world(auditors=2, zookeepers=SERVERS) as found:
        yield found


@pytest.fixture(autouse=True)
def everybody(cluster: World) -> None:
    """Whom an earlier scenario left down comes back first."""
    cluster.start_held()


async def modes(cluster: World) -> dict[str, str]:
    """`leader`, `follower` or nothing, by the server's name."""
    found = {}
    for number, address in enumerate(cluster.zookeeper.split(",")):
        host, _, port = address.partition(":")
        text = await four_letter_word(host, int(port), "srvr", timeout_s=2.0) or ""
        mode = re.search(r"^Mode: (\w+)", text, re.MULTILINE)
        found[f"zookeeper-{number}"] = mode[1] if mode else ""
    return found


async def has_quorum(cluster: World) -> bool:
    return "leader" in (await modes(cluster)).values()


async def all_there(cluster: World) -> bool:
    """Every bookie is writable, and every auditor stands for election."""
    members = await cluster.members()
    status = await cluster.status()
    absent = [name for name, facts in members.items() if facts["registered"] != "writable"]
    print(f"not writable: {absent}; candidates: {status['candidates']}")  # what a failure shows
    for name in absent[:1]:
        print("\n".join(cluster.log(name).splitlines()[-6:]))
    return {m["registered"] for m in members.values()} == {"writable"} and len(status["candidates"]) == 2


async def counted_as_lost(cluster: World, since_ms: int) -> list[str]:
    """What the history says of it."""
    async with cluster.client() as metadata:
        return [e.text for e in await metadata.history(since_ms=since_ms) if e.kind in ("bookie_lost", "marked")]


async def test_the_leader_of_zookeeper_dies_and_nobody_notices(cluster: World) -> None:
    since_ms = int(time.time() * 1000)
    async with Load(cluster) as load:
        await load.grown_to(2 * MIB)
        (leader,) = [name for name, mode in (await modes(cluster)).items() if mode == "leader"]
        at = time.monotonic()
        cluster.end(leader)
        took_s = await until(lambda: has_quorum(cluster), "another leader", poll_s=0.1)
        await asyncio.sleep(10)
        gap_s = load.sent.gap_s(at)
    say(f"{leader} (leading) killed: another led after {took_s:.1f} s; longest time without an answer to a producer "
        f"{gap_s:.2f} s, {len(load.sent.refused)} failed; raw ledgers: {load.sent.ledger_errors}")  # fmt: skip
    assert load.sent.refused == []
    cluster.start(leader)
    await until(lambda: all_there(cluster), "everybody is there")
    assert await counted_as_lost(cluster, since_ms) == []
    await check_messages(cluster, load.sent)


@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_the_quorum_is_lost_for_a_while(cluster: World, how: str) -> None:
    since_ms = int(time.time() * 1000)
    copied = await cluster.entries_copied()
    found = await modes(cluster)
    (leader,) = [name for name, mode in found.items() if mode == "leader"]
    two = [leader, next(name for name in found if name != leader)]
    async with cluster.client() as metadata, Load(cluster) as load:
        await load.grown_to(MIB)
        ledger_id = next(iter(load.sent.ledgers))
        reader = await metadata.client.open(LedgerId(ledger_id), recover=False)
        assert reader.last_add_confirmed >= 7
        read: list[str] = []
        failed: list[str] = []
        asked = 0

        async def reads() -> None:
            """A raw ledger and a topic, each second."""
            nonlocal asked
            async with httpx.AsyncClient(base_url=cluster.cluster.url, timeout=30, trust_env=False) as http:
                asked += 1
                (entry,) = await reader.read(EntryId(asked % 8), EntryId(asked % 8))
                assert entry.payload == entry_payload(ledger_id, asked % 8)
                read.append("ledger")
                path = f"/v1/topics/public/default/{TOPICS[0]}/messages"
                try:
                    answer = await http.get(path, params={"start": "earliest", "max": 20})
                except httpx.HTTPError as error:
                    failed.append(repr(error))
                    return
                if answer.status_code == 200 and len(answer.json()["messages"]) > 0:
                    read.append("topic")
                else:
                    failed.append(f"{answer.status_code} {answer.text[:200]}")

        lost_at = time.monotonic()
        if how == "killed":
            for name in two:
                cluster.end(name)
            while time.monotonic() < lost_at + OUTAGE_S:
                await reads()
                await asyncio.sleep(1)
            at = time.monotonic()
            await asyncio.gather(*(asyncio.to_thread(cluster.start, name) for name in two[:1]))
        else:
            with cluster.stopped(*two):
                while time.monotonic() < lost_at + OUTAGE_S:
                    await reads()
                    await asyncio.sleep(1)
                at = time.monotonic()
        await until(lambda: has_quorum(cluster), "the quorum's return", poll_s=0.1)
        back = time.monotonic()
        answered = [t for t in load.sent.answered_at if lost_at + 1 < t < at]
        ledger_s = await until(lambda: new_ledger(metadata.client), "a ledger is created", poll_s=0.1, timeout_s=60)

        async def each_topic_written() -> bool:
            recent = [text for text in list(load.sent.messages.values())[-200:] if is_after(text, back)]
            return all(any(text.startswith(topic) for text in recent) for topic in TOPICS)

        await until(each_topic_written, "both topics take messages", poll_s=0.1, timeout_s=60)
        topic_s = time.monotonic() - back
        await reader.release()
        await asyncio.sleep(3)
    say(f"quorum ({' and '.join(two)} {how}) away for {back - lost_at:.1f} s: {read.count('ledger')} reads of a ledger "
        f"and {read.count('topic')} of a topic went on, {len(failed)} did not {failed[:1]}")  # fmt: skip
    say(f"while it was away: {len(answered)} messages answered, {len(load.sent.refused)} produce requests failed "
        f"{[text for _, text in load.sent.refused][:1]}")  # fmt: skip
    say(f"after its return (back {back - at:.1f} s after they were): a ledger created after {ledger_s:.1f} s, "
        f"both topics written after {topic_s:.1f} s")  # fmt: skip
    assert failed == []
    assert max(ledger_s, topic_s) <= RESUME_S_MAX
    if how == "killed":
        cluster.start(two[1])
    await until(lambda: all_there(cluster), "everybody is there")
    await asyncio.sleep(20)  # longer than the auditor's quiet time and the delay together
    assert await counted_as_lost(cluster, since_ms) == []
    async with cluster.client() as metadata:
        holes = [e for e in await metadata.history(since_ms=since_ms) if e.kind == "healed"]
    copied = await cluster.entries_copied() - copied
    say(f"copied meanwhile: {copied} entries in {len(holes)} ledgers whose writers had gone on without a copy")
    # A ledger made in these seconds may lack a bookie from its first entry to its last: that is no bound for a hole.
    assert {hole.fields["reason"] for hole in holes} <= {"reported_by_writer"}
    assert copied <= sum(hole.fields["entries"] for hole in holes)
    await inspect(cluster, load.sent)
    await check_messages(cluster, load.sent)
    await forget(cluster, load.sent)


def is_after(text: str, at: float) -> bool:
    """Whether a message of the load was made after `at` (monotonic seconds)."""
    return int(text.split()[2]) > at * 1e9


async def new_ledger(client: LedgerClient) -> bool:
    """Whether one can be made, written and closed. It is deleted: closed the moment that two bookies had its entry, it
    would have no third copy of it if the third bookie was away."""
    try:
        writer = await client.create()
        await writer.add(b"after")
        await writer.close()
        await client.delete(writer.ledger_id)
    except BinderyError:
        return False
    return True


async def test_an_auditor_that_was_cut_off_writes_nothing(cluster: World) -> None:
    """It stands still while a bookie becomes due, another is elected, and it goes on where it was."""
    async with cluster.client() as metadata, Load(cluster) as load:
        await load.grown_to(MIB)
        await metadata.marks.set_lost_bookie_delay_s(8)
        since_ms = int(time.time() * 1000)
        stale = await cluster.leader()
        victim = "bookie-3"
        cluster.end(victim)

        async def noticed() -> bool:
            return any(e.kind == "bookie_absent" for e in await metadata.history(since_ms=since_ms))

        await until(noticed, f"{stale} notices that {victim} is away", poll_s=0.1)
        with cluster.stopped(stale):

            async def taken_over() -> bool:
                leaders = [e for e in await metadata.history(since_ms=since_ms) if e.kind == "leader"]
                return bool(leaders) and leaders[-1].fields["name"] != stale

            took_s = await until(taken_over, "another auditor leads", poll_s=0.1)
            await asyncio.sleep(6)  # by its own clock the victim is overdue now
            assert await metadata.marked() == []
        # What it does now it does with a vote that is gone. The other one marks nothing in its first 15 s.
        woke_ms = int(time.time() * 1000)
        others = [e for e in await metadata.history(since_ms=since_ms) if e.kind == "leader"]
        for _ in range(20):
            assert await metadata.marked() == [], "the stale auditor has marked ledgers"
            await asyncio.sleep(0.1)

        async def noticed_its_end() -> bool:
            return "auditor_leadership_ended" in cluster.log(stale)

        await until(noticed_its_end, "the stale auditor notices the end of its term", timeout_s=8)
        assert await metadata.marked() == []

        async def whole() -> bool:
            return await metadata.whole(victim)

        await until(whole, f"nothing names {victim}", timeout_s=150)
        history = await metadata.history(since_ms=since_ms)
        assert [e.fields["name"] for e in history if e.kind == "leader"] == [others[-1].fields["name"]]
        lost = [e for e in history if e.kind == "bookie_lost"]
        assert len(lost) == 1
        assert lost[0].at_ms - others[-1].at_ms >= 15_000
        marks_by = {name: await marked_by(cluster, name) for name in ("auditor-0", "auditor-1")}
        say(f"{stale} stood still; {others[-1].fields['name']} led after {took_s:.1f} s; {stale} woke "
            f"{(woke_ms - since_ms) / 1000:.1f} s after the kill, wrote nothing, saw its term end; marks made, by "
            f"auditor: {marks_by}; its loss was told {(lost[0].at_ms - others[-1].at_ms) / 1000:.1f} s into the new "
            f"term")  # fmt: skip
        assert marks_by[stale] == 0
        assert marks_by[str(others[-1].fields["name"])] > 0
    await inspect(cluster, load.sent, never=victim)
    await forget(cluster, load.sent)
    cluster.start(victim)
    await until(lambda: all_there(cluster), "everybody is there")


async def marked_by(cluster: World, name: str) -> int:
    """Ledgers that audits of this process marked, by its own count."""
    number = int(name.rpartition("-")[2])
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        page = (await http.get(f"{cluster.cluster.auditor_url(number)}/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("bindery_recovery_this_ledgers_marked_total{")]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


async def test_sessions_end_and_everybody_comes_back(cluster: World) -> None:
    """A bookie, the broker and the leading auditor, one after the other: still for longer than their session."""
    layout = LedgersLayout()
    async with cluster.client() as metadata, Load(cluster) as load:
        await load.grown_to(MIB)
        await metadata.marks.set_lost_bookie_delay_s(60)

        async def without(path: str) -> bool:
            return await metadata.store.exists(path) is None

        registration = f"{layout.available}/bookie-1"
        with cluster.stopped("bookie-1"):
            gone_s = await until(lambda: without(registration), "the session of bookie-1 ends", poll_s=0.1)
        back_s = await until(lambda: all_there(cluster), "bookie-1 is registered again")
        say(f"bookie-1: session over after {gone_s:.1f} s, registered again {back_s:.1f} s after it woke")
        assert len(load.sent.refused) == 0

        leader = await cluster.leader()
        (vote, *_) = sorted(name for name in await metadata.store.children(layout.auditor_election) if "V_" in name)
        with cluster.stopped(leader):
            path = f"{layout.auditor_election}/{vote}"
            gone_s = await until(lambda: without(path), "the auditor's session ends", poll_s=0.1)
        back_s = await until(lambda: all_there(cluster), f"{leader} stands for election again")
        say(f"{leader}: session over after {gone_s:.1f} s, stood for election {back_s:.1f} s after it woke")
        assert await cluster.leader() != leader

        pid = cluster.cluster.pid("broker-0")
        sessions = await session_ends(cluster)
        with cluster.stopped("broker-0"):
            await asyncio.sleep(4 + 3)
        woke = time.monotonic()

        async def written() -> bool:
            return any(is_after(text, woke) for text in list(load.sent.messages.values())[-50:])

        back_s = await until(written, "the broker takes messages again", poll_s=0.1)
        await asyncio.sleep(2)
        say(f"broker-0: wrote again {back_s:.1f} s after it woke; {len(load.sent.refused)} requests failed meanwhile "
            f"{[text for _, text in load.sent.refused][:1]}")  # fmt: skip
        assert cluster.cluster.pid("broker-0") == pid, "it came back by itself"
        assert await session_ends(cluster) > sessions, "its session did end"
        assert back_s <= RESUME_S_MAX
    await inspect(cluster, load.sent)
    await check_messages(cluster, load.sent)
    await forget(cluster, load.sent)


async def session_ends(cluster: World) -> int:
    """How often the broker saw its session end, by its log."""
    return sum(facts["state"] == "lost" for facts in cluster.log_events("broker-0", "zookeeper_session"))
