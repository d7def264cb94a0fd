"""Send SIGKILL to all processes at once, ZooKeeper included, under load, ten times at random times.

After each restart: every acknowledged message exists, every message was sent by a client, no message id is used twice,
and no message is delivered again after its acknowledgement was confirmed. The outcome of a request without a response
is unknown: its messages may exist, but at most once, because these clients repeat no request.

`BINDERY_KILL_SEED=<seed>` repeats a run with the same kill times; the scheduling between them differs.
`BINDERY_KILL_ROUNDS=<n>` sets the number of rounds: docs/reliability.md records a long run.
"""

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import httpx
import pytest
from _pytest.cacheprovider import Cache
from forked_cluster import ForkedCluster

ROUNDS: Final = int(os.environ.get("BINDERY_KILL_ROUNDS", "10"))
LOAD_S_MIN: Final = 0.1
LOAD_S_MAX: Final = 1.0
START_KILL_SHARE: Final = 0.3
"""Share of the rounds in which the restart is killed too, at a random time in its first seconds."""
START_KILL_S_MAX: Final = 4.0
PRODUCERS: Final = 4
FIRST_ANSWER_TIMEOUT_S: Final = 60.0
SEED_KEY: Final = "bindery/kill_seed"
TOPIC: Final = "/v1/topics/public/default/killed"
SUBSCRIPTION: Final = f"{TOPIC}/subscriptions/reader"


@dataclass(slots=True)
class History:
    """The requests and responses that the clients recorded."""

    sent: set[str] = field(default_factory=set)
    """Payloads of all requests sent, with or without a response."""
    acknowledged: dict[str, str] = field(default_factory=dict)
    """Message id -> payload, from responses."""
    consumed: set[str] = field(default_factory=set)
    """Message ids whose acknowledgement was confirmed."""
    returned_consumed: list[str] = field(default_factory=list)
    """Acknowledged ids that were delivered again: must stay empty."""
    reused: list[str] = field(default_factory=list)
    """Ids in two responses: must stay empty."""

    def note_answer(self, answer: httpx.Response, payloads: list[str]) -> None:
        """Record a response. 200: an id for each message; 207: an id or an error for each; others: outcome unknown."""
        if answer.status_code == 200:
            ids = answer.json()["message_ids"]
        elif answer.status_code == 207:
            ids = [result.get("message_id") for result in answer.json()["results"]]
        else:
            return
        for message_id, payload in zip(ids, payloads, strict=True):
            if message_id is None:
                continue
            if message_id in self.acknowledged:
                self.reused.append(message_id)
            self.acknowledged[message_id] = payload


async def produce(http: httpx.AsyncClient, history: History, names: Iterator[str], rng: random.Random) -> None:
    """Send requests of one or a few messages until the cluster is killed."""
    while True:
        payloads = [f"{next(names)}-{'x' * rng.randrange(600)}" for _ in range(rng.choice([1, 1, 5, 20]))]
        history.sent.update(payloads)
        if len(payloads) == 1:
            content, kind = payloads[0], "text/plain"
        else:
            content, kind = "\n".join(f'{{"payload": "{payload}"}}' for payload in payloads), "application/x-ndjson"
        answer = await http.post(f"{TOPIC}/messages", content=content, headers={"content-type": kind})
        history.note_answer(answer, payloads)
        if answer.status_code != 200:
            await asyncio.sleep(0.05)


async def consume(http: httpx.AsyncClient, history: History) -> None:
    while True:
        body = {"consumer": "c", "type": "exclusive", "initial": "earliest", "max": 50, "wait_ms": 500}
        answer = await http.post(f"{SUBSCRIPTION}/receive", json=body)
        messages = answer.json()["messages"] if answer.status_code == 200 else []
        ids = [message["message_id"] for message in messages]
        history.returned_consumed += [message_id for message_id in ids if message_id in history.consumed]
        if not ids:
            await asyncio.sleep(0.05)
        elif (await http.post(f"{SUBSCRIPTION}/ack", json={"message_ids": ids})).status_code == 200:
            history.consumed.update(ids)


