"""The bindery command: run a cluster, produce, consume, inspect."""
