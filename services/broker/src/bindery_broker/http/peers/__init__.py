"""Requests to other brokers: moves to their topics, and retry topics that they own."""
