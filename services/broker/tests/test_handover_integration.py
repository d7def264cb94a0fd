"""Three broker processes under load: a rolling restart fails no call, a late owner acknowledges nothing."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bindery.standalone.plan import SESSION_TIMEOUT_S
from bindery.standalone.throwaway import ThrowawayCluster
from handover_traffic import AWAY_S, Traffic

pytestmark = pytest.mark.integration

BROKERS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[ThrowawayCluster]:
    with ThrowawayCluster(bookies=3, brokers=BROKERS) as running:
        yield running


def urls(cluster: ThrowawayCluster) -> list[str]:
    return [cluster.broker_url(number) for number in range(BROKERS)]


async def until_ready(cluster: ThrowawayCluster, number: int, *, since: int) -> None:
    """Return once the supervisor has started the broker again, and it serves."""
    async with asyncio.timeout(AWAY_S), httpx.AsyncClient(trust_env=False) as http:
        while True:
            if cluster.has_restarted(f"broker-{number}", since=since):
                try:
                    if (await http.get(f"{cluster.broker_url(number)}/readyz")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
            await asyncio.sleep(0.1)


async def owner(cluster: ThrowawayCluster, topic: str) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        ends_at = time.monotonic() + AWAY_S
        while True:
            for url in urls(cluster):
                try:
                    answer = await http.get(f"{url}{topic}")
                except httpx.HTTPError:
                    continue
                if answer.status_code == 200:
                    return urls(cluster).index(answer.json()["owner"])
            assert time.monotonic() < ends_at
            await asyncio.sleep(0.1)


async def test_a_rolling_restart_fails_no_call_and_loses_nothing(cluster):
    async with Traffic(urls(cluster), topics=6, producers=8, consumers=12, pause_s=0.05) as traffic:
        await asyncio.sleep(2)
        for number in range(BROKERS):
            pid = cluster.pid(f"broker-{number}")
            os.kill(pid, signal.SIGTERM)
            await until_ready(cluster, number, since=pid)
        await asyncio.sleep(1)
    assert traffic.seen.problems() == []
    assert min(traffic.seen.sent.values()) > 10


async def test_a_drained_broker_passes_everything_on_and_gets_bundles_again_later(cluster):
    async with Traffic(urls(cluster), topics=4, producers=4, consumers=4, pause_s=0.05, name="drained") as traffic:
        number = await owner(cluster, traffic.topics[0])
        name = cluster.broker_url(number).removeprefix("http://")
        other = cluster.broker_url((number + 1) % BROKERS)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            assert (await http.post(f"{other}/v1/brokers/{name}/drain", json={})).status_code == 200
            async with asyncio.timeout(AWAY_S):
                while (await http.get(f"{other}/v1/brokers/{name}/drain")).json()["state"] != "drained":
                    await asyncio.sleep(0.05)
            assert (await http.get(f"{cluster.broker_url(number)}/readyz")).status_code == 503
            assert await owner(cluster, traffic.topics[0]) != number
            answer = await http.post(f"{other}/v1/brokers/{name}/undrain", json={})
            assert answer.json()["state"] == "active"
            assert (await http.get(f"{cluster.broker_url(number)}/readyz")).status_code == 200
    assert traffic.seen.problems() == []


async def test_a_stopped_broker_ends_the_streams_that_it_passes_on_with_an_event(cluster):
    topic = "/v1/topics/public/default/streamed"
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        assert (await http.post(f"{cluster.broker_url(0)}{topic}/messages", content=b"first")).status_code == 200
        number = (await owner(cluster, topic) + 1) % BROKERS
        url, pid = cluster.broker_url(number), cluster.pid(f"broker-{number}")
        assert (await http.put(f"{url}{topic}/subscriptions/s", json={"initial": "earliest"})).status_code == 201
        events = b""
        async with http.stream("GET", f"{url}{topic}/subscriptions/s/stream?consumer=c") as stream:
            async for chunk in stream.aiter_raw():
                events += chunk
                if b"event: message" in events and pid:
                    os.kill(pid, signal.SIGTERM)
                    stopped, pid = pid, 0
        assert events.rstrip().splitlines()[-2] == b"event: moved"
        assert events.count(b"event: message") == 1
        await until_ready(cluster, number, since=stopped)


async def test_a_killed_broker_is_replaced_soon_after_its_session_has_ended(cluster):
    """Requests keep arriving meanwhile. The limit leaves a machine with much load some time beside the session's."""
    async with Traffic(
        urls(cluster), topics=2, producers=4, consumers=4, pause_s=0.05, is_patient=True, name="killed"
    ) as traffic:
        await asyncio.sleep(1)
        number = await owner(cluster, traffic.topics[0])
        killed_at = time.monotonic()
        pid = cluster.kill(f"broker-{number}")
        async with asyncio.timeout(AWAY_S):
            while not any(at > killed_at + 0.1 for at in traffic.seen.stored_at[traffic.topics[0]]):
                await asyncio.sleep(0.02)
        gap_s = time.monotonic() - killed_at
        await until_ready(cluster, number, since=pid)
    assert traffic.seen.problems() == []
    assert gap_s < SESSION_TIMEOUT_S + 20
    print(f"served again after {gap_s:.2f} s; session timeout {SESSION_TIMEOUT_S} s")


async def test_a_broker_that_was_paused_acknowledges_nothing_when_it_wakes_up(cluster):
    """Its bundle has another owner then. The request that it had received before, and those that come now, are not
    answered as stored by it: they fail, or the new owner stores them."""
    topic = "/v1/topics/public/default/paused"
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        assert (await http.put(f"{cluster.broker_url()}{topic}", json={})).status_code < 300
        number = await owner(cluster, topic)
        stale, other = cluster.broker_url(number), cluster.broker_url((number + 1) % BROKERS)
        before = await http.post(f"{stale}{topic}/messages", content=b"before")
        assert before.status_code == 200
        pid = cluster.pid(f"broker-{number}")
        os.kill(pid, signal.SIGSTOP)
        try:
            late = [asyncio.create_task(http.post(f"{stale}{topic}/messages", content=b"late")) for _ in range(3)]
            ends_at = time.monotonic() + AWAY_S
            while True:  # the session of the paused broker ends
                try:
                    answer = await http.post(f"{other}{topic}/messages", content=b"after", timeout=5)
                    if answer.status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                assert time.monotonic() < ends_at
                await asyncio.sleep(0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        answers = [
            one for one in await asyncio.gather(*late, return_exceptions=True) if isinstance(one, httpx.Response)
        ]
        answered = [one.json()["message_ids"][0] for one in answers if one.status_code == 200]
        stored: list[tuple[str, str]] = []
        start = "earliest"
        while page := (await http.get(f"{other}{topic}/messages?max=1000&start={start}")).json():
            if not page["messages"]:
                break
            stored += [(message["message_id"], message["payload"]) for message in page["messages"]]
            start = page["next"]
        assert [payload for _, payload in stored[:1]] == ["before"]
        assert "after" in [payload for _, payload in stored]
        ledger = before.json()["message_ids"][0].partition(":")[0]
        for message_id in answered:
            assert (message_id, "late") in stored, "acknowledged, and lost"
            assert message_id.partition(":")[0] != ledger, "acknowledged by the stale owner, in its ledger"
        assert Path(f"/proc/{pid}").exists(), "it has woken up and goes on"
        assert (await http.post(f"{stale}{topic}/messages", content=b"passed on")).status_code == 200
