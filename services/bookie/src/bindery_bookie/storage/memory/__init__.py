"""State that the storage engine keeps in memory: ledgers, write cache, read cache."""
