"""Schemas of topics: their versions, stored as Pulsar stores them, and whether a new one is compatible.

`codec` has the formats, `definitions` parses Avro, `compatibility` decides, `store` reads and writes, `registry` puts
them together.
"""
