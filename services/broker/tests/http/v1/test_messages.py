"""POST .../messages: every form of body; nothing of an invalid request is written."""

import asyncio
import base64
import json

import pytest
from bindery_client.memory.memory import MemoryLedgerClient
from bindery_core.errors import AddTimeout, LedgerFenced, NotEnoughBookies
from broker_harness import TOPIC, Harness, ids, payloads, problem

NDJSON = {"content-type": "application/x-ndjson"}


async def stored(broker: Harness, topic: str = TOPIC) -> list[dict]:
    answer = await broker.client.get(f"{topic}/messages", params={"max": 1000, "max_bytes": 16 * 2**20})
    assert answer.status_code == 200, answer.text
    return answer.json()["messages"]


async def entries(broker: Harness) -> int:
    answer = await broker.client.get(TOPIC)
    return answer.json()["entries"] if answer.status_code == 200 else 0


async def test_a_raw_body_is_one_message(broker):
    answer = await broker.client.post(
        f"{TOPIC}/messages?key=k&tags=a||b&producer=p&event_time=7&sequence_id=3",
        content="größe".encode(),
        headers={"content-type": "text/plain; charset=utf-8", "Bindery-Property-Place": "caf%C3%A9 1"},
    )
    assert answer.status_code == 200
    (message,) = await stored(broker)
    assert answer.json() == {"message_ids": [message["message_id"]]}
    assert message == {
        "message_id": "0:0:-1:-1",
        "payload": "größe",
        "key": "k",
        "properties": {"place": "café 1"},
        "tags": "a||b",
        "publish_time": broker.clock.wall_ms,
        "event_time": 7,
        "redelivery_count": 0,
        "producer": "p",
        "sequence_id": 3,
    }


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}], ids=["none", "curl"])
async def test_a_body_with_any_other_content_type_is_one_raw_message(broker, headers):
    await broker.client.post(f"{TOPIC}/messages", content=b'{"payload": "x"}', headers=headers)
    assert [m["payload"] for m in await stored(broker)] == ['{"payload": "x"}']


async def test_bytes_that_are_not_text_are_returned_as_base64(broker):
    await broker.client.post(f"{TOPIC}/messages", content=b"\xff\x00")
    (message,) = await stored(broker)
    assert base64.b64decode(message["payload_base64"]) == b"\xff\x00"
    assert "payload" not in message


async def test_an_empty_body_is_an_empty_message(broker):
    await broker.client.post(f"{TOPIC}/messages", content=b"")
    assert [m["payload"] for m in await stored(broker)] == [""]


async def test_lines_become_a_batch_in_order(broker):
    lines = [
        {"payload": "text", "properties": {"a": "1"}, "event_time": 5, "sequence_id": 9},
        {"payload_json": {"b": [1, None]}},
        {"payload_base64": base64.b64encode(b"\x00\xfe").decode()},
    ]
    body = "\r\n".join(json.dumps(line) for line in lines) + "\n\n"
    answer = await broker.client.post(f"{TOPIC}/messages?producer=p", content=body, headers=NDJSON)
    assert answer.json()["message_ids"] == ["0:0:-1:0", "0:0:-1:1", "0:0:-1:2"]
    first, second, third = await stored(broker)
    assert (first["payload"], first["properties"], first["event_time"], first["sequence_id"]) == (
        "text",
        {"a": "1"},
        5,
        9,
    )
    assert json.loads(second["payload"]) == {"b": [1, None]}
    assert base64.b64decode(third["payload_base64"]) == b"\x00\xfe"


async def test_an_array_becomes_a_batch(broker):
    answer = await broker.client.post(f"{TOPIC}/messages", json=[{"payload": "a"}, {"payload": "b"}])
    assert answer.json()["message_ids"] == ["0:0:-1:0", "0:0:-1:1"]


async def test_a_change_of_key_or_tags_ends_a_batch_and_keeps_the_order(broker):
    lines = [
        {"payload": "1", "key": "a"},
        {"payload": "2", "key": "b"},
        {"payload": "3", "key": "b"},
        {"payload": "4", "key": "b", "tags": "t"},
        {"payload": "5", "key": "a"},
    ]
    answer = await broker.client.post(f"{TOPIC}/messages", json=lines)
    assert answer.json()["message_ids"] == ["0:0:-1:-1", "0:1:-1:0", "0:1:-1:1", "0:2:-1:-1", "0:3:-1:-1"]
    assert [m["payload"] for m in await stored(broker)] == ["1", "2", "3", "4", "5"]


