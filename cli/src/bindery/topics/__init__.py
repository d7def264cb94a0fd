"""`bindery topics`, `bindery subscriptions`, `bindery dead-letters`, `bindery produce` and `bindery consume`."""
