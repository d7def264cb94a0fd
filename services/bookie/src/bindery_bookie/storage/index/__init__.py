"""The LevelDB index from (ledger, entry) to a location in an entry log."""
