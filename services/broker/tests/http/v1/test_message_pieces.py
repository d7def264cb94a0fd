"""Answers in pieces are the same JSON as answers at once, and no piece is large."""

import base64
import json
from typing import Any

import pytest
from bindery_broker.http.v1.message_pieces import (
    AT_ONCE_SIZE_MAX,
    PIECE_SIZE,
    SLICE_SIZE,
    MessageSource,
    event_pieces,
    message_parts,
    messages_reply,
)
from bindery_pulsar.message_codec import Message


def source(payload: bytes, **fields: Any) -> MessageSource:
    message = Message(
        payload=payload, batch_index=-1, batch_size=1, producer_name="p", sequence_id=7, publish_time_ms=1, **fields
    )
    return MessageSource(message, "1:2:-1:-1", "5", 3)


PAYLOADS = {
    "empty": b"",
    "ascii": b"a" * (3 * SLICE_SIZE + 1),
    "escaped": b'"\\\n\x00' * SLICE_SIZE,
    "wide": "añ€𝄞".encode() * SLICE_SIZE,
    "split": b"a" * (SLICE_SIZE - 1) + "𝄞€ñ".encode() * 20_000,
    "binary": b"\xff\x00a" * SLICE_SIZE + b"x",
    "cut": "añ€𝄞".encode() * SLICE_SIZE + "𝄞".encode()[:3],
    "surrogate": b"a" * (2 * SLICE_SIZE) + b"\xed\xa0\x80",
    "at the limit": b"a" * SLICE_SIZE,
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_message_in_slices_is_the_same_json(payload: bytes) -> None:
    found = json.loads(b"".join(message_parts(source(payload, key="k", properties={"a": "b", "t": "TAGS"}))))
    if "payload" in found:
        assert found.pop("payload") == payload.decode()
    else:
        with pytest.raises(UnicodeDecodeError):
            payload.decode()
        assert base64.b64decode(found.pop("payload_base64")) == payload
    assert found == {
        "message_id": "1:2:-1:-1",
        "lease": "5",
        "key": "k",
        "properties": {"a": "b"},
        "tags": "t",
        "publish_time": 1,
        "redelivery_count": 3,
        "producer": "p",
        "sequence_id": 7,
    }


def test_the_parts_of_a_large_message_are_small() -> None:
    parts = list(message_parts(source(PAYLOADS["escaped"])))
    assert len(parts) > 3
    assert max(map(len, parts)) <= 6 * SLICE_SIZE


def test_events_are_joined_to_pieces_and_cut_into_pieces() -> None:
    sources = [source(b"a" * 100) for _ in range(2_000)] + [source(PAYLOADS["escaped"])]
    pieces = list(event_pieces(sources))
    assert not sources, "each message can be freed once it is sent"
    assert max(map(len, pieces)) <= PIECE_SIZE
    assert sum(len(piece) < PIECE_SIZE // 2 for piece in pieces) < len(pieces) // 2
    events = b"".join(pieces).split(b"\n\n")
    assert len(events) == 2_002
    assert json.loads(events[0].partition(b"data: ")[2])["payload"] == "a" * 100


@pytest.mark.parametrize("size", [10, AT_ONCE_SIZE_MAX // 10, AT_ONCE_SIZE_MAX])
@pytest.mark.parametrize("lines", [False, True])
async def test_small_and_large_answers_are_alike(broker, size, lines):
    await broker.produce(*("x" * size for _ in range(3)))
    headers = {"accept": "application/x-ndjson"} if lines else {}
    answer = await broker.client.post(
        "/v1/topics/public/default/t/subscriptions/s/receive",
        json={"consumer": "c", "wait_ms": 0, "max_bytes": 16 * 2**20},
        headers=headers,
    )
    assert answer.headers["content-type"] == ("application/x-ndjson" if lines else "application/json")
    assert ("content-length" in answer.headers) is (3 * size < AT_ONCE_SIZE_MAX)
    found = [json.loads(line) for line in answer.text.splitlines()] if lines else answer.json()["messages"]
    assert [message["payload"] for message in found] == ["x" * size] * 3
    assert answer.content.endswith(b"\n")
    assert broker.broker.topics.responses.used == 0


@pytest.mark.parametrize("size", [10, AT_ONCE_SIZE_MAX])
async def test_a_read_without_a_subscription_has_the_next_position(broker, size):
    await broker.produce("x" * size, "y" * size)
    answer = await broker.client.get("/v1/topics/public/default/t/messages?max=2&max_bytes=16000000")
    assert [message["payload"][0] for message in answer.json()["messages"]] == ["x", "y"]
    assert answer.json()["next"] == "0:2:-1:-1"
    head = await broker.client.head("/v1/topics/public/default/t/messages?max=2&max_bytes=16000000")
    assert (head.status_code, head.content) == (200, b"")
    assert broker.broker.topics.responses.used == 0


def test_an_answer_without_messages_has_an_empty_list() -> None:
    class FakeCharge:
        size = 0

        def keep(self, size: int) -> None:
            self.size = size

    class FakeExchange:
        charge = FakeCharge()

    assert bytes(messages_reply(FakeExchange(), []).body) == b'{"messages":[]}\n'  # type: ignore[arg-type]
    assert bytes(messages_reply(FakeExchange(), [], lines=True).body) == b""  # type: ignore[arg-type]
    assert bytes(messages_reply(FakeExchange(), [], following="1:2").body) == (  # type: ignore[arg-type]
        b'{"messages":[],"next":"1:2"}\n'
    )
