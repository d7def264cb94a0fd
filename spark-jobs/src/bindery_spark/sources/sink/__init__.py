"""The data source `bindery-topic` as a sink: rows become messages of topics, each exactly once."""