async def test_batch_false_stores_one_entry_per_message(broker):
    answer = await broker.client.post(f"{TOPIC}/messages?batch=false", json=[{"payload": "a"}, {"payload": "b"}])
    assert answer.json()["message_ids"] == ["0:0:-1:-1", "0:1:-1:-1"]


async def test_query_and_headers_are_defaults_for_all_messages(broker):
    lines = [{"payload": "a"}, {"payload": "b", "key": "own", "tags": "own", "properties": {"x": "2"}}]
    await broker.client.post(
        f"{TOPIC}/messages?key=k&tags=t", json=lines, headers={"Bindery-Property-X": "1", "Bindery-Property-Y": "1"}
    )
    first, second = await stored(broker)
    assert (first["key"], first["tags"], first["properties"]) == ("k", "t", {"x": "1", "y": "1"})
    assert (second["key"], second["tags"], second["properties"]) == ("own", "own", {"x": "2", "y": "1"})


@pytest.mark.parametrize(
    ("bad", "hint"),
    [
        ("{", "truncated"),
        ("[]", "object"),
        ('{"payload": "a", "payload_json": 1}', "exactly one"),
        ("{}", "exactly one"),
        ('{"payload": 5}', "payload"),
        ('{"payload": "a", "colour": "red"}', "colour"),
        ('{"payload": "a", "tags": "a||"}', "empty tag"),
        ('{"payload": "a", "properties": {"a": 1}}', "properties"),
        ('{"payload": "a", "event_time": -1}', "event_time"),
        ('{"payload_base64": "!"}', "base64"),
        ('{"payload": "\\ud800"}', ""),
        ('{"payload_json": ' + "[" * 5000 + "]" * 5000 + "}", "nested"),
        ('{"payload": "a"} {"payload": "b"}', "malformed JSON at column 18"),
    ],
)
async def test_the_error_names_an_invalid_line_and_nothing_is_written(broker, bad, hint):
    body = '{"payload": "fine"}\n\n' + bad + '\n{"payload": "fine"}'
    answer = await broker.client.post(f"{TOPIC}/messages", content=body, headers=NDJSON)
    body = problem(answer, status=400, code="bad_request")
    assert body["facts"]["line"] == 3
    assert body["detail"].startswith("line 3: ")
    assert hint in body["detail"]
    assert not (await broker.broker.names.topics(after=None, limit=1)).names  # not even the topic was created


@pytest.mark.parametrize("text", [b'{"payload": "\xff"}', b'{"payload_json": "\xff"}', b"\xff"])
async def test_the_error_names_a_line_that_is_not_utf8(broker, text):
    answer = await broker.client.post(f"{TOPIC}/messages", content=b'{"payload": ""}\n' + text, headers=NDJSON)
    assert problem(answer, status=400, code="bad_request")["facts"]["line"] == 2


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ("", "array"),
        ('"a"', "a message object or an array of them"),
        ("[", "line 1, column 2: the input is truncated"),
        ('[\n {"payload": "a"},\n]', "line 3, column 1: trailing comma in array"),
        ("{bad", "line 1, column 2: object keys must be strings"),
        ("bad", "line 1, column 1: invalid character"),
        ('{"payload": "a"} {"payload": "b"}', "column 18: trailing characters"),
        ('{"payload": 5}', "Expected `str`"),
        ("{}", "exactly one of payload"),
        ("[]", "no message"),
        ('[{"payload": "a"}, {}]', "message 1"),
        ('[{"payload": "a"}, {"payload": 1}]', "[1]"),
        ("[" * 100_000, ""),
    ],
)
async def test_a_broken_json_body_is_refused(broker, body, hint):
    answer = await broker.client.post(f"{TOPIC}/messages", content=body, headers={"content-type": "application/json"})
    assert hint in problem(answer, status=400, code="bad_request")["detail"]
    assert await entries(broker) == 0


