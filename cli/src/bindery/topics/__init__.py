"""`bindery topics`, `bindery produce` and `bindery consume`."""
