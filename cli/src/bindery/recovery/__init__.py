"""`bindery recovery`."""
