"""The directory of a crashed bookie and its files."""

from bookie_files import bookie, current, index, journal, log, pristine

__all__ = ["bookie", "current", "index", "journal", "log", "pristine"]
