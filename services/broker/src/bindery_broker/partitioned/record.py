"""The metadata of a partitioned topic: the data of its znode, as JSON.

| member     | type    | meaning                                                                          |
|------------|---------|----------------------------------------------------------------------------------|
| partitions | integer | number of partitions: topics whose names end in `-partition-0`, ...              |
| deleted    | boolean | the topic is being deleted; left out: it is not                                  |
| properties | object  | set by Pulsar's tools                                                            |
| others     | any     | kept                                                                             |

Source: Pulsar PartitionedTopicMetadata.
"""

from typing import Any, Final, Self

import msgspec
from bindery_core.errors import Corrupt

STORED_MAX: Final = 100_000
"""Maximum number of partitions that is read. Above it, the record is damaged."""


class PartitionedRecord(msgspec.Struct, frozen=True):
    partitions: int
    is_deleted: bool = False
    members: dict[str, Any] = {}
    """All members as stored."""

    @classmethod
    def decode(cls, data: bytes, *, path: str) -> Self:
        """Return the record. Raises Corrupt."""
        try:
            members = msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Corrupt("the metadata of a partitioned topic cannot be read", path=path) from error
        partitions, deleted = members.get("partitions", 0), members.get("deleted", False)
        if type(partitions) is not int or not 0 <= partitions <= STORED_MAX or type(deleted) is not bool:
            raise Corrupt("the metadata of a partitioned topic has invalid members", path=path)
        return cls(partitions, deleted, members)

    def encode(self) -> bytes:
        members = {**self.members, "partitions": self.partitions}
        members.pop("deleted", None)
        if self.is_deleted:
            members["deleted"] = True
        return msgspec.json.encode(members)
