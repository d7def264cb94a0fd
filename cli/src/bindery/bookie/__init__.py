"""`bindery bookie`: look at a bookie's files, repair what can be repaired offline, ask a running one."""
