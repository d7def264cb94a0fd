"""Ledger protocol, formats and decisions of Bindery: pure, no I/O."""
