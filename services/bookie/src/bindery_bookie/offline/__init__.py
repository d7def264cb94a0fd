"""Read and repair the files of a stopped bookie. The verbs of `bindery bookie` that take DIR call this package."""
