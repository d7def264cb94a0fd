"""Opening a storage: recovery of logs and index, journal replay, salvage."""
