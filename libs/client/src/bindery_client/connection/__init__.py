"""Connections to bookies: pool, TLS, credentials, budget of bytes in flight."""
