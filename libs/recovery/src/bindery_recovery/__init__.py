"""Recovery: detect lost bookies, restore under-replicated ledgers, drain bookies, back up metadata."""
