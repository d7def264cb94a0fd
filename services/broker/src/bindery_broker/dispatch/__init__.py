"""Decide which consumer gets which message: pure state machines with time as an argument.

`item` defines the messages, and `consumers` who gets them. `sessions` holds the consumers of a subscription, `portions`
the messages that are known, and `leases` those that consumers hold and until when. `shared`, `key_shared` and
`single_active` decide what is delivered; `dispatcher` is what they have in common. `key_ranges` decides which consumer
owns a key, and `failover` which consumer is active. `read_ahead` counts the bytes that all of them hold in memory. The
I/O around them is in `bindery_broker.subscriptions`.
"""
