"""Tools that read and repair the files of a stopped bookie."""
