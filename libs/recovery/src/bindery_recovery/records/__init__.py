"""Reasons and sentences shared by checks, repair and reports."""
