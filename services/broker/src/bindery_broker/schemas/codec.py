"""Formats of a topic's schemas: the locator in ZooKeeper, and the record in a schema ledger.

| stored in                     | message       | content                                                      |
|-------------------------------|---------------|--------------------------------------------------------------|
| `/schemas/T/N/<encTopic>`     | SchemaLocator | the newest version, and an index of all                      |
| entry 0 of a schema ledger    | SchemaEntry   | a SchemaInfo, and the index before this version              |

Each version has its own ledger. An index entry has the version, the position of its record and the SHA-256 hash of the
definition. A deletion is a version without a definition, whose hash is empty: the versions before it no longer count,
and the next one continues the numbering. Clients see a version as 8 bytes, big-endian, from 0.

`type` in SchemaInfo is one more than the value of `SchemaType`, which is Pulsar's in its Java client. The index of the
first version's record has an entry of position -1:-1.
Source: Pulsar BookkeeperSchemaStorage, SchemaRegistryServiceImpl, LongSchemaVersion.
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Final, NamedTuple

from bindery_core.errors import BadRequest, Corrupt
from google.protobuf.message import DecodeError

from bindery_broker.schemas import schema_storage_pb2 as pb

_VERSION: Final = struct.Struct(">q")
_TYPE_OFFSET: Final = 1
VERSION_SIZE: Final = 8
assert _VERSION.size == VERSION_SIZE


class SchemaType(IntEnum):
    """The types of Pulsar, by the names of its admin API."""

    NONE = 0
    STRING = 1
    JSON = 2
    PROTOBUF = 3
    AVRO = 4
    BOOLEAN = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FLOAT = 10
    DOUBLE = 11
    DATE = 12
    TIME = 13
    TIMESTAMP = 14
    KEY_VALUE = 15
    INSTANT = 16
    LOCAL_DATE = 17
    LOCAL_TIME = 18
    LOCAL_DATE_TIME = 19
    PROTOBUF_NATIVE = 20


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema as a client gives it."""

    type: SchemaType
    definition: bytes = b""
    """An Avro schema as JSON text for AVRO, JSON and PROTOBUF; empty for primitive types."""
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def hash(self) -> bytes:
        return hashlib.sha256(self.definition).digest()


@dataclass(frozen=True, slots=True)
class StoredSchema:
    """One version of a topic's schema, or the record of a deletion."""

    version: int
    schema: Schema
    created_ms: int
    """Time of the upload in ms since 1970."""
    is_deletion: bool = False


class SchemaPosition(NamedTuple):
    """A record of a schema ledger."""

    ledger_id: int
    entry_id: int


class IndexEntry(NamedTuple):
    version: int
    position: SchemaPosition
    hash: bytes
    """SHA-256 hash of the definition; empty for a deletion."""

    @property
    def is_deletion(self) -> bool:
        return not self.hash


NOWHERE: Final = SchemaPosition(-1, -1)


@dataclass(frozen=True, slots=True)
class Locator:
    """The versions of one topic, ascending, at least one. Deleted ones may be missing at the beginning."""

    index: tuple[IndexEntry, ...]

    @property
    def newest(self) -> IndexEntry:
        return self.index[-1]

    @property
    def live(self) -> tuple[IndexEntry, ...]:
        """The versions after the last deletion."""
        for place in range(len(self.index) - 1, -1, -1):
            if self.index[place].is_deletion:
                return self.index[place + 1 :]
        return self.index


def version_bytes(version: int) -> bytes:
    """Return a version as clients see it."""
    return _VERSION.pack(version)


def parse_version(data: bytes) -> int:
    """Return the version of `version_bytes`. Versions of Pulsar before 2.4 have 64 bytes, of which 8 count.

    Raises BadRequest.
    """
    if len(data) < VERSION_SIZE:
        raise BadRequest("a schema version has 8 bytes", size=len(data))
    return int(_VERSION.unpack_from(data)[0])


def encode_locator(locator: Locator) -> bytes:
    message = pb.SchemaLocator()
    _put(message.info, locator.newest)
    for entry in locator.index:
        _put(message.index.add(), entry)
    return message.SerializeToString()


def decode_locator(data: bytes) -> Locator:
    """Raises Corrupt if these are not the versions of a topic."""
    try:
        message = pb.SchemaLocator.FromString(data)
    except DecodeError as error:
        raise Corrupt("the list of a topic's schema versions cannot be read", size=len(data)) from error
    index = tuple(_entry_of(entry) for entry in message.index)
    ascends = all(a.version < b.version for a, b in pairwise(index))
    if not index or not ascends or _entry_of(message.info) != index[-1]:
        raise Corrupt("the list of a topic's schema versions contradicts itself", versions=len(index))
    return Locator(index)


def encode_record(schema_id: str, stored: StoredSchema, index: tuple[IndexEntry, ...]) -> bytes:
    """Return the record of a new version. `index`: the versions before it."""
    info = pb.SchemaInfo(
        schema_id=schema_id,
        user="",
        type=stored.schema.type + _TYPE_OFFSET,
        schema=stored.schema.definition,
        timestamp=stored.created_ms,
        deleted=stored.is_deletion,
    )
    for key, value in stored.schema.properties.items():
        info.props.add(key=key, value=value)
    message = pb.SchemaEntry(schema_data=info.SerializeToString())
    for entry in index or (IndexEntry(0, NOWHERE, stored.schema.hash),):
        _put(message.index.add(), entry)
    return message.SerializeToString()


def decode_record(data: bytes, *, version: int) -> StoredSchema:
    """Raises Corrupt if this is no record of a schema, also if its type is unknown here."""
    try:
        info = pb.SchemaInfo.FromString(pb.SchemaEntry.FromString(data).schema_data)
        kind = SchemaType(info.type - _TYPE_OFFSET)
    except (DecodeError, ValueError) as error:
        raise Corrupt("a schema record cannot be read", size=len(data), version=version) from error
    properties = {pair.key: pair.value for pair in info.props}
    return StoredSchema(version, Schema(kind, info.schema, properties), info.timestamp, info.deleted)


def _put(message: pb.IndexEntry, entry: IndexEntry) -> None:
    message.version, message.hash = entry.version, entry.hash
    message.position.ledgerId, message.position.entryId = entry.position


def _entry_of(message: pb.IndexEntry) -> IndexEntry:
    position = SchemaPosition(message.position.ledgerId, message.position.entryId)
    return IndexEntry(message.version, position, message.hash)