async def load_until_killed(cluster: ForkedCluster, history: History, *, number: int, rng: random.Random) -> None:
    """Run the clients. After the first responses, wait for a random time, then kill all processes."""
    counter = itertools.count()
    names = (f"{number}:{i}" for i in counter)
    before = len(history.acknowledged)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=30, trust_env=False) as http:

        async def until_it_dies(client: Any) -> None:
            with contextlib.suppress(httpx.HTTPError):
                await client

        seeds = [rng.getrandbits(32) for _ in range(PRODUCERS)]
        tasks = [
            asyncio.create_task(until_it_dies(produce(http, history, names, random.Random(seed)))) for seed in seeds
        ]
        tasks.append(asyncio.create_task(until_it_dies(consume(http, history))))
        delay_s = rng.uniform(LOAD_S_MIN, LOAD_S_MAX)
        async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
            while len(history.acknowledged) == before:
                await asyncio.sleep(0.005)
        await asyncio.sleep(delay_s)
        await asyncio.to_thread(cluster.kill_all)
        await asyncio.wait(tasks, timeout=15)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        # Each client suppresses the errors of a killed cluster; any other error is a defect of the test or the broker.
        for result in results:
            if isinstance(result, Exception):
                raise result


def read_from(url: str, start: str) -> tuple[list[tuple[str, str]], str]:
    """Return (id, payload) of every message from `start` on, and the position at which to continue."""
    found: list[tuple[str, str]] = []
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
        while True:
            answer = http.get(f"{TOPIC}/messages", params={"start": start, "max": 1000})
            assert answer.status_code == 200, answer.text
            body = answer.json()
            if not body["messages"]:
                return found, start
            found += [(message["message_id"], message["payload"]) for message in body["messages"]]
            start = body["next"]


def check(history: History, stored: list[tuple[str, str]], *, acknowledged: dict[str, str], where: str) -> None:
    ids = [message_id for message_id, _ in stored]
    payloads = [payload for _, payload in stored]
    by_id = dict(stored)
    assert len(ids) == len(set(ids)), f"{where}: a message id stands for two messages"
    assert not history.reused, f"{where}: an id was given out twice: {history.reused[:3]}"
    lost = [message_id for message_id, payload in acknowledged.items() if by_id.get(message_id) != payload]
    assert not lost, f"{where}: acknowledged and not there as sent: {len(lost)}, for example {lost[:3]}"
    invented = [payload for payload in payloads if payload not in history.sent]
    assert not invented, f"{where}: no client sent {invented[:3]}"
    assert len(payloads) == len(set(payloads)), f"{where}: a message that was sent once is there twice"
    assert not history.returned_consumed, (
        f"{where}: acknowledged by the consumer and delivered again: {history.returned_consumed[:3]}"
    )


@pytest.mark.long_run
@pytest.mark.integration
@pytest.mark.timeout(300 + 60 * ROUNDS)
def test_no_acknowledged_message_is_lost_when_all_processes_are_killed_at_once(pytestconfig: pytest.Config) -> None:
    with kept_seed(pytestconfig) as seed:
        kill_and_check(seed)


@contextlib.contextmanager
def kept_seed(config: pytest.Config) -> Iterator[int]:
    """Yield BINDERY_KILL_SEED, the seed of the last run if that failed, or a new one. A repeat uses the same seed."""
    cache = config.cache
    assert cache is not None
    seed = int(os.environ.get("BINDERY_KILL_SEED") or cache.get(SEED_KEY, None) or secrets.randbelow(10**6) + 1)
    print(f"BINDERY_KILL_SEED={seed}")
    cache.set(SEED_KEY, seed)
    yield seed
    cache.set(SEED_KEY, None)


