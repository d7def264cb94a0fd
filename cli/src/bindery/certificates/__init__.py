"""`bindery certificates`."""
