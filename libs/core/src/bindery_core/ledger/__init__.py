"""The ledger protocol as pure objects: writer, reader, recovery."""
