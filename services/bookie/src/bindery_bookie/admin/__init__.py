"""The bookie's admin HTTP API: BookKeeper's paths and answers, and what BookKeeper has no path for.

Import `admin.app` only where the HTTP server starts: the ledger port serves before any of this is loaded.
"""
