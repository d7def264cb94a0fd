"""`bindery brokers`."""
