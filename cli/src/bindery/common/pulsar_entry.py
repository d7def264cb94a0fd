"""Describe an entry of a topic as JSON and as text: Pulsar's metadata and the messages with keys and properties."""

import base64
import json
from typing import Any

from bindery_core.errors import BinderyError
from bindery_pulsar.message_codec import Message, OpaqueMessage, decode_entry, read_head

from bindery.common.entry_facts import escaped


def describe_messages(payload: bytes) -> dict[str, Any]:
    """Return one entry of a topic as JSON. If a part cannot be read, `error` has the reason. Raises nothing.

    An entry that is not decoded (for example, encrypted) has one message, with its `encoding`.
    """
    facts: dict[str, Any] = {}
    try:
        head = read_head(payload)
        facts = {
            "producer": head.producer_name,
            "sequence_id": head.sequence_id,
            "publish_time_ms": head.publish_time_ms,
            "is_batch": head.is_batch,
            "is_marker": head.is_marker,
            "count": head.messages_count,
        }
        facts["messages"] = [_message(message) for message in decode_entry(payload)]
    except BinderyError as error:
        facts["error"] = str(error)
    return facts


def _message(message: Message) -> dict[str, Any]:
    facts: dict[str, Any] = {"batch_index": message.batch_index, "sequence_id": message.sequence_id}
    if isinstance(message.key, bytes):
        facts["key_base64"] = base64.b64encode(message.key).decode()
    elif message.key is not None:
        facts["key"] = message.key
    if message.ordering_key is not None:
        facts["ordering_key_base64"] = base64.b64encode(message.ordering_key).decode()
    if message.properties:
        facts["properties"] = message.properties
    if message.event_time_ms:
        facts["event_time_ms"] = message.event_time_ms
    if message.deliver_at_ms is not None:
        facts["deliver_at_ms"] = message.deliver_at_ms
    if message.null_value:
        facts["null_value"] = True
    facts["size"] = len(message.payload)
    if isinstance(message, OpaqueMessage):
        facts["encoding"] = message.encoding.as_json()
        facts["payload_base64"] = base64.b64encode(message.payload).decode()
        return facts
    try:
        facts["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        facts["payload_base64"] = base64.b64encode(message.payload).decode()
    return facts


def message_lines(payload: bytes) -> list[str]:
    """Return the facts of `describe_messages` as text: a line for the entry, then one for each message."""
    facts = describe_messages(payload)
    lines = []
    if "producer" in facts:
        kind = "marker" if facts["is_marker"] else f"batch of {facts['count']}" if facts["is_batch"] else "one message"
        lines.append(
            f"{kind}, producer {facts['producer']}, sequence {facts['sequence_id']}, "
            f"published {facts['publish_time_ms']}"
        )
    if "error" in facts:
        lines.append(f"cannot decode the messages: {facts['error']}")
    for message in facts.get("messages", ()):
        text = message.pop("payload", None)
        body = escaped(text.encode()) if text is not None else "base64:" + message.pop("payload_base64")
        index = message.pop("batch_index")
        size = message.pop("size")
        if "encoding" in message:
            message["encoding"] = json.dumps(message["encoding"])
        words = " ".join(f"{name}={value}" for name, value in message.items())
        lines.append(f"  {'' if index < 0 else f'[{index}] '}{words} ({size} bytes) {body}")
    return lines
