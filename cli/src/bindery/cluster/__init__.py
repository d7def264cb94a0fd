"""`bindery cluster`."""
