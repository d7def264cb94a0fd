"""Checks of the leading auditor: bookies, full, replica, placement, recently closed ledgers."""
