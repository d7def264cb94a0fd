"""Positions and message ids.

| form         | text                                        | example       |
|--------------|---------------------------------------------|---------------|
| `Position`   | `ledgerId:entryId`                          | `5:0`         |
| `MessageId`  | `ledgerId:entryId:partition:batchIndex`     | `5:0:-1:2`    |

A position identifies an entry of a topic. A message id identifies a message, which may be one of several in the batch
of its entry. -1 means "not partitioned" and "not in a batch". Order: ledger, entry, batch index, partition. An id is
unique within its partition. Entry -1 of a ledger is the position before its first entry; it is not the id of a message.
Source: Pulsar MessageIdData; the text form with all four parts is the admin API's.
"""

import re
from typing import Final, NamedTuple, Self

from bindery_core.errors import BadRequest
from bindery_core.ids import ID_MAX

from bindery_pulsar.managed_ledger_records import Position

__all__ = ["EARLIEST", "LATEST", "MessageId", "Position"]

PARTITION_MAX: Final = 2**31 - 1
BATCH_INDEX_MAX: Final = 2**31 - 1
MESSAGE_ID_TEXT_SIZE_MAX: Final = 64
"""Maximum characters of a message id. Two 19-digit and two 10-digit numbers with three colons take 61 characters."""

_NUMBER = r"(-1|0|[1-9][0-9]{0,18})"
_MESSAGE_ID = re.compile(rf"{_NUMBER}:{_NUMBER}(?::{_NUMBER})?(?::{_NUMBER})?", re.ASCII)


EARLIEST: Final = Position(-1, -1)
"""Position before every entry."""
LATEST: Final = Position(ID_MAX, ID_MAX)
"""Position after every entry, including future ones."""


class MessageId(NamedTuple):
    """The id of a message. Compares by ledger, entry, batch index, partition."""

    ledger_id: int
    entry_id: int
    batch_index: int = -1
    """Index in the entry's batch, from 0; -1: the entry is not a batch, or the whole entry is meant."""
    partition: int = -1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `ledger:entry`, optionally with `:partition` or `:partition:batchIndex` after it.

        Raises BadRequest with the text (truncated) for anything else and for a number out of range.
        """
        found = _MESSAGE_ID.fullmatch(text) if len(text) <= MESSAGE_ID_TEXT_SIZE_MAX else None
        if found is None:
            raise BadRequest(
                "not a message id, want ledgerId:entryId:partition:batchIndex",
                message_id=text[:MESSAGE_ID_TEXT_SIZE_MAX],
            )
        ledger_id, entry_id, partition, batch_index = (-1 if part is None else int(part) for part in found.groups())
        if not (0 <= ledger_id <= ID_MAX and 0 <= entry_id <= ID_MAX):
            raise BadRequest("ledger and entry id must be 0 to 2^63 - 1", message_id=text)
        if partition > PARTITION_MAX or batch_index > BATCH_INDEX_MAX:
            raise BadRequest("partition and batch index must be -1 to 2^31 - 1", message_id=text)
        return cls(ledger_id, entry_id, batch_index, partition)

    @classmethod
    def of(cls, position: Position, *, batch_index: int = -1, partition: int = -1) -> Self:
        return cls(position.ledger_id, position.entry_id, batch_index, partition)

    @property
    def position(self) -> Position:
        return Position(self.ledger_id, self.entry_id)

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}:{self.partition}:{self.batch_index}"
