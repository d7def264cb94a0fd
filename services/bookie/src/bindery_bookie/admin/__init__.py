"""The bookie's admin HTTP API: BookKeeper's paths and responses, and paths that BookKeeper does not have.

Import `admin.app` only where the HTTP server starts: the ledger port serves before this package is loaded.
"""
