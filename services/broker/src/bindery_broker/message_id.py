"""Message ids are in `bindery_metadata.topics.message_id`, for readers that are no brokers, too."""

from bindery_metadata.topics.message_id import (
    EARLIEST,
    LATEST,
    MessageId,
    Position,
)

__all__ = [
    "EARLIEST",
    "LATEST",
    "MessageId",
    "Position",
]
