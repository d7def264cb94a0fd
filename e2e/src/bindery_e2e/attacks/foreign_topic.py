"""A topic whose entries were not written by a broker: a client of bookies with access to ZooKeeper stored them."""

import random
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import cramjam
import crc32c
from bindery_client.client import LedgerClient
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_pulsar.managed_ledger_codec import TopicInfo, encode_topic
from bindery_pulsar.managed_ledger_records import LedgerRecord
from bindery_pulsar.message_codec import OutgoingMessage, encode_message
from bindery_pulsar.pulsar_messages_pb2 import LZ4, ZLIB, ZSTD, MessageMetadata, SingleMessageMetadata
from bindery_pulsar.znode_layout import MANAGED_LEDGERS_ROOT, encode_name

PUBLISH_TIME_MS: Final = 1_700_000_000_000
_MAGIC: Final = 0x0E01
_COMPRESS: Final[dict[int, Callable[[bytes], bytes]]] = {
    LZ4: lambda data: bytes(cramjam.lz4.compress_block(data, store_size=False)),
    ZLIB: zlib.compress,
    ZSTD: lambda data: bytes(cramjam.zstd.compress(data)),
}


async def store_topic(zookeeper: str, name: str, entries: Sequence[bytes]) -> None:
    """Create the topic `public/default/<name>` of one closed ledger with these entries, one copy each."""
    store = await ZooKeeperStore.connect(zookeeper)
    client = await LedgerClient.connect(store, randomness=random.SystemRandom())
    try:
        handle = await client.create(
            ensemble_size=1,
            write_quorum=1,
            ack_quorum=1,
            custom={
                "component": b"managed-ledger",
                "application": b"pulsar",
                "pulsar/managed-ledger": f"public/default/persistent/{encode_name(name)}".encode(),
            },
        )
        for entry in entries:
            await handle.add(entry)
        await handle.close()
        record = LedgerRecord(
            ledger_id=handle.ledger_id,
            entries=len(entries),
            size=sum(map(len, entries)),
            closed_ms=int(time.time() * 1000),
        )
        path = f"{MANAGED_LEDGERS_ROOT}/public/default/persistent/{encode_name(name)}"
        await store.create(path, encode_topic(TopicInfo(ledgers=(record,))), make_parents=True)
    finally:
        await client.close()
        await store.close()


def plain_message(size: int, *, sequence_id: int = 0) -> bytes:
    """Return an entry of one message of `size` bytes."""
    message = OutgoingMessage(payload=bytes(size))
    return encode_message(message, producer_name="attacker", publish_time_ms=PUBLISH_TIME_MS, sequence_id=sequence_id)


def compressed_message(size: int, *, sequence_id: int = 0, compression: int = ZLIB) -> bytes:
    """Return an entry of one message of `size` zero bytes, compressed to a thousandth of it or so."""
    return _compressed(bytes(size), MessageMetadata(compression=compression), sequence_id)


def compressed_batch(count: int, *, properties: int = 0, sequence_id: int = 0) -> bytes:
    """Return an entry of `count` empty messages, each with this number of properties, compressed."""
    single = SingleMessageMetadata(payload_size=0)
    for _ in range(properties):
        single.properties.add(key="p", value="")
    head = single.SerializeToString()
    piece = struct.pack(">I", len(head)) + head
    return _compressed(piece * count, MessageMetadata(num_messages_in_batch=count), sequence_id)


def _compressed(payload: bytes, metadata: MessageMetadata, sequence_id: int) -> bytes:
    metadata.producer_name = "attacker"
    metadata.sequence_id = sequence_id
    metadata.publish_time = PUBLISH_TIME_MS
    if not metadata.compression:
        metadata.compression = ZLIB
    metadata.uncompressed_size = len(payload)
    head = metadata.SerializeToString()
    rest = struct.pack(">I", len(head)) + head + _COMPRESS[metadata.compression](payload)
    return struct.pack(">HI", _MAGIC, crc32c.crc32c(rest)) + rest
