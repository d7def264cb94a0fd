"""What commands share: connections, tables, progress, entries."""
