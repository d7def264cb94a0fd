"""Recovery over HTTP: administration, metrics, last audits."""
