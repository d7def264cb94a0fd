"""Options of the data source `bindery-topic`. Pure.

| option                  | default    | meaning                                                                       |
|-------------------------|------------|-------------------------------------------------------------------------------|
| topic                   | (required) | `t`, `tenant/namespace/t` or `persistent://...`; all its partitions are read  |
| start                   | earliest   | first entry (LEDGER:ENTRY) or publish time (ISO 8601); `earliest`; `latest`   |
|                         |            | for streams only                                                              |
| end                     | latest     | last entry (LEDGER:ENTRY, inclusive) or publish time (exclusive); tables only |
| rate                    | 0          | maximum payload bytes/s of each task; 0: unlimited                            |
| max_entries_per_trigger | 0          | maximum entries in one micro-batch, all partitions together; 0: unlimited     |
| fail_on_data_loss       | true       | `false`: skip ledgers that retention deleted before they were read            |
| partition_entries       | 50000      | maximum entries of one task                                                   |

`zookeeper`, `ledgers_root`, `timeout_s`, `partition_bytes` and credentials: see `bindery_spark.sources.options`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bindery_client.connection.security import NO_FILES, SecurityFiles
from bindery_core.errors import BadRequest
from bindery_metadata.layout.layout import LEDGERS_ROOT_DEFAULT
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, AccessFiles
from bindery_pulsar.topic_name import TopicName

from bindery_spark.sources.options import COMMON, NOTHING, GivenOptions
from bindery_spark.sources.topic.positions import ALL, Bounds, parse_bounds

TOPIC_FORMAT: Final = "bindery-topic"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicOptions:
    """Parsed options of `bindery-topic`, see the module."""

    zookeeper: str
    topic: TopicName
    ledgers_root: str = LEDGERS_ROOT_DEFAULT
    security: SecurityFiles = NO_FILES
    access: AccessFiles = NO_ACCESS
    bounds: Bounds = ALL
    rate: float = 0.0
    timeout_s: float = 10.0
    partition_bytes: int = 64 * 2**20
    partition_entries: int = 50_000
    max_entries_per_trigger: int = 0
    fail_on_data_loss: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, str], environment: Mapping[str, str] = NOTHING) -> "TopicOptions":
        """Parse `options`. Raises BadRequest with the option's name and its valid values."""
        names = ("topic", "start", "end", "rate", "timeout_s", "partition_bytes", "partition_entries")
        given = GivenOptions(options, environment, (*COMMON, *names, "max_entries_per_trigger", "fail_on_data_loss"))
        topic = given.text("topic", "")
        if not topic:
            raise BadRequest("option topic is missing: a topic's name, like tenant/namespace/topic")
        return cls(
            zookeeper=given.zookeeper(),
            security=given.security(),
            access=given.access(),
            topic=TopicName.parse(topic),
            ledgers_root=given.text("ledgers_root", LEDGERS_ROOT_DEFAULT),
            bounds=parse_bounds(given.text("start", "earliest"), given.text("end", "latest")),
            rate=given.size("rate", 0.0),
            timeout_s=given.seconds("timeout_s", 10.0),
            partition_bytes=int(given.size("partition_bytes", 64 * 2**20)) or 1,
            partition_entries=given.count("partition_entries", 50_000),
            max_entries_per_trigger=given.count("max_entries_per_trigger", 0, least=0),
            fail_on_data_loss=given.one_of("fail_on_data_loss", ("true", "false"), "true") == "true",
        )
