"""The MetadataStore interface, its ZooKeeper and in-memory implementations, and helpers that use the interface."""
