"""Errors of the broker, in addition to bindery_core.errors.

| error            | code             | status | when                                                         |
|------------------|------------------|-------:|--------------------------------------------------------------|
| NotSupported     | not_supported    |    400 | a feature of Pulsar that this version lacks                   |
| ConsumerBusy     | consumer_busy    |    409 | another consumer holds the exclusive subscription             |
| SubscriptionTypeConflict | subscription_type_conflict | 409 | it is now consumed as another type |
| UnknownMessages  | unknown_messages |    400 | ids to acknowledge that name no message: none is acknowledged  |
| TopicInUse       | topic_in_use     |    409 | deletion while consumers are connected                        |
| NotOwner         | not_owner        |    503 | the topic's owner is changing; retry                          |
| NoSuchMessage    | no_such_message  |    404 | no entry, or no such index in its batch                       |
"""

from bindery_core.errors import BadRequest, Conflict, NotThere, TryAgain


class NotSupported(BadRequest):
    code = "not_supported"


class ConsumerBusy(Conflict):
    code = "consumer_busy"


class SubscriptionTypeConflict(Conflict):
    code = "subscription_type_conflict"


class TopicInUse(Conflict):
    code = "topic_in_use"


class NotOwner(TryAgain):
    code = "not_owner"


class NoSuchMessage(NotThere):
    code = "no_such_message"


class UnknownMessages(BadRequest):
    """Ids in a request that name no message of the topic; nothing of the request was done."""

    code = "unknown_messages"
