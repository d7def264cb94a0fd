"""Subscriptions of a topic."""
