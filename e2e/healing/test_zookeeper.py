"""Three ZooKeeper servers: kill their leader, stop their quorum, and let sessions expire. Entries and services survive.

The results in docs/reliability.md were measured with `BINDERY_HEALING_OUTAGE_S=120`.
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
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import EntryId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.embedded import four_letter_word

from e2e.healing.world import (
    MIB,
    TOPICS,
    Load,
    Metadata,
    World,
    check_messages,
    entry_payload,
    forget,
    inspect,
    say,
    seal_topics,
    until,
    world,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
SERVERS: Final = 3
OUTAGE_S: Final = float(os.environ.get("BINDERY_HEALING_OUTAGE_S", "20"))
RESUME_S_MAX: Final = 10.0
"""Maximum seconds from the return of the quorum to the first response to each writer."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[World]:
    with world(auditors=2, zookeepers=SERVERS) as found:
        yield found


@pytest.fixture(autouse=True)
def all_started(cluster: World) -> None:
    """Start the processes that an earlier scenario left stopped."""
    cluster.start_held()


async def no_closed_ledger_is_marked(metadata: Metadata) -> bool:
    ledgers = await metadata.ledgers()
    return not any(
        ledgers[i].state is LedgerState.CLOSED for i in map(LedgerId, await metadata.marked()) if i in ledgers
    )


async def modes(cluster: World) -> dict[str, str]:
    """Server -> `leader`, `follower` or an empty text."""
    found = {}
    for number, address in enumerate(cluster.zookeeper.split(",")):
        host, _, port = address.partition(":")
        text = await four_letter_word(host, int(port), "srvr", timeout_s=2.0) or ""
        mode = re.search(r"^Mode: (\w+)", text, re.MULTILINE)
        found[f"zookeeper-{number}"] = mode[1] if mode else ""
    return found


async def has_quorum(cluster: World) -> bool:
    return "leader" in (await modes(cluster)).values()


async def all_registered(cluster: World) -> bool:
    """Whether every bookie is writable and every auditor is a candidate for election."""
    members = await cluster.members()
    status = await cluster.status()
    absent = [name for name, facts in members.items() if facts["registered"] != "writable"]
    print(f"not writable: {absent}; candidates: {status['candidates']}")  # shown if the test fails
    for name in absent[:1]:
        print("\n".join(cluster.log(name).splitlines()[-6:]))
    return {m["registered"] for m in members.values()} == {"writable"} and len(status["candidates"]) == 2


async def counted_as_lost(cluster: World, since_ms: int) -> list[str]:
    """Texts of the history's events about lost bookies and marked ledgers."""
    async with cluster.client() as metadata:
        return [e.text for e in await metadata.history(since_ms=since_ms) if e.kind in ("bookie_lost", "marked")]


async def test_the_death_of_the_zookeeper_leader_fails_no_request(cluster: World) -> None:
    since_ms = int(time.time() * 1000)
    async with Load(cluster) as load:
        await load.grown_to(2 * MIB)
        (leader,) = [name for name, mode in (await modes(cluster)).items() if mode == "leader"]
        at = time.monotonic()
        cluster.end(leader)
        took_s = await until(lambda: has_quorum(cluster), "another leader", poll_s=0.1)
        await asyncio.sleep(10)
        gap_s = load.sent.gap_s(at)
    say(
        f"{leader} (leading) killed: new leader after {took_s:.1f} s; longest time without a response to a producer "
        f"{gap_s:.2f} s, {len(load.sent.refused)} failed; raw ledgers: {load.sent.ledger_errors}"
    )
    assert load.sent.refused == []
    cluster.start(leader)
    await until(lambda: all_registered(cluster), "all bookies and auditors are registered")
    assert await counted_as_lost(cluster, since_ms) == []
    await check_messages(cluster, load.sent)


