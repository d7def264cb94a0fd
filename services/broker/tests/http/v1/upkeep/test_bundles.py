"""Splits of bundles: over `/v1` and Pulsar's API, with two brokers, failures at each step, and messages meanwhile."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from bindery_broker.ownership import divisions as divisions_module
from bindery_broker.ownership import holds
from bindery_broker.ownership.bundles import Bundle, bundles_of
from bindery_core.errors import MetadataOutcomeUnknown, MetadataUnavailable
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Harness, make_namespaces, payloads, problem, settle

NAME = TopicName.parse("public/default/t")
BUNDLE = Bundle.of(NAME)
MIDDLE = BUNDLE.lower + (BUNDLE.upper - BUNDLE.lower) // 2
PARTS = BUNDLE.parts((MIDDLE,))
MINE = Bundle.of(NAME, (0, *(part.lower for part in PARTS), BUNDLE.upper, 2**32 - 1))
SPACE = "/v1/namespaces/public/default"
ADMIN = "/admin/v2/namespaces/public/default"
LOCAL = "/admin/local-policies/public/default"
POLICIES = "/admin/policies/public/default"
TOPICS = [f"/v1/topics/public/default/x{number}" for number in range(40)]
JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "RELEASE_RETRY_S", 0.001)
    monkeypatch.setattr(divisions_module, "RELEASE_RETRY_S", 0.001)


async def split(harness: Harness, bundle: str = BUNDLE.name, **fields: Any) -> list[str]:
    answer = await harness.post(f"{SPACE}/split", {"bundle": bundle, **fields})
    assert answer.status_code == 200, answer.text
    parts: list[str] = answer.json()["parts"]
    return parts


async def listed(harness: Harness) -> dict[str, Any]:
    answer = await harness.client.get(f"{SPACE}/bundles")
    assert answer.status_code == 200, answer.text
    return {one["bundle"]: one["owner"] for one in answer.json()["bundles"]}


def stored(harness: Harness, path: str = LOCAL) -> list[str]:
    found: list[str] = json.loads(harness.znodes()[path][0])["bundles"]["boundaries"]
    return found


def owner_nodes(harness: Harness) -> set[str]:
    prefix = "/namespace/public/default/"
    return {path.removeprefix(prefix) for path in harness.znodes() if path.startswith(prefix)}


def test_the_topic_of_the_tests_lies_in_a_part():
    assert MINE in PARTS


async def test_topics_stay_open_and_served_while_their_bundle_is_split(pair):
    one, two = pair
    await one.client.put(f"{TOPIC}/subscriptions/s")
    await one.produce("a")
    await two.produce("b")  # passed on
    (topic,) = one.broker.topics
    await one.client.put(f"{TOPIC}/subscriptions/later", json={"initial": "latest"})
    waiting = asyncio.create_task(two.receive(max=1, wait_ms=30_000, consumer="late", sub="later"))
    await settle()
    assert await split(one) == [part.name for part in PARTS]
    assert set(one.broker.ownership.held) == set(PARTS)
    assert owner_nodes(one) == {part.name for part in PARTS}
    assert stored(one) == stored(one, POLICIES)
    assert len(stored(one)) == 6
    assert list(one.broker.topics) == [topic]
    assert topic.is_open
    await two.produce("c")
    assert payloads(await waiting) == ["c"]
    await one.produce("d")
    assert payloads(await two.receive()) == ["a", "b", "c", "d"]
    assert len(await listed(two)) == 5
    assert (await listed(two))[MINE.name] == "http://one"
    assert (await two.client.get(SPACE)).json()["bundles"] == 5


async def test_the_parts_can_go_to_different_brokers(pair):
    one, two = pair
    for topic in TOPICS:
        await one.produce("a", topic=topic)
    await split(two, "LARGEST", algorithm="topic_count_equally_divide")
    parts = [name for name, owner in (await listed(one)).items() if owner == "http://one"]
    assert len(parts) == 5
    answer = await two.post(f"{SPACE}/unload", {}, params={"bundle": parts[0]})
    assert answer.status_code == 200
    for topic in TOPICS:
        await two.produce("b", topic=topic)
        found = (await one.client.get(f"{topic}/messages")).json()["messages"]
        assert payloads(found) == ["a", "b"]
    owners = await listed(one)
    assert owners[parts[0]] == "http://two"
    assert set(owners.values()) == {"http://one", "http://two"}


async def test_parts_are_unloaded_if_that_is_asked_for(pair):
    one, two = pair
    await one.produce("a")
    assert await split(two, unload=True) == [part.name for part in PARTS]
    assert one.broker.ownership.held == []
    assert owner_nodes(one) == set()
    await two.produce("b")
    assert two.broker.ownership.held == [MINE]
    assert payloads((await one.client.get(f"{TOPIC}/messages")).json()["messages"]) == ["a", "b"]


async def test_a_bundle_without_owner_is_taken_to_split_it(pair):
    one, two = pair
    assert len(await split(one)) == 2
    assert set(one.broker.ownership.held) == set(PARTS)
    assert await split(two, PARTS[0].name) == [
        part.name for part in PARTS[0].parts(((PARTS[0].lower + PARTS[0].upper) // 2,))
    ]
    assert two.broker.ownership.held == []


async def test_a_split_ledger_stays_with_its_broker(pair):
    """Recovery closes the open ledger; the broker must see that it still owns the topic, by the part of its bundle."""
    one, _ = pair
    await one.produce("a")
    (topic,) = one.broker.topics
    proof = one.broker.ownership.proof(NAME)
    assert proof is not None
    await split(one)
    assert await proof()
    await split(one, MINE.name)
    assert await proof()
    for ledger_id in await one.broker.topics.ledger_ids(NAME):
        await one.broker.topics.client.open(ledger_id, recover=True)
    await one.produce("b")
    assert list(one.broker.topics) == [topic]
    assert topic.is_open
    assert payloads((await one.client.get(f"{TOPIC}/messages")).json()["messages"]) == ["a", "b"]
    (held,) = (part for part in one.broker.ownership.held if part.contains(NAME))
    await one.store.delete(held.owner_path, version=None)
    assert not await proof()


async def test_splits_of_several_brokers_follow_one_another(pair):
    one, two = pair
    for harness in pair:
        for topic in TOPICS:
            await harness.produce("a", topic=topic)
        await harness.post(f"{SPACE}/unload", {}, params={"bundle": "0x00000000_0x40000000"})
        await two.produce("b", topic=next(t for t in TOPICS if _of(t).lower == 0))
    owners = await listed(one)
    assert set(owners.values()) == {"http://one", "http://two"}
    answers = await asyncio.gather(*(split(pair[number % 2], name) for number, name in enumerate(owners)))
    assert sorted(part for parts in answers for part in parts) == sorted(await listed(one))
    assert len(stored(one)) == 9
    assert stored(one, POLICIES) == stored(one)
    assert set((await listed(two)).values()) == {"http://one", "http://two"}
    assert len(owner_nodes(one)) == 8


def _of(topic: str) -> Bundle:
    return Bundle.of(TopicName.parse(topic.removeprefix("/v1/topics/")))


async def test_only_one_of_two_splits_of_a_bundle_is_done(pair):
    one, two = pair
    await one.produce("a")
    answers = await asyncio.gather(*(harness.post(f"{SPACE}/split", {"bundle": BUNDLE.name}) for harness in pair))
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses[0] == 200
    assert statuses[1] in (200, 400, 409, 503), answers
    assert len(stored(one)) == 6
    assert set(one.broker.ownership.held) == set(PARTS)
    await two.produce("b")


@pytest.mark.parametrize("unload", [False, True])
async def test_messages_that_are_stored_during_splits_are_neither_lost_nor_reordered(pair, unload):
    """Without an unload no request fails. During an unload those at the other broker may have to be repeated."""
    one, two = pair
    await one.client.put(f"{TOPIC}/subscriptions/s")
    stop = asyncio.Event()
    sent: dict[str, list[str]] = {"one": [], "two": []}

    async def produce(harness: Harness, name: str) -> None:
        while not stop.is_set():
            message = f"{name}-{len(sent[name])}"
            while True:
                answer = await harness.client.post(f"{TOPIC}/messages", content=message.encode())
                if answer.status_code == 200:
                    break
                assert unload
                assert problem(answer, status=503, code="not_owner")
                await asyncio.sleep(0)
            sent[name].append(message)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(produce(harness, name)) for harness, name in ((one, "one"), (two, "two"))]
    for number in range(8):
        name = next(name for name in await listed(two) if _contains(name))
        await split(pair[number % 2], name, unload=unload)
    stop.set()
    await asyncio.gather(*tasks)
    got: list[str] = []
    while some := payloads(await two.receive(max=1000)):
        got += some
    assert len(got) == len(set(got))
    for name, messages in sent.items():
        assert [message for message in got if message.startswith(name)] == messages
        assert len(messages) > 10
    assert len(stored(one)) == 5 + 8


def _contains(bundle: str) -> bool:
    lower, upper = (int(text, 16) for text in bundle.split("_"))
    return Bundle("public", "default", lower, upper).contains(NAME)


class Writes:
    """Stops a broker at its n-th write to the metadata store, before or after the write is done."""

    def __init__(self, harness: Harness, stop_at: int, *, is_done: bool) -> None:
        self._left, self._is_done = stop_at, is_done
        self.stopped = asyncio.Event()
        for name in ("create", "set", "multi"):
            setattr(harness.store, name, self._wrapped(getattr(harness.store, name)))

    def _wrapped(self, really: Any) -> Any:
        async def write(*args: Any, **kwargs: Any) -> Any:
            self._left -= "make_parents" not in kwargs  # with it, `create` calls itself without
            if self._left == 0 and self._is_done and not self.stopped.is_set():
                await really(*args, **kwargs)
            if self._left <= 0:
                self.stopped.set()
                await asyncio.Event().wait()
            return await really(*args, **kwargs)

        return write


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("step", range(1, 7))
async def test_a_broker_that_dies_during_a_split_leaves_a_valid_division(pair, step, is_done):
    """Two nodes of parts, the boundaries, the node of the bundle, the policies: each may be the last write."""
    one, two = pair
    await one.client.put(f"{TOPIC}/subscriptions/s")
    await one.produce("a", "b")
    await two.store.create(LOCAL.rpartition("/")[0], b"", make_parents=True)
    writes = Writes(one, step, is_done=is_done)
    asked = asyncio.create_task(one.post(f"{SPACE}/split", {"bundle": BUNDLE.name}))
    stopped = asyncio.create_task(writes.stopped.wait())
    await asyncio.wait([asked, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    is_whole = step > 5
    assert asked.done() == is_whole
    del one.store.create, one.store.set, one.store.multi  # type: ignore[attr-defined]
    one.tree.expire(one.store)
    await settle()
    for topic in one.broker.topics:
        topic.abandon("killed")
    is_split = LOCAL in one.znodes()
    assert is_split == ((step, is_done) >= (3, True))
    assert owner_nodes(two) == set()
    await two.produce("c")
    assert payloads(await two.receive()) == ["a", "b", "c"]
    assert two.broker.ownership.held == [MINE if is_split else BUNDLE]
    if not is_split:
        assert await split(two) == [part.name for part in PARTS]
    assert await split(two, MINE.name) == [part.name for part in MINE.parts(((MINE.lower + MINE.upper) // 2,))]
    assert stored(two) == stored(two, POLICIES)
    await two.produce("d")
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize("is_done", [False, True])
async def test_an_unknown_outcome_is_found_out(pair, monkeypatch, is_done):
    one, two = pair
    await one.produce("a")
    create, failures = one.store.create, iter([MetadataOutcomeUnknown("made up")])

    async def lossy(path: str, *args: Any, **kwargs: Any) -> None:
        for error in failures if path == LOCAL else ():
            if is_done:
                await create(path, *args, **kwargs)
            one.store.fail_next(MetadataUnavailable("made up"))
            raise error
        await create(path, *args, **kwargs)

    monkeypatch.setattr(one.store, "create", lossy)
    assert await split(one) == [part.name for part in PARTS]
    assert owner_nodes(two) == {part.name for part in PARTS}
    await two.produce("b")
    assert len(list(one.broker.topics)) == 1


async def test_a_split_that_fails_leaves_everything_as_it_was(pair, monkeypatch):
    one, two = pair
    await one.produce("a")
    get = one.store.get

    async def failing(path: str, **kwargs: Any) -> Any:
        if path == LOCAL and len(owner_nodes(one)) == 3:
            raise MetadataUnavailable("made up")
        return await get(path, **kwargs)

    monkeypatch.setattr(one.store, "get", failing)
    answer = await one.post(f"{SPACE}/split", {"bundle": BUNDLE.name})
    problem(answer, status=503, code="metadata_unavailable")
    assert owner_nodes(one) == {BUNDLE.name}
    assert one.broker.ownership.held == [BUNDLE]
    monkeypatch.undo()
    await two.store.create(PARTS[1].owner_path, b'{"httpUrl": "http://two"}', ephemeral=True)
    problem(await one.post(f"{SPACE}/split", {"bundle": BUNDLE.name}), status=503, code="not_owner")
    assert owner_nodes(one) == {BUNDLE.name, PARTS[1].name}
    assert LOCAL not in one.znodes()
    await two.store.delete(PARTS[1].owner_path, version=None)
    assert len(await split(two)) == 2


async def test_members_of_pulsar_are_kept(pair):
    one, _ = pair
    record = {"bundles": None, "bookieAffinityGroup": {"bookkeeperAffinityGroupPrimary": "g"}, "x": 1}
    await one.store.create(LOCAL, json.dumps(record).encode(), make_parents=True)
    await split(one)
    found = json.loads(one.znodes()[LOCAL][0])
    assert {name: found[name] for name in ("bookieAffinityGroup", "x")} == {
        "bookieAffinityGroup": {"bookkeeperAffinityGroupPrimary": "g"},
        "x": 1,
    }
    assert found["bundles"]["numBundles"] == 5


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"bundle": "0x00000000_0x80000000"}, 400),
        ({"bundle": "LARGEST"}, 400),
        ({"bundle": "HOT"}, 400),
        ({"bundle": BUNDLE.name, "algorithm": "flow_or_qps_equally_divide"}, 400),
        ({"bundle": BUNDLE.name, "algorithm": "specified_positions_divide"}, 400),
        ({"bundle": BUNDLE.name, "positions": [2**32]}, 400),
        ({"bundle": BUNDLE.name, "positions": [-1]}, 400),
    ],
)
async def test_requests_that_split_nothing_are_refused(pair, body, status):
    one, _ = pair
    assert (await one.post(f"{SPACE}/split", body)).status_code == status
    assert LOCAL not in one.znodes()
    assert one.broker.ownership.held == []


async def test_a_split_needs_the_content_type_of_json(pair):
    one, _ = pair
    body = json.dumps({"bundle": BUNDLE.name})
    answer = await one.client.post(f"{SPACE}/split", content=body, headers={"content-type": "text/plain"})
    problem(answer, status=415, code="unsupported_media_type")
    assert LOCAL not in one.znodes()


async def test_a_namespace_that_is_missing_or_being_deleted_is_not_split(pair, tree):
    one, _ = pair
    make_namespaces(tree, "public/gone", deleted=True)
    body = {"bundle": BUNDLE.name}
    problem(await one.post("/v1/namespaces/public/none/split", body), status=404, code="no_such_namespace")
    problem(await one.post("/v1/namespaces/public/gone/split", body), status=409, code="conflict")
    problem(await one.client.get("/v1/namespaces/public/none/bundles"), status=404, code="no_such_namespace")


async def test_a_namespace_has_no_more_bundles_than_the_maximum(pair, monkeypatch):
    monkeypatch.setattr(divisions_module, "BUNDLES_MAX", 20)
    one, _ = pair
    for topic in ("t", "x1", "x3", "x7"):
        await one.produce("a", topic=f"/v1/topics/public/default/{topic}")
    bundle = (await one.client.get(f"{SPACE}/bundles")).json()["bundles"]
    assert sum(found["topics"] for found in bundle) == 4
    busy = next(found["bundle"] for found in bundle if found["topics"] > 1)
    lower = int(busy.split("_")[0], 16)
    positions = [lower + 1 + number for number in range(20)]
    body = {"bundle": busy, "algorithm": "specified_positions_divide", "positions": positions}
    answer = await one.post(f"{SPACE}/split", body)
    assert "at most" in problem(answer, status=400, code="bad_request")["detail"]
    assert LOCAL not in one.znodes()
    body["positions"] = positions[:16]
    assert len((await one.post(f"{SPACE}/split", body)).json()["parts"]) == 17


# -- Pulsar's call and Pulsar's brokers ---


@pytest.mark.parametrize("query", ["", "?unload=false&splitAlgorithmName=range_equally_divide", "?unload=true"])
async def test_pulsars_call_splits_as_well(pair, query):
    one, two = pair
    await one.produce("a")
    answer = await two.client.put(f"{ADMIN}/{BUNDLE.name}/split{query}", content=b"", headers=JSON)
    assert (answer.status_code, answer.content) == (204, b"")
    assert set(one.broker.ownership.held) == (set() if "unload=true" in query else set(PARTS))
    assert (await two.client.get(f"{ADMIN}/bundles")).json() == {"boundaries": stored(one), "numBundles": 5}
    assert (await two.client.get(ADMIN)).json()["bundles"]["numBundles"] == 5


async def test_pulsars_call_splits_at_positions(pair):
    one, _ = pair
    await one.produce("a")
    path = f"{ADMIN}/{BUNDLE.name}/split?splitAlgorithmName=specified_positions_divide"
    positions = f"[{BUNDLE.lower + 1}, {BUNDLE.lower + 2}]"
    assert (await one.client.put(path, content=positions, headers=JSON)).status_code == 204
    assert LOCAL not in one.znodes()  # one topic
    for topic in TOPICS:
        await one.produce("a", topic=topic)
    assert (await one.client.put(path, content=positions, headers=JSON)).status_code == 204
    assert len(stored(one)) == 7
    assert (await one.client.put(f"{ADMIN}/LARGEST/split", headers=JSON)).status_code == 204
    assert len(stored(one)) == 8


async def test_the_bundle_with_the_greatest_load_is_split_at_its_owner(pair):
    """The owner reports its load; the broker that is asked reads the report."""
    one, two = pair
    bundles: dict[str, list[str]] = {}
    for number in range(40):
        topic = f"/v1/topics/public/default/h{number}"
        await one.produce("a", topic=topic)
        bundles.setdefault(Bundle.of(TopicName.parse(f"public/default/h{number}")).name, []).append(topic)
    busy = max(sorted(bundles), key=lambda name: len(bundles[name]))
    quiet = min(sorted(bundles), key=lambda name: len(bundles[name]))
    for _ in range(40):
        await one.produce("b" * 1_000, topic=bundles[quiet][0])
    assert busy != quiet
    await one.broker.balancing.report()
    await one.broker.balancing.registration.register()
    one.clock.advance(10)
    await one.broker.balancing.report()
    assert one.broker.balancing.hottest("public", "default") == quiet
    two.broker.balancing.brokers.start()
    while two.broker.balancing.hottest("public", "default") is None:
        await asyncio.sleep(0)
    assert (await two.client.put(f"{ADMIN}/HOT/split", headers=JSON)).status_code == 204
    assert quiet not in await listed(one)
    assert busy in await listed(one)
    await two.broker.balancing.brokers.close()


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("public/none/0x00000000_0x40000000/split", 404, "Namespace not found"),
        ("public/default/0x00000000/split", 412, "Invalid bundle range: 0x00000000"),
        (
            "public/default/0x00000001_0x40000000/split",
            412,
            "Cannot find bundle public/default/0x00000001_0x40000000 in the bundles list",
        ),
        (
            f"public/default/{BUNDLE.name}/split?splitAlgorithmName=specified_positions_divide",
            412,
            "With specified_positions_divide split algorithm, splitBoundaries must not be empty",
        ),
        (
            f"public/default/{BUNDLE.name}/split?splitAlgorithmName=x",
            412,
            "Unsupported namespace bundle split algorithm, supported algorithms are "
            "[range_equally_divide, topic_count_equally_divide, specified_positions_divide]",
        ),
        ("public/default/LARGEST/split", 404, "Bundle range LARGEST not found"),
        ("public/default/HOT/split", 404, "Bundle range HOT not found"),
    ],
)
async def test_pulsars_calls_are_refused_as_pulsar_does(pair, path, status, reason):
    one, _ = pair
    answer = await one.client.put(f"/admin/v2/namespaces/{path}", headers=JSON)
    assert (answer.status_code, answer.json()) == (status, {"reason": reason})


async def test_a_bundle_of_one_hash_is_not_split(pair, tree):
    one, _ = pair
    make_namespaces(tree, "t/n", bundles={"boundaries": ["0x00000000", "0x00000001", "0xffffffff"], "numBundles": 2})
    answer = await one.client.put("/admin/v2/namespaces/t/n/0x00000000_0x00000001/split", headers=JSON)
    assert answer.status_code == 412
    assert answer.json()["reason"].startswith("Split bundle failed due to invalid request")


class PulsarBroker:
    """Owns the bundle as a broker of Apache Pulsar, and splits it as that broker does."""

    def __init__(self, tree: MemoryTree) -> None:
        self.store = tree.connect()
        self.requests: list[tuple[str, bytes]] = []
        self.status = 204

    async def own(self) -> None:
        record = {"nativeUrl": "pulsar://three:6650", "httpUrl": "http://three", "disabled": False}
        await self.store.create(BUNDLE.owner_path, json.dumps(record).encode(), ephemeral=True, make_parents=True)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append((f"{request.method} {request.url.raw_path.decode()}", await request.aread()))
        if self.status < 300:
            boundaries = [one.lower for one in bundles_of("public", "default")] + [MIDDLE, 2**32 - 1]
            bundles = {"boundaries": [f"0x{one:08x}" for one in sorted(boundaries)], "numBundles": 5}
            await self.store.create(LOCAL, json.dumps({"bundles": bundles}).encode(), make_parents=True)
            await self.store.delete(BUNDLE.owner_path, version=None)
        return httpx.Response(self.status, json={"reason": "of Pulsar"})


async def test_a_bundle_of_a_pulsar_broker_is_split_there(pair, tree):
    one, two = pair
    pulsar = PulsarBroker(tree)
    for harness in pair:
        harness.peers["three"] = pulsar  # type: ignore[assignment]
    await one.produce("a")
    await one.post(f"{SPACE}/unload", {})
    await pulsar.own()
    for status, ours in ((412, 400), (500, 503)):
        pulsar.status = status
        answer = await one.post(f"{SPACE}/split", {"bundle": BUNDLE.name})
        assert answer.status_code == ours
        assert answer.json()["facts"]["answer"] == "of Pulsar"
    pulsar.status = 204
    assert await split(two) == [part.name for part in PARTS]
    query = "unload=false&splitAlgorithmName=range_equally_divide"
    assert pulsar.requests[-1] == (f"PUT {ADMIN}/{BUNDLE.name}/split?{query}", b"")
    await one.produce("b")
    assert one.broker.ownership.held == [MINE]
    assert payloads((await two.client.get(f"{TOPIC}/messages")).json()["messages"]) == ["a", "b"]
