"""Authentication and TLS of connections to port 3181."""