async def test_a_single_json_object_is_one_message(broker):
    body = ' {"payload": "hello", "key": "k", "properties": {"a": "1"}}\n'
    answer = await broker.client.post(f"{TOPIC}/messages", content=body, headers={"content-type": "application/json"})
    assert len(answer.json()["message_ids"]) == 1
    (message,) = await broker.receive()
    assert (message["payload"], message["key"], message["properties"]) == ("hello", "k", {"a": "1"})


@pytest.mark.parametrize(
    "query",
    ["batch=maybe", "colour=red", "key=a&key=b", "sequence_id=-1", "producer=", "producer=%00", "tags=", "key=%FF",
     "event_time=1e30"],
)  # fmt: skip
async def test_a_wrong_query_is_refused(broker, query):
    answer = await broker.client.post(f"{TOPIC}/messages?{query}", content=b"x")
    problem(answer, status=400, code="bad_request")
    assert await entries(broker) == 0


@pytest.mark.parametrize("where", ["query", "query of lines", "query of an array", "line"])
@pytest.mark.parametrize("field", [{"deliver_after_ms": 1_000}, {"deliver_at": 1_700_000_001_000}])
async def test_a_delayed_message_is_stored_with_its_delivery_time(broker, where, field):
    assert broker.clock.wall_ms == 1_700_000_000_000
    if where == "query":
        answer = await broker.client.post(f"{TOPIC}/messages", content=b"x", params=field)
    elif where == "query of lines":
        body = b'{"payload": "x"}'
        answer = await broker.client.post(f"{TOPIC}/messages", content=body, headers=NDJSON, params=field)
    elif where == "query of an array":
        answer = await broker.client.post(f"{TOPIC}/messages", json=[{"payload": "x"}], params=field)
    else:
        answer = await broker.client.post(f"{TOPIC}/messages", json=[{"payload": "x", **field}])
    assert answer.status_code == 200
    (message,) = (await broker.client.get(f"{TOPIC}/messages")).json()["messages"]
    assert (message["payload"], message["deliver_at"]) == ("x", 1_700_000_001_000)


async def test_a_delivery_time_that_is_reached_is_not_a_delay(broker):
    lines = [{"payload": "x", "deliver_after_ms": 0}, {"payload": "y", "deliver_at": broker.clock.wall_ms}]
    answer = await broker.client.post(f"{TOPIC}/messages", json=lines)
    assert [text.split(":")[1] for text in answer.json()["message_ids"]] == ["0", "0"], "one entry"
    messages = (await broker.client.get(f"{TOPIC}/messages")).json()["messages"]
    assert ["deliver_at" in message for message in messages] == [False, False]


async def test_delayed_messages_are_entries_of_their_own(broker):
    lines = [{"payload": "a"}, {"payload": "b"}, {"payload": "c", "deliver_after_ms": 5}] + [{"payload": "d"}] * 2
    answer = await broker.client.post(f"{TOPIC}/messages", json=lines)
    places = [tuple(map(int, text.split(":")[1::2])) for text in answer.json()["message_ids"]]
    assert places == [(0, 0), (0, 1), (1, -1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"deliver_after_ms": 1, "deliver_at": 1}, "not both"),
        ({"deliver_after_ms": -1}, "deliver_after_ms"),
        ({"deliver_at": -1}, "deliver_at"),
        ({"deliver_after_ms": 1.5}, "deliver_after_ms"),
        ({"deliver_at": 253_402_300_800_000}, "deliver_at"),
        ({"deliver_after_ms": 253_402_300_799_999}, "year 9999"),
    ],
)
async def test_an_impossible_delay_is_refused(broker, fields, detail):
    answer = await broker.client.post(f"{TOPIC}/messages", json=[{"payload": "x"}, {"payload": "x", **fields}])
    assert detail in problem(answer, status=400, code="bad_request")["detail"]
    answer = await broker.client.post(f"{TOPIC}/messages", content=b"x", params=fields)
    assert detail in problem(answer, status=400, code="bad_request")["detail"]
    assert await entries(broker) == 0


