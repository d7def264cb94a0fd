"""Topics that this broker serves: loading, publishing, batching."""
