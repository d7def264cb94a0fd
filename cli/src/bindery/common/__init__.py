"""Code that commands share: connections, tables, progress, entries."""
