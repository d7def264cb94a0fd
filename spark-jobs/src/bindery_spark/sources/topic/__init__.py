"""Data source `bindery-topic`: the messages of a topic, as a batch and as a stream."""
