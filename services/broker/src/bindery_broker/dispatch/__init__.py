"""Who gets which message: pure state machines with time as an argument.

`sessions` says who is a member, `leases` who holds what until when, `shared` and `exclusive` decide what is handed out.
`read_ahead` counts what all of them have at hand, `item` names what passes through them. The I/O around them is
`bindery_broker.subscriptions.subscription`.
"""
