"""The report of a run, with its picture."""
