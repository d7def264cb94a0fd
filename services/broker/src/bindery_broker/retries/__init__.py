"""Move messages to retry and dead-letter topics, each of them exactly once."""
