"""Draining bookies, and the gate before an upgrade or rollback."""
