"""Reasons and sentences that checks, repair and reports share."""
