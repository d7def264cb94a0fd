"""Opening a storage: checks of logs and index, index rebuild, journal replay, salvage."""
