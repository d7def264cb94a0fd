"""`bindery bookie`: inspect, check and repair the files of a stopped bookie; inspect and control a running one."""
