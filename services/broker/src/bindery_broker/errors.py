"""Errors of the broker's own, beside bindery_core.errors.

| error            | code             | status | when                                                         |
|------------------|------------------|-------:|--------------------------------------------------------------|
| NotSupported     | not_supported    |    400 | Pulsar has it, this version has not                           |
| ConsumerBusy     | consumer_busy    |    409 | another consumer holds the exclusive subscription             |
| SubscriptionTypeConflict | subscription_type_conflict | 409 | it is consumed as another type now |
| UnknownMessages  | unknown_messages |    400 | ids to acknowledge that name no message: nothing was done      |
| TopicInUse       | topic_in_use     |    409 | deletion while consumers are connected                        |
| NotOwner         | not_owner        |    503 | the topic's owner is changing; ask again                      |
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
