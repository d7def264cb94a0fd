"""The MetadataStore interface, its ZooKeeper and in-memory implementations, and helpers on top."""
