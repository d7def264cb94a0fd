"""The audit: read every replica, compare, report."""
