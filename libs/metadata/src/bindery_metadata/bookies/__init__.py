"""Bookies in the store: cookies, registration, membership, directory."""
