"""The bookie: stores ledger entries durably and serves them."""
