"""Calls that change or examine a topic as a whole, rarely: its properties, its end, the backlog of a subscription."""
