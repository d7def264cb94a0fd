"""Pulsar's formats without I/O: names, message ids, entries, and the metadata of managed ledgers and cursors."""
