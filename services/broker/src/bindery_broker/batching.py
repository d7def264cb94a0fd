"""Which messages of a request share an entry.

(Signatures first: bodies follow.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bindery_broker.message_codec import OutgoingMessage
from bindery_broker.message_id import MessageId, Position

BATCH_MESSAGES_MAX: Final = 1_000
BATCH_SIZE_MAX: Final = 128 * 2**10


@dataclass(frozen=True, slots=True)
class EntryPlan:
    indexes: tuple[int, ...]
    """Of the request's messages, ascending. One: a plain message; more: a batch."""


def plan_entries(
    messages: Sequence[OutgoingMessage],
    *,
    batch: bool = True,
    keep_order: bool = True,
    messages_max: int = BATCH_MESSAGES_MAX,
    size_max: int = BATCH_SIZE_MAX,
) -> list[EntryPlan]:
    """Split messages into entries: those of one entry agree in key, delivery time and tags.

    `keep_order`: entries follow the request's order, so a change of key ends a batch; False gathers equal ones from all
    over the request (order holds per key then). Raises TooLarge naming the message's index.
    """
    raise NotImplementedError


def encode_entries(
    messages: Sequence[OutgoingMessage],
    plan: Sequence[EntryPlan],
    *,
    producer_name: str,
    publish_time_ms: int,
    sequence_id: int,
) -> list[bytes]:
    """The entries' bytes, for `ManagedLedger.add_many`. Messages are numbered from `sequence_id` in request order."""
    raise NotImplementedError


def message_ids(plan: Sequence[EntryPlan], positions: Sequence[Position], *, partition: int = -1) -> list[MessageId]:
    """The messages' ids in request order; `positions`: of the entries, in the plan's order."""
    raise NotImplementedError