@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_reads_continue_and_writes_resume_after_a_lost_quorum(cluster: World, how: str) -> None:
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
        count = 0

        async def reads() -> None:
            """Read from a raw ledger and from a topic."""
            nonlocal count
            async with httpx.AsyncClient(base_url=cluster.cluster.url, timeout=30, trust_env=False) as http:
                count += 1
                (entry,) = await reader.read(EntryId(count % 8), EntryId(count % 8))
                assert entry.payload == entry_payload(ledger_id, count % 8)
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
        created: set[LedgerId] = set()
        ledger_s = await until(
            lambda: new_ledger(metadata.client, created), "a ledger is created", poll_s=0.1, timeout_s=60
        )

        async def each_topic_written() -> bool:
            recent = [text for text in list(load.sent.messages.values())[-200:] if is_after(text, back)]
            return all(any(text.startswith(topic) for text in recent) for topic in TOPICS)

        await until(each_topic_written, "both topics accept messages", poll_s=0.1, timeout_s=60)
        topic_s = time.monotonic() - back
        await reader.release()
        await asyncio.sleep(3)
    say(
        f"quorum ({' and '.join(two)} {how}) down for {back - lost_at:.1f} s: {read.count('ledger')} reads of a ledger "
        f"and {read.count('topic')} of a topic succeeded, {len(failed)} failed {failed[:1]}"
    )
    say(
        f"while it was down: {len(answered)} messages acknowledged, {len(load.sent.refused)} produce requests failed "
        f"{[text for _, text in load.sent.refused][:1]}"
    )
    say(
        f"after its return ({back - at:.1f} s after its servers): a ledger created after {ledger_s:.1f} s, "
        f"both topics written after {topic_s:.1f} s"
    )
    assert failed == []
    assert max(ledger_s, topic_s) <= RESUME_S_MAX
    if how == "killed":
        cluster.start(two[1])
    await until(lambda: all_registered(cluster), "all bookies and auditors are registered")
    await asyncio.sleep(20)  # longer than the auditor's start delay and the lost-bookie delay together
    assert await counted_as_lost(cluster, since_ms) == []
    async with cluster.client() as metadata:
        # An attempt that finds the ledger open copies what it can, and waits; the event follows the last attempt, after
        # the mark was removed, and after further attempts if ZooKeeper does not answer.
        await until(lambda: no_closed_ledger_is_marked(metadata), "no closed ledger is marked")
        waiting = await metadata.marked()
        copied = await cluster.entries_copied() - copied
        reasons: set[str] = set()

        async def a_reason_is_known() -> bool:
            records = [await metadata.records.get(LedgerId(ledger_id)) for ledger_id in waiting]
            history = await metadata.history(since_ms=since_ms)
            reasons.update(str(record.reason) for record in records if record is not None)
            reasons.update(str(event.fields["reason"]) for event in history if event.kind == "healed")
            return not copied or bool(reasons)

        await until(a_reason_is_known, "the reason why entries were copied is in the history", timeout_s=30)
    say(
        f"copied meanwhile: {copied} entries that were written with a missing replica; {len(waiting)} open ledgers left"
    )
    # A ledger created in these seconds may have a missing replica for each of its entries, so `copied` has no limit.
    assert reasons <= {"reported_by_writer"}
    seal_topics(cluster)  # an open ledger with a missing replica is marked until it is closed
    await inspect(cluster, load.sent)
    await check_messages(cluster, load.sent)
    await forget(cluster, load.sent)


def is_after(text: str, at: float) -> bool:
    """Whether a message of the load was created after `at` (monotonic seconds)."""
    return int(text.split()[2]) > at * 1e9


async def new_ledger(client: LedgerClient, created: set[LedgerId]) -> bool:
    """Whether a ledger can be created, written and closed. `created`: ledgers of this and earlier attempts.

    The ledgers are deleted. The last one is closed as soon as two bookies have its entry, so its third replica may be
    missing; that of a failed writer would stay open, and marked, for ever.
    """
    try:
        writer = await client.create()
        created.add(writer.ledger_id)
        await writer.add(b"after")
        await writer.close()
        for ledger_id in sorted(created):
            await client.delete(ledger_id)
            created.discard(ledger_id)
    except BinderyError:
        return False
    return True


