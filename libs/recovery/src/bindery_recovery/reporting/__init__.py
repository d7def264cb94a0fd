"""Progress of recovery, and why a ledger is not healed."""
