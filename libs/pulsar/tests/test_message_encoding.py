"""Entries that are not decoded: what Pulsar's clients wrote, with everything that a client needs to decode it."""

import json
from pathlib import Path

import cramjam
import pytest
from bindery_pulsar.message_codec import OpaqueMessage, decode_entry
from bindery_pulsar.message_encoding import Chunk, Encoding, Encryption, EncryptionKey, OpaqueReason

RECORDED = Path(__file__).parent / "golden" / "pulsar"
"""Entries of Pulsar's clients; record.py there has the messages and the versions."""


def recorded(name: str) -> OpaqueMessage:
    (message,) = decode_entry((RECORDED / f"{name}.bin").read_bytes())
    assert isinstance(message, OpaqueMessage)
    assert (message.batch_index, message.key, message.producer_name) == (-1, "k", "p-1")
    return message


@pytest.mark.parametrize("client", ["cpp", "java"])
@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_the_chunks_of_pulsars_clients_can_be_joined(client: str, compression: str) -> None:
    count = {"none": 3, "lz4": 2}[compression]
    chunks = [recorded(f"{client}_chunk_{compression}_{index}") for index in range(count)]
    whole = b"".join(message.payload for message in chunks)
    for index, message in enumerate(chunks):
        encoding = message.encoding
        assert encoding.reason is OpaqueReason.CHUNK
        assert encoding.chunk == Chunk(uuid="p-1-0", index=index, count=count, total_size=len(whole))
        assert (encoding.batch_size, encoding.encryption) == (None, None)
        assert (message.tags, message.sequence_id) == ({"red"}, 0)
    if compression == "lz4":
        size = chunks[0].encoding.uncompressed_size
        whole = bytes(cramjam.lz4.decompress_block(whole, output_len=size))
    assert (len(whole), whole[-1_000:]) == (4_840, bytes(1_000))


@pytest.mark.parametrize("client", ["cpp", "java"])
def test_encrypted_entries_of_pulsars_clients_name_their_key(client: str) -> None:
    single, batch = recorded(f"{client}_encrypted_single"), recorded(f"{client}_encrypted_batch")
    assert (single.tags, batch.tags) == ({"red"}, frozenset())
    assert (single.encoding.batch_size, batch.encoding.batch_size) == (None, 3)
    for message in (single, batch):
        encoding = message.encoding
        assert (encoding.reason, encoding.compression) == (OpaqueReason.ENCRYPTED, "LZ4")
        assert encoding.encryption is not None
        (key,) = encoding.encryption.keys
        assert (key.name, len(key.value), len(encoding.encryption.param)) == ("key-1", 256, 12)
        assert key.metadata == ({"version": "1"} if client == "java" else {})


def test_the_json_has_the_fields_that_apply() -> None:
    plain = Encoding(reason=OpaqueReason.SIZE, batch_size=2_000)
    assert plain.as_json() == {"reason": "size", "batch_size": 2_000}
    full = Encoding(
        reason=OpaqueReason.ENCRYPTED,
        compression="LZ4",
        uncompressed_size=10,
        chunk=Chunk(uuid="u", index=0, count=2, total_size=9),
        encryption=Encryption(
            algorithm="AES", param=b"\x00\xff", keys=(EncryptionKey(name="k", value=b"v", metadata={"a": "b"}),)
        ),
    )
    assert json.loads(json.dumps(full.as_json())) == {
        "reason": "encrypted",
        "compression": "LZ4",
        "uncompressed_size": 10,
        "chunk": {"uuid": "u", "index": 0, "count": 2, "total_size": 9},
        "encryption": {
            "algorithm": "AES",
            "param_base64": "AP8=",
            "keys": [{"name": "k", "value_base64": "dg==", "metadata": {"a": "b"}}],
        },
    }
    unnamed = Encoding(reason=OpaqueReason.ENCRYPTED, encryption=Encryption(algorithm=None, param=b"", keys=()))
    assert unnamed.as_json()["encryption"] == {"param_base64": "", "keys": []}
