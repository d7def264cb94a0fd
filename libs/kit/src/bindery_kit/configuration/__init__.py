"""Settings: sources, validation, bounds."""
