"""Attacks on real processes, which run with limited memory."""
