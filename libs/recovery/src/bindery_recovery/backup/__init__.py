"""Backup and restore of metadata."""
