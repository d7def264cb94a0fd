"""The znode layout of BookKeeper, Pulsar and Bindery."""
