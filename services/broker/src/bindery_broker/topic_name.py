"""Topic names are in `bindery_metadata.topics.topic_name`, for readers that are no brokers, too."""

from bindery_metadata.topics.topic_name import (
    LOCAL_NAME_SIZE_MAX,
    NAME_SIZE_MAX,
    TopicName,
    validate_subscription,
)

__all__ = [
    "LOCAL_NAME_SIZE_MAX",
    "NAME_SIZE_MAX",
    "TopicName",
    "validate_subscription",
]
