"""Findings of an audit: kinds, summary, report, differences between runs, suggested actions."""
