"""The tables: what each source yields and what the audit makes of it. Pure.

| schema   | a row is                                         | from                                       |
|----------|--------------------------------------------------|--------------------------------------------|
| REPLICAS | one entry as one bookie answers for it           | `bindery-ledgers`                          |
| BLOCKS   | hundreds of entries as one bookie answers        | the audit's readers, see `blocks`          |
| LEDGERS  | one ledger's metadata                            | `bindery-metadata`, table `ledgers`        |
| BOOKIES  | one bookie: registered, known by cookie or named | `bindery-metadata`, table `bookies`        |
| MARKS    | one under-replication mark                       | `bindery-metadata`, table `marks`          |
| TOPICS   | one topic and the ledgers that it names          | `bindery-metadata`, table `topics`         |
| CURSORS  | one subscription's position                      | `bindery-metadata`, table `cursors`        |
| VERIFIED | when an audit last found a ledger whole          | `bindery-metadata`, table `verified`       |
| MESSAGES | one message of a topic                          | `bindery-topic`                            |
| FINDINGS | one thing that is wrong                          | the audit                                  |

Times are ms since 1970, sizes bytes. What is nullable can be unknown; null says "not known", never "none".
"""

from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

NO_LEDGER: Final = -1
"""As `ledger_id` of BLOCKS and of coverage: what is said is said of the bookie."""
NO_SEGMENT: Final = -1
"""As `segment`: metadata name this bookie for no such entry, so it belongs to no segment of this bookie's."""


def _field(name: str, kind: object, *, nullable: bool = False) -> StructField:
    return StructField(name, kind, nullable)  # type: ignore[arg-type]


_TEXTS: Final = ArrayType(StringType(), containsNull=False)

REPLICAS: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("segment", IntegerType()),  # index in the metadata's list, from 0; or NO_SEGMENT
        _field("entry_id", LongType()),
        _field("bookie", StringType()),
        _field("expected", BooleanType()),  # metadata name this bookie for this entry, which is confirmed
        _field("present", BooleanType(), nullable=True),  # false: definitely denied; null: it could not say, see error
        _field("digest_ok", BooleanType(), nullable=True),  # null: absent, or nothing to check it with
        _field("ledger_length", LongType(), nullable=True),  # of the entry's header; these four only if digest_ok
        _field("payload_length", IntegerType(), nullable=True),
        _field("payload_crc32c", LongType(), nullable=True),
        _field("lac", LongType(), nullable=True),
        _field("error", StringType(), nullable=True),  # `unreachable: ...`; null: the bookie answered
    ]
)

BLOCKS: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("segment", IntegerType()),
        _field("block", LongType()),
        _field("stripe", IntegerType()),
        _field("bookie", StringType()),
        _field("expected", BooleanType()),
        _field("first_entry", LongType()),
        _field("last_entry", LongType()),
        _field("step", IntegerType()),
        _field("copies", LongType()),  # that were asked for
        _field("bad", LongType()),  # of them: missing, corrupt, damaged
        _field("unknown", LongType()),  # of them: the bookie could not say
        _field("bytes", LongType()),  # of payloads that were verified
        _field("fingerprint", LongType(), nullable=True),
        _field("end_length", LongType(), nullable=True),  # the ledger's, as the copy of last_entry says
        _field("reason", StringType(), nullable=True),
        _field("states", BinaryType(), nullable=True),
        _field("facts", BinaryType(), nullable=True),
    ]
)

SEGMENT: Final = StructType(
    [
        _field("first_entry", LongType()),
        _field("last_entry", LongType(), nullable=True),  # null: the last segment of a ledger that is not closed
        _field("ensemble", _TEXTS),
    ]
)

LEDGERS: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("state", StringType()),  # open | in_recovery | closed
        _field("ensemble_size", IntegerType()),
        _field("write_quorum", IntegerType()),
        _field("ack_quorum", IntegerType()),
        _field("digest_type", StringType()),  # crc32 | mac | crc32c | dummy
        _field("last_entry_id", LongType(), nullable=True),  # of a closed ledger; -1: it is empty
        _field("length", LongType(), nullable=True),
        _field("created_ms", LongType(), nullable=True),
        _field("custom", MapType(StringType(), BinaryType(), valueContainsNull=False)),
        _field("segments", ArrayType(SEGMENT, containsNull=False)),
        _field("metadata_version", IntegerType()),  # of the znode
        _field("problem", StringType(), nullable=True),  # why the znode cannot be read; quorums are then 0
    ]
)

