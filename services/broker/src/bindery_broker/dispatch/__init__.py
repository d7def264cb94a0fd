"""Decide which consumer gets which message: pure state machines with time as an argument.

`sessions` holds the consumers of a subscription, `leases` the messages that they hold and until when. `shared` and
`exclusive` decide what is delivered. `key_ranges` decides which consumer owns a key, and `failover` which consumer is
active. `read_ahead` counts the bytes that all of them hold in memory, `item` defines the messages. The I/O around them
is in `bindery_broker.subscriptions`.
"""
