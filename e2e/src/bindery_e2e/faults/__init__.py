"""Faults that are injected and healed."""
