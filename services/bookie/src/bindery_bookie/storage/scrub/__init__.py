"""Background verification of entry logs and index."""
