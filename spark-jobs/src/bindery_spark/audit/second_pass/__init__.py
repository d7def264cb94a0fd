"""The second pass: ledgers with findings, or that changed, are read again, and the results of both passes are
merged."""
