"""Adapters to the operating system and LevelDB: disk, key-value store, worker threads, fault injection."""
