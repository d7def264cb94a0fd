"""`bindery tokens`."""
