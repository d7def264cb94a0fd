"""What brokers write: values of topics and cursors, records of cursor ledgers, entries, and their names. Pure."""
