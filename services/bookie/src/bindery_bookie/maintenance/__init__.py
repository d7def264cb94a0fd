"""Background work: garbage collection, repair from other bookies, disk watermarks."""
