"""What is known of an entry that is not decoded here, so that a client can decode it.

An entry is delivered as one message with its payload as stored, if one of these holds; the first one is the reason:

| reason      | the entry                                                                                            |
|-------------|------------------------------------------------------------------------------------------------------|
| encrypted   | has encryption keys                                                                                  |
| chunk       | is a part of a message that is larger than an entry                                                  |
| compression | is compressed in a way that is not known here                                                        |
| size        | takes more memory once it is decompressed than the reader may use                                    |

A client undoes the steps of the producer: decrypt each chunk, join the chunks, decompress, split the batch. Steps whose
field is missing do not apply. Source: Pulsar PulsarApi.proto (MessageMetadata), ProducerImpl.
"""

from base64 import b64encode
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class OpaqueReason(StrEnum):
    """Reason why an entry is not decoded."""

    ENCRYPTED = "encrypted"
    CHUNK = "chunk"
    COMPRESSION = "compression"
    SIZE = "size"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptionKey:
    """The key of the data, itself encrypted with a key that consumers know by its name."""

    name: str
    value: bytes
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encryption:
    """How a payload is encrypted: in Pulsar's clients with AES-GCM."""

    algorithm: str | None
    """Name of the algorithm; None: the producer did not set it."""
    param: bytes
    """The initialization vector."""
    keys: tuple[EncryptionKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Which part of a message the payload is."""

    uuid: str
    """Id of the message; all its chunks have it."""
    index: int
    count: int
    total_size: int
    """Bytes of all chunks together, before they are encrypted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """The steps from the message to the payload of its entry, as far as they apply."""

    reason: OpaqueReason
    batch_size: int | None = None
    """Number of messages in the batch by its metadata; None: the entry is not a batch."""
    compression: str | None = None
    """Name of the compression, or its number; None: not compressed."""
    uncompressed_size: int | None = None
    """Bytes of the whole message or batch before it was compressed; None: not compressed."""
    chunk: Chunk | None = None
    encryption: Encryption | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the encoding as JSON: fields that are not set are left out, bytes are base64."""
        facts: dict[str, Any] = {"reason": self.reason.value}
        if self.batch_size is not None:
            facts["batch_size"] = self.batch_size
        if self.compression is not None:
            facts["compression"] = self.compression
            facts["uncompressed_size"] = self.uncompressed_size
        if (chunk := self.chunk) is not None:
            facts["chunk"] = {
                "uuid": chunk.uuid,
                "index": chunk.index,
                "count": chunk.count,
                "total_size": chunk.total_size,
            }
        if (encryption := self.encryption) is not None:
            found = facts["encryption"] = {} if encryption.algorithm is None else {"algorithm": encryption.algorithm}
            found["param_base64"] = _base64(encryption.param)
            found["keys"] = [
                {"name": key.name, "value_base64": _base64(key.value), "metadata": key.metadata}
                for key in encryption.keys
            ]
        return facts


def _base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")
