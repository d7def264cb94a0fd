"""The writer of a topic: entries go to the current ledger; a switch ends it and starts the next one."""
