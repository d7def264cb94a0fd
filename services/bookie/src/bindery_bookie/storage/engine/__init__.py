"""The storage engine: one shard assembled from its parts, and the shards of a bookie."""
