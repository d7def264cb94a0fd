"""The index of delayed messages: which messages of a subscription are due, and when.

`index` is the machine that dispatchers use, `bucket` holds up to 65,532 messages in columns, `bucket_codec` defines how
a bucket is stored. All of it is pure: time is an argument, and storing is the owner's work.
"""

from bindery_broker.dispatch.delays.index import Changes, DelayIndex

__all__ = ["Changes", "DelayIndex"]