async def test_a_delay_above_the_setting_is_refused_and_not_shortened(tree, ledgers, clock):
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", delayed_delivery_max_delay_s=60)
    lines = [{"payload": "x"}, {"payload": "x", "deliver_after_ms": 60_001}]
    answer = await broker.client.post(f"{TOPIC}/messages", json=lines)
    body = problem(answer, status=400, code="delay_too_long")
    assert "message 1: the delay is longer than delayed_delivery_max_delay_s allows" in body["detail"]
    assert body["facts"] == {"index": 1, "delay_ms": 60_001, "delayed_delivery_max_delay_s": 60}
    assert await entries(broker) == 0
    lines[1]["deliver_after_ms"] = 60_000
    assert (await broker.client.post(f"{TOPIC}/messages", json=lines)).status_code == 200
    await broker.close()


async def test_a_body_with_a_content_length_over_the_limit_is_refused_without_reading_it(broker):
    limit = broker.settings.request_bytes_max

    async def never_read():
        raise AssertionError("the body was read")
        yield b""

    answer = await broker.client.post(
        f"{TOPIC}/messages", content=never_read(), headers={"content-length": str(limit + 1)}
    )
    body = problem(answer, status=413, code="too_large")
    assert body["facts"] == {"size": limit + 1, "size_max": limit}


async def test_a_streamed_body_over_the_limit_is_refused_while_it_is_read(broker):
    sent = 0

    async def pieces():
        nonlocal sent
        while True:
            sent += 1
            yield b"x" * 2**20

    answer = await broker.client.post(f"{TOPIC}/messages", content=pieces())
    problem(answer, status=413, code="too_large")
    assert sent == 17


async def test_a_message_over_its_limit_is_refused_with_the_limit(broker):
    answer = await broker.client.post(f"{TOPIC}/messages", content=b"x" * (5 * 2**20))
    body = problem(answer, status=413, code="too_large")
    assert body["facts"]["size_max"] < 5 * 2**20
    lines = json.dumps({"payload": "fine"}) + "\n" + json.dumps({"payload": "x" * (5 * 2**20)})
    answer = await broker.client.post(f"{TOPIC}/messages", content=lines, headers=NDJSON)
    problem(answer, status=413, code="too_large")
    assert await entries(broker) == 0


@pytest.mark.parametrize("form", ["lines", "array"])
async def test_the_number_of_messages_is_limited(broker, form):
    line = '{"payload":""}'
    body = "\n".join([line] * 10_001) if form == "lines" else f"[{','.join([line] * 10_001)}]"
    content_type = "application/x-ndjson" if form == "lines" else "application/json"
    answer = await broker.client.post(f"{TOPIC}/messages", content=body, headers={"content-type": content_type})
    problem(answer, status=413, code="too_large")


async def test_the_maximum_number_of_messages_is_stored(broker):
    body = "\n".join(['{"payload":"x"}'] * 10_000)
    answer = await broker.client.post(f"{TOPIC}/messages", content=body, headers=NDJSON)
    assert len(set(answer.json()["message_ids"])) == 10_000


class Slow:
    """A client that has sent a part of its body."""

    def __init__(self, broker: Harness) -> None:
        self._url = broker.client.base_url

    async def send(self, part: bytes, *, size: int) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._url.port)
        head = f"POST {TOPIC}/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        self._writer.write(head.encode() + part)

    async def end(self, part: bytes = b"") -> tuple[bytes, bytes]:
        """Send the rest. Return head and body of the response."""
        self._writer.write(part)
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            return head, await self._reader.readuntil(b"}")
        finally:
            self._writer.close()


SMALL_BODIES = {"request_bytes_max": 2_000, "control_bytes_max": 1_024, "in_flight_bytes_max": 2_000}
"""Settings of a broker that holds one body of the maximum size."""


async def used(broker: Harness, size: int) -> None:
    """Return when the bodies in memory have `size` bytes."""
    async with asyncio.timeout(10):
        while broker.app._budget.used != size:
            await asyncio.sleep(0.001)


async def test_a_slow_body_yields_to_a_complete_one(tree, ledgers, clock):
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", **SMALL_BODIES)
    async with harness.serve():
        slow = Slow(harness)
        await slow.send(b"x" * 1_500, size=1_501)
        await used(harness, 1_500)
        assert (await harness.client.post(f"{TOPIC}/messages", content=b"x" * 600)).status_code == 200
        head, body = await slow.end()
        assert head.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nRetry-After: 1\r\n" in head
        assert b"application/problem+json" in head
        assert b'"too_many_requests"' in body
        await used(harness, 0)
    (topic,) = harness.broker.topics
    assert topic.ledger.entries_count == 1
    await harness.close()


