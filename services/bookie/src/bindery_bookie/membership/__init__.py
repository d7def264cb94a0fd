"""The bookie in its cluster: cookie, addresses, directory lock, registration, membership."""
