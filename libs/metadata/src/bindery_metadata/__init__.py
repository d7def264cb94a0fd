"""Cluster metadata: the MetadataStore interface, ZooKeeper and in-memory stores, the znode layout."""
