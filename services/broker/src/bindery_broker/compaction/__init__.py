"""Compaction of topics: keep the last message of each key in a ledger of its own.

`raw_message` and `batches` have the formats, `survivors` decides which messages stay, `compacted_ledger` and `view`
read, `compactor` writes, `topic_compaction` runs it for one topic.
"""
