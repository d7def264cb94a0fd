"""The auditor process. `bindery_recovery` implements recovery."""
