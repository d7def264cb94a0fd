"""Which broker gets which bundle: loads, choices, moves of the leader, splits."""