def kill_and_check(seed: int) -> None:
    rng = random.Random(seed)
    history = History()
    start, verified = "earliest", 0
    with ForkedCluster(bookies=3) as cluster:
        # A second subscription without acknowledgements retains all messages for the check.
        answer = httpx.put(f"{cluster.url}{TOPIC}/subscriptions/keeper", json={"initial": "earliest"}, trust_env=False)
        assert answer.status_code in (200, 201), answer.text
        for number in range(ROUNDS):
            before = dict(history.acknowledged)
            asyncio.run(load_until_killed(cluster, history, number=number, rng=rng))
            if rng.random() < START_KILL_SHARE:
                cluster.launch()
                time.sleep(rng.uniform(0.2, START_KILL_S_MAX))
                cluster.kill_all()
                print(f"round {number}: killed while it started", flush=True)
            took_s = cluster.start()
            stored, start = read_from(cluster.url, start)
            new = {message_id: p for message_id, p in history.acknowledged.items() if message_id not in before}
            where = f"round {number}, replay with BINDERY_KILL_SEED={seed}"
            check(history, stored, acknowledged=new, where=where)
            verified += len(new)
            print(
                f"round {number}: {len(new)} acknowledged, {len(stored)} stored, back after {took_s:.1f} s", flush=True
            )
        stored, _ = read_from(cluster.url, "earliest")
        check(history, stored, acknowledged=history.acknowledged, where=f"at the end, BINDERY_KILL_SEED={seed}")
    assert verified >= ROUNDS, "too few messages were verified"
    assert history.consumed, "nothing was consumed"


def test_a_repeat_after_a_failure_uses_the_same_seed(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BINDERY_KILL_SEED", raising=False)
    cache = Cache.for_config(pytestconfig, _ispytest=True)
    cache._cachedir = tmp_path
    config: Any = SimpleNamespace(cache=cache)
    with pytest.raises(ValueError, match="lost"), kept_seed(config) as first:
        raise ValueError("lost")
    with kept_seed(config) as repeated:
        assert repeated == first
    assert cache.get(SEED_KEY, None) is None, "after a success the next run draws a new seed"


def test_an_error_of_a_client_fails_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(http: httpx.AsyncClient, history: History) -> None:
        raise KeyError("messages")

    async def send(http: httpx.AsyncClient, history: History, names: Iterator[str], rng: random.Random) -> None:
        history.acknowledged["0:0"] = "a"

    monkeypatch.setitem(globals(), "consume", fail)
    monkeypatch.setitem(globals(), "produce", send)
    cluster: Any = SimpleNamespace(url="http://127.0.0.1:1", kill_all=lambda: None)
    with pytest.raises(KeyError, match="messages"):
        asyncio.run(load_until_killed(cluster, History(), number=0, rng=random.Random(1)))


def good_history() -> tuple[History, list[tuple[str, str]]]:
    history = History(sent={"a", "b", "unknown"}, acknowledged={"0:0": "a", "0:1": "b"})
    return history, [("0:0", "a"), ("0:1", "b"), ("0:2", "unknown")]


def judge(history: History, stored: list[tuple[str, str]]) -> None:
    check(history, stored, acknowledged=history.acknowledged, where="here")


def test_the_check_accepts_a_correct_history() -> None:
    judge(*good_history())


@pytest.mark.parametrize(
    ("stored", "complaint"),
    [
        ([("0:0", "a")], "acknowledged and not there"),
        ([("0:0", "a"), ("0:1", "unknown")], "acknowledged and not there"),
        ([("0:0", "a"), ("0:1", "b"), ("0:2", "c")], "no client sent"),
        ([("0:0", "a"), ("0:1", "b"), ("0:1", "unknown")], "stands for two"),
        ([("0:0", "a"), ("0:1", "b"), ("1:0", "b")], "there twice"),
    ],
    ids=["lost", "replaced", "invented", "one id twice", "doubled"],
)
def test_the_check_detects_each_broken_guarantee(stored: list[tuple[str, str]], complaint: str) -> None:
    history, _ = good_history()
    with pytest.raises(AssertionError, match=complaint):
        judge(history, stored)


def test_the_check_detects_a_reused_id_and_a_lost_acknowledgement() -> None:
    history, stored = good_history()
    history.note_answer(httpx.Response(200, json={"message_ids": ["0:1"]}), ["b"])
    with pytest.raises(AssertionError, match="given out twice"):
        judge(history, stored)
    history, stored = good_history()
    history.returned_consumed.append("0:0")
    with pytest.raises(AssertionError, match="delivered again"):
        judge(history, stored)
