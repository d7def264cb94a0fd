"""The life cycle of a service process."""
