"""The journal: group commit, its file format, and LastLogMark."""
