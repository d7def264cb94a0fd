"""The auditor: a cluster's healing as a process of its own. `bindery_recovery` has the healing, this the process."""
