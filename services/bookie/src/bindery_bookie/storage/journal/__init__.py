"""The journal: group commit, file format, reading, and LastLogMark."""