BOOKIES: Final = StructType(
    [
        _field("bookie", StringType()),
        _field("registration", StringType()),  # writable | read_only | absent
        _field("intent", StringType()),  # active | joining | maintenance | draining | removed
        _field("cookie", BooleanType()),
        _field("rack", StringType(), nullable=True),  # null: no rack is known
        _field("free_bytes", LongType(), nullable=True),  # null: it does not answer
        _field("total_bytes", LongType(), nullable=True),
    ]
)

MARKS: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("bookies", _TEXTS),  # empty: the mark does not say
        _field("reason", StringType(), nullable=True),
        _field("marked_at_ms", LongType(), nullable=True),
        _field("attempts", IntegerType()),
        _field("locked", BooleanType()),  # a worker is at it
    ]
)

TOPIC_LEDGER: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("entries", LongType()),  # last known counts; 0 in the ledger that is being written
        _field("bytes", LongType()),
        _field("closed_ms", LongType(), nullable=True),  # null: being written
    ]
)

TOPICS: Final = StructType(
    [
        _field("topic", StringType()),  # tenant/namespace/local name, as users write it
        _field("ledgers", ArrayType(TOPIC_LEDGER, containsNull=False)),
        _field("problem", StringType(), nullable=True),  # why the znode cannot be read; no ledgers then
    ]
)

CURSORS: Final = StructType(
    [
        _field("topic", StringType()),
        _field("subscription", StringType()),
        _field("mark_delete_ledger", LongType(), nullable=True),  # null: said in the cursor ledger only
        _field("mark_delete_entry", LongType(), nullable=True),  # -1: before the ledger's first entry
        _field("cursor_ledger_id", LongType(), nullable=True),  # null: it has none
        _field("problem", StringType(), nullable=True),
    ]
)

VERIFIED: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("level", StringType()),  # quick | standard | deep
        _field("verified_at_ms", LongType()),
        _field("run_id", StringType()),
    ]
)

MESSAGES: Final = StructType(
    [
        _field("message_id", StringType()),  # ledger:entry:partition:batch index, as brokers write it
        _field("ledger_id", LongType()),
        _field("entry_id", LongType()),
        _field("batch_index", IntegerType()),  # -1: the entry's only message
        _field("publish_time", TimestampType(), nullable=True),  # null: unknown, see problem
        _field("event_time", TimestampType(), nullable=True),  # null: the producer gave none; or see problem
        _field("key", StringType(), nullable=True),
        _field("key_is_base64", BooleanType()),  # the producer's key was bytes
        _field("properties", MapType(StringType(), StringType(), valueContainsNull=False)),
        _field("payload", BinaryType(), nullable=True),  # null: a tombstone, or see problem
        _field("producer", StringType(), nullable=True),
        _field("sequence_id", LongType(), nullable=True),
        _field("problem", StringType(), nullable=True),  # why the entry cannot be taken apart (encrypted, ...), or
        # `sources.topic.rows.OUT_OF_RANGE` and what is null since no column can hold it
    ]
)

FINDINGS: Final = StructType(
    [
        _field("run_id", StringType()),
        _field("ledger_id", LongType(), nullable=True),
        _field("segment", IntegerType(), nullable=True),
        _field("first_entry", LongType(), nullable=True),
        _field("last_entry", LongType(), nullable=True),  # runs of entries are one finding
        _field("bookie", StringType(), nullable=True),
        _field("kind", StringType()),
        _field("severity", StringType()),  # info | warning | under_replicated | corrupt | unreadable | incomplete
        _field("expected", StringType(), nullable=True),
        _field("found", StringType(), nullable=True),
        _field("evidence_hash", StringType()),
        _field("first_seen_ms", LongType()),
        _field("repairable", BooleanType()),
        _field("action", StringType(), nullable=True),
    ]
)

TABLES: Final = {
    "ledgers": LEDGERS,
    "bookies": BOOKIES,
    "marks": MARKS,
    "topics": TOPICS,
    "cursors": CURSORS,
    "verified": VERIFIED,
}
"""The tables of `bindery-metadata` by the option `table`."""
