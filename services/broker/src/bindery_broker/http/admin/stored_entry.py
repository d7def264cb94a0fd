"""A stored entry as the answer of Pulsar's peek, examine and get-by-id calls.

The body is the payload of the entry, decompressed; of a batch, the payload of the whole batch, which pulsar-admin
splits. The headers describe the metadata:

| headers                                                    | present                         |
|------------------------------------------------------------|---------------------------------|
| X-Pulsar-Message-ID, -producer-name, -sequence-id, -publish-time | always                    |
| X-Pulsar-PROPERTY (a JSON object)                          | if there are properties         |
| X-Pulsar-partition-key, -event-time, -deliver-at-time, ... | if the metadata has the field   |
| X-Pulsar-num-batch-message, -batch-size                    | for a batch                     |

Source: Pulsar PersistentTopicsBase.generateResponseWithEntry.
"""

import json
from base64 import b64encode
from typing import Final

from bindery_pulsar.message_codec import read_raw
from bindery_pulsar.message_id import Position
from bindery_pulsar.pulsar_messages_pb2 import MessageMetadata

from bindery_broker.http.admin.topic_json import iso
from bindery_broker.http.exchange import Reply

BYTES_TYPE: Final = b"application/octet-stream"


def entry_reply(position: Position, entry: bytes, *, size_max: int) -> Reply:
    """Return the answer. `size_max`: maximum bytes of the payload. Raises CorruptMessage, UnreadableMessage."""
    metadata, payload = read_raw(entry, size_max=size_max)
    headers = {"Message-ID": str(position), **_headers(metadata, len(payload))}
    lines = tuple((f"x-pulsar-{name.lower()}".encode(), _safe(value)) for name, value in headers.items())
    return Reply(200, payload, BYTES_TYPE, lines)


def _headers(metadata: MessageMetadata, size: int) -> dict[str, str]:
    found = {
        "producer-name": metadata.producer_name,
        "sequence-id": str(metadata.sequence_id),
        "publish-time": iso(metadata.publish_time),
    }
    if metadata.properties:
        found["PROPERTY"] = json.dumps({one.key: one.value for one in metadata.properties})
    if metadata.event_time:
        found["event-time"] = iso(metadata.event_time)
    if metadata.HasField("deliver_at_time"):
        found["deliver-at-time"] = iso(metadata.deliver_at_time)
    if metadata.HasField("partition_key"):
        found["partition-key"] = metadata.partition_key
        found["partition-key-b64-encoded"] = str(metadata.partition_key_b64_encoded).lower()
    if metadata.HasField("ordering_key"):
        found["Base64-ordering-key"] = b64encode(metadata.ordering_key).decode()
    if metadata.HasField("num_messages_in_batch"):
        found["num-batch-message"] = str(metadata.num_messages_in_batch)
        found["batch-size"] = str(size)
    if metadata.null_value:
        found["null-value"] = "true"
    found["Is-Encrypted"] = str(bool(metadata.encryption_keys)).lower()
    return found


def _safe(value: str) -> bytes:
    """Return the value of a header: UTF-8, with `?` instead of control characters, which no header can have."""
    return "".join(letter if letter >= " " and letter != "\x7f" else "?" for letter in value).encode()