async def test_an_auditor_that_lost_its_leadership_writes_nothing(cluster: World) -> None:
    """The leader is stopped until a bookie counts as lost and another auditor is elected; then it continues."""
    async with cluster.client() as metadata, Load(cluster) as load:
        await load.grown_to(MIB)
        await metadata.marks.set_lost_bookie_delay_s(8)
        since_ms = int(time.time() * 1000)
        stale = await cluster.leader()
        victim = "bookie-3"
        cluster.end(victim)

        async def detected() -> bool:
            return any(e.kind == "bookie_absent" for e in await metadata.history(since_ms=since_ms))

        await until(detected, f"{stale} detects that {victim} is down", poll_s=0.1)
        with cluster.stopped(stale):

            async def taken_over() -> bool:
                leaders = [e for e in await metadata.history(since_ms=since_ms) if e.kind == "leader"]
                return bool(leaders) and leaders[-1].fields["name"] != stale

            took_s = await until(taken_over, "another auditor is the leader", poll_s=0.1)
            await asyncio.sleep(6)  # by the clock of the stopped auditor, the victim now counts as lost
            assert await metadata.marked() == []
        # The stopped auditor continues, but its vote no longer exists. The new leader marks nothing in its first 15 s.
        continued_ms = int(time.time() * 1000)
        others = [e for e in await metadata.history(since_ms=since_ms) if e.kind == "leader"]
        for _ in range(20):
            assert await metadata.marked() == [], "the stale auditor has marked ledgers"
            await asyncio.sleep(0.1)

        async def term_ended() -> bool:
            return "auditor_leadership_ended" in cluster.log(stale)

        await until(term_ended, "the stale auditor detects the end of its term", timeout_s=8)
        assert await metadata.marked() == []

        async def whole() -> bool:
            return await metadata.whole(victim)

        await until(whole, f"no ensemble contains {victim}", timeout_s=150)
        history = await metadata.history(since_ms=since_ms)
        assert [e.fields["name"] for e in history if e.kind == "leader"] == [others[-1].fields["name"]]
        lost = [e for e in history if e.kind == "bookie_lost"]
        assert len(lost) == 1
        assert lost[0].at_ms - others[-1].at_ms >= 15_000
        marks_by = {name: await marked_by(cluster, name) for name in ("auditor-0", "auditor-1")}
        say(
            f"{stale} stopped; {others[-1].fields['name']} was elected after {took_s:.1f} s; {stale} continued "
            f"{(continued_ms - since_ms) / 1000:.1f} s after the kill, wrote nothing, detected the end of its term; "
            f"marks by auditor: {marks_by}; loss recorded {(lost[0].at_ms - others[-1].at_ms) / 1000:.1f} s into the "
            f"new term"
        )
        assert marks_by[stale] == 0
        assert marks_by[str(others[-1].fields["name"])] > 0
    await inspect(cluster, load.sent, never=victim)
    await forget(cluster, load.sent)
    cluster.start(victim)
    await until(lambda: all_registered(cluster), "all bookies and auditors are registered")


async def marked_by(cluster: World, name: str) -> int:
    """Number of ledgers that this auditor marked, from its metrics."""
    number = int(name.rpartition("-")[2])
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        page = (await http.get(f"{cluster.cluster.auditor_url(number)}/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith("bindery_recovery_this_ledgers_marked_total{")]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


async def test_services_return_after_the_end_of_their_session(cluster: World) -> None:
    """A bookie, the leading auditor and the broker are each stopped for longer than their session."""
    layout = LedgersLayout()
    async with cluster.client() as metadata, Load(cluster) as load:
        await load.grown_to(MIB)
        await metadata.marks.set_lost_bookie_delay_s(60)

        async def without(path: str) -> bool:
            return await metadata.store.exists(path) is None

        registration = f"{layout.available}/bookie-1"
        with cluster.stopped("bookie-1"):
            gone_s = await until(lambda: without(registration), "the session of bookie-1 ends", poll_s=0.1)
        back_s = await until(lambda: all_registered(cluster), "bookie-1 is registered again")
        say(f"bookie-1: session ended after {gone_s:.1f} s, registered again {back_s:.1f} s after it continued")
        assert len(load.sent.refused) == 0

        leader = await cluster.leader()
        (vote, *_) = sorted(name for name in await metadata.store.children(layout.auditor_election) if "V_" in name)
        with cluster.stopped(leader):
            path = f"{layout.auditor_election}/{vote}"
            gone_s = await until(lambda: without(path), "the auditor's session ends", poll_s=0.1)
        back_s = await until(lambda: all_registered(cluster), f"{leader} is a candidate again")
        say(f"{leader}: session ended after {gone_s:.1f} s, candidate again {back_s:.1f} s after it continued")
        assert await cluster.leader() != leader

        pid = cluster.cluster.pid("broker-0")
        sessions = await session_ends(cluster)
        with cluster.stopped("broker-0"):
            await asyncio.sleep(4 + 3)
        continued_at = time.monotonic()

        async def written() -> bool:
            return any(is_after(text, continued_at) for text in list(load.sent.messages.values())[-50:])

        back_s = await until(written, "the broker accepts messages again", poll_s=0.1)
        await asyncio.sleep(2)
        say(
            f"broker-0: wrote again {back_s:.1f} s after it continued; {len(load.sent.refused)} requests failed "
            f"{[text for _, text in load.sent.refused][:1]}"
        )
        assert cluster.cluster.pid("broker-0") == pid, "the broker recovered without a restart"
        assert await session_ends(cluster) > sessions, "its session ended"
        assert back_s <= RESUME_S_MAX
    await inspect(cluster, load.sent)
    await check_messages(cluster, load.sent)
    await forget(cluster, load.sent)


async def session_ends(cluster: World) -> int:
    """Number of session ends in the broker's log."""
    return sum(facts["state"] == "lost" for facts in cluster.log_events("broker-0", "zookeeper_session"))