async def test_slow_bodies_yield_to_a_growing_one_the_longest_first(tree, ledgers, clock):
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", **SMALL_BODIES)
    async with harness.serve():
        first, second, last = Slow(harness), Slow(harness), Slow(harness)
        await first.send(b"x" * 800, size=801)
        await used(harness, 800)
        await second.send(b"x" * 800, size=801)
        await used(harness, 1_600)
        await last.send(b"x" * 401, size=1_000)
        await used(harness, 1_201)
        assert (await first.end())[0].startswith(b"HTTP/1.1 429 ")
        assert (await second.end(b"y"))[0].startswith(b"HTTP/1.1 200 ")
        assert (await last.end(b"y" * 599))[0].startswith(b"HTTP/1.1 200 ")
        await used(harness, 0)
    await harness.close()


async def test_complete_bodies_over_the_budget_are_refused_with_429(tree, ledgers, clock):
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", **SMALL_BODIES)
    await harness.produce("a")
    ledgers.hold_adds()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(harness.client.post(f"{TOPIC}/messages", content=b"x" * 1_500))
        while harness.app._budget.used == 0:
            await asyncio.sleep(0)
        refused = await harness.client.post(f"{TOPIC}/messages", content=b"x" * 600)
        ledgers.release_adds()
    assert problem(refused, status=429, code="too_many_requests")["facts"]["limit"] == 2_000
    assert refused.headers["retry-after"]
    assert first.result().status_code == 200
    assert harness.app._budget.used == 0
    await harness.close()


async def test_a_content_length_alone_is_not_charged_to_the_budget(tree, ledgers, clock):
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", **SMALL_BODIES)
    gate = asyncio.Event()

    async def slow():
        yield b"x"
        await gate.wait()
        yield b"y" * 1_999

    announced = {"content-length": "2000"}
    async with harness.serve(), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(harness.client.post(f"{TOPIC}/messages", content=slow(), headers=announced))
        while harness.app._budget.used == 0:
            await asyncio.sleep(0)
        assert harness.app._budget.used == 1
        assert (await harness.client.post(f"{TOPIC}/messages", content=b"x" * 600)).status_code == 200
        gate.set()
        assert (await first).status_code == 200
        assert harness.app._budget.used == 0
    await harness.close()


async def test_a_body_counts_once_before_and_after_it_is_complete(tree, ledgers, clock):
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", **SMALL_BODIES)
    await harness.produce("a")
    ledgers.hold_adds()
    gate = asyncio.Event()

    async def slow():
        yield b"x" * 1_500
        await gate.wait()
        yield b"y" * 500

    async with harness.serve(), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(harness.client.post(f"{TOPIC}/messages", content=slow()))
        while harness.app._budget.used < 1_500:
            await asyncio.sleep(0)
        gate.set()
        while harness.app._budget.used < 2_000:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert harness.app._budget.used == 2_000, "it fills the limit alone"
        ledgers.release_adds()
        assert (await first).status_code == 200
        assert harness.app._budget.used == 0
    await harness.close()


