"""Counters and rates of consumers, subscriptions and topics. Pure; the owners of the events call them."""
