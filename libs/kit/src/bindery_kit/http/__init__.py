"""HTTP servers: limits, life cycle, problem responses."""