async def test_the_answer_waits_for_the_bookies(broker):
    await broker.produce("first")
    broker.ledgers.hold_adds()
    task = asyncio.create_task(broker.client.post(f"{TOPIC}/messages", content=b"second"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not task.done()
    assert [m["payload"] for m in await stored(broker)] == ["first"]
    broker.ledgers.release_adds()
    async with asyncio.timeout(30):
        assert (await task).status_code == 200


async def test_the_answer_to_a_large_request_has_the_result_of_each_part(broker, monkeypatch):
    await broker.produce("open")
    topic = next(iter(broker.broker.topics))
    submit_many, calls = topic.ledger.submit_many, []

    def failing_second(entries):
        calls.append(len(entries))
        if len(calls) == 2:
            outcome = asyncio.get_running_loop().create_future()
            outcome.set_exception(AddTimeout("no quorum"))
            return outcome
        return submit_many(entries)

    monkeypatch.setattr(topic.ledger, "submit_many", failing_second)
    lines = [{"payload": "x" * 2**20} for _ in range(7)]
    answer = await broker.client.post(f"{TOPIC}/messages?batch=false", json=lines)
    assert answer.status_code == 207
    results = answer.json()["results"]
    assert calls == [3, 3, 1]
    assert ["message_id" in result for result in results] == [True] * 3 + [False] * 3 + [True]
    assert results[3]["error"]["code"] == "add_timeout"
    ids = [result["message_id"] for result in results if "message_id" in result]
    assert len([m for m in await stored(broker) if m["message_id"] in ids]) == 4


async def test_no_part_of_a_request_is_stored_after_a_refused_part(tree, ledgers, clock):
    """Otherwise a client that repeats the refused messages would change the order of its own request."""
    broker = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", ledger={"pending_size_max": 5 * 2**20})
    try:
        lines = [{"payload": letter * size} for letter, size in (("a", 3 * 2**20), ("b", 3 * 2**20), ("c", 2**20))]
        answer = await broker.client.post(f"{TOPIC}/messages?batch=false", json=lines)
        assert answer.status_code == 207
        first, second, third = answer.json()["results"]
        assert "message_id" in first
        assert second["error"]["code"] == third["error"]["code"] == "too_many_requests"
        assert [message["payload"][0] for message in await stored(broker)] == ["a"]
    finally:
        await broker.close()


async def test_a_request_whose_messages_all_failed_is_answered_with_an_error(broker, monkeypatch):
    await broker.produce("open")
    topic = next(iter(broker.broker.topics))

    def failing(_entries):
        raise NotEnoughBookies("asked 3, found 1")

    monkeypatch.setattr(topic.ledger, "submit_many", failing)
    problem(await broker.client.post(f"{TOPIC}/messages", content=b"x"), status=503, code="not_enough_bookies")
    lines = [{"payload": "x" * 2**20} for _ in range(7)]
    problem(await broker.client.post(f"{TOPIC}/messages", json=lines), status=503, code="not_enough_bookies")


async def test_a_topic_lost_while_writing_is_an_unknown_outcome(broker, ledgers, tree):
    await broker.produce("open")
    ledgers.fail_next("add", LedgerFenced("another broker recovered it"))
    await tree.connect().set("/managed-ledgers/public/default/persistent/t", b"", version=None)
    answer = await broker.client.post(f"{TOPIC}/messages", content=b"x")
    problem(answer, status=504, code="outcome_unknown")


async def test_a_producer_gets_no_error_if_replication_workers_close_the_ledger(broker, ledgers):
    """One of two entries in flight is stored when the ledger is recovered."""
    await broker.produce("a")
    await MemoryLedgerClient(ledgers).open(0)
    first = (await broker.produce("b"))[0]
    ledger_id = int(first.split(":")[0])
    assert ledger_id != 0
    ledgers.hold_adds()
    lines = "\n".join(json.dumps({"payload": payload}) for payload in ("c", "d"))
    producing = asyncio.create_task(
        broker.client.post(
            f"{TOPIC}/messages?batch=false", content=lines, headers={"content-type": "application/x-ndjson"}
        )
    )
    ledger = ledgers.ledgers[ledger_id]
    while not ledger.writer._in_flight:
        await asyncio.sleep(0)
    ledger.store(ledger.writer._in_flight[0][0][:1])
    await MemoryLedgerClient(ledgers).open(ledger_id)
    ledgers.release_adds()
    answer = await producing
    assert answer.status_code == 200, answer.text
    found = (await broker.client.get(f"{TOPIC}/messages")).json()["messages"]
    assert payloads(found) == ["a", "b", "c", "d"]
    assert ids(found)[2:] == answer.json()["message_ids"]
    assert payloads(await broker.receive()) == ["a", "b", "c", "d"]


async def test_a_consumer_gets_no_error_if_replication_workers_close_the_cursor_ledger(broker, ledgers, tree):
    await broker.produce("a", "b", "c")
    got = await broker.receive(max=3)
    assert (await broker.ack(ids(got)[:1])).status_code == 200
    for ledger_id in list(ledgers.ledgers):
        await MemoryLedgerClient(ledgers).open(ledger_id)
    assert (await broker.ack(ids(got)[2:])).json() == {"acknowledged": 1}
    await broker.die()
    successor = Harness(tree=tree, ledgers=ledgers, clock=broker.clock, url="http://two")
    try:
        assert payloads(await successor.receive()) == ["b"]
    finally:
        await successor.close()
