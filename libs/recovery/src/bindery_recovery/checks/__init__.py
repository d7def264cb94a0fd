"""Checks that the leading auditor runs: lost bookies, all ledgers, replica counts, placement policy, recently closed
ledgers.
"""
