"""Traffic: producers, consumers and their payloads."""
