"""`bindery wire`."""
