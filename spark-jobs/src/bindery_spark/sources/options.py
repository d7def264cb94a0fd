"""Options of the data sources `bindery-metadata` and `bindery-ledgers`, as in `option(name, value)`. Pure.

| option             | sources  | default        | meaning                                                            |
|--------------------|----------|----------------|--------------------------------------------------------------------|
| zookeeper          | both     | (required)     | ZooKeeper servers: HOST:PORT[,HOST:PORT...][/CHROOT]               |
| ledgers_root       | both     | /ledgers       | root znode of the cluster                                          |
| table              | metadata | ledgers        | ledgers, bookies, marks, topics, cursors or verified               |
| ledgers_per_part   | metadata | 5000           | number of ledgers whose metadata one task reads                    |
| entries            | ledgers  | all            | entries to read: `all`; `ends`: first and last entry of each       |
|                    |          |                | bookie's share; `listed`: the bookie's entry list, and the ends    |
| rate               | ledgers  | 0              | maximum bytes/s from one bookie, all tasks together; 0: unlimited  |
| readers_per_bookie | ledgers  | 2              | maximum tasks that read one bookie at a time, over all jobs        |
| timeout_s          | ledgers  | 10             | per-bookie read timeout in seconds                                 |
| partition_bytes    | ledgers  | 67108864       | maximum estimated payload bytes of one task                        |
| partition_entries  | ledgers  | 250000         | maximum entries of one task                                        |
| include_unexpected | ledgers  | false          | also list orphaned data: entries that no metadata assigns to the   |
|                    |          |                | bookie                                                             |

Both sources also take the options in `bindery_client.connection.security`, the credentials presented to bookies, and
those in `bindery_metadata.stores.zookeeper_access` with `zookeeper_` before their names. They name files, because Spark
prints options: tokens and passwords are never options. What is not given is taken from the environment of the driver.

Sizes and rates may have a unit: 20MiB, 20MiB/s, 64KiB, 1GiB. The options of `bindery-topic` are in
`bindery_spark.sources.topic.options`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bindery_client.connection.security import NO_FILES, VARIABLES, SecurityFiles
from bindery_core.errors import BadRequest
from bindery_metadata.layout.layout import LEDGERS_ROOT_DEFAULT
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, AccessFiles
from bindery_metadata.stores.zookeeper_access import VARIABLES as ZOOKEEPER_VARIABLES

LEDGERS_FORMAT: Final = "bindery-ledgers"
METADATA_FORMAT: Final = "bindery-metadata"
ENTRIES: Final = ("all", "listed", "ends")
TABLE_NAMES: Final = ("ledgers", "bookies", "marks", "topics", "cursors", "verified")

_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(B|KiB|MiB|GiB)?(?:/s)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
ZOOKEEPER_OPTIONS: Final = {f"zookeeper_{name}": variable for name, variable in ZOOKEEPER_VARIABLES.items()}
"""Environment variable by option, for the files with which jobs connect to ZooKeeper."""
COMMON: Final = ("zookeeper", "ledgers_root", *VARIABLES, *ZOOKEEPER_OPTIONS)
SECRETS: Final = ("token", "password", "credentials")
"""Names that are refused with a hint, because users may expect options whose values are secrets."""
NOTHING: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataOptions:
    """Parsed options of `bindery-metadata`, see the module."""

    zookeeper: str
    ledgers_root: str = LEDGERS_ROOT_DEFAULT
    security: SecurityFiles = NO_FILES
    access: AccessFiles = NO_ACCESS
    table: str = "ledgers"
    ledgers_per_part: int = 5_000

    @classmethod
    def parse(cls, options: Mapping[str, str], environment: Mapping[str, str] = NOTHING) -> "MetadataOptions":
        """Parse `options`. Raises BadRequest with the option's name and its valid values."""
        given = GivenOptions(options, environment, (*COMMON, "table", "ledgers_per_part"))
        return cls(
            zookeeper=given.zookeeper(),
            security=given.security(),
            access=given.access(),
            ledgers_root=given.text("ledgers_root", LEDGERS_ROOT_DEFAULT),
            table=given.one_of("table", TABLE_NAMES, "ledgers"),
            ledgers_per_part=given.count("ledgers_per_part", 5_000),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgersOptions:
    """Parsed options of `bindery-ledgers`, see the module."""

    zookeeper: str
    ledgers_root: str = LEDGERS_ROOT_DEFAULT
    security: SecurityFiles = NO_FILES
    access: AccessFiles = NO_ACCESS
    entries: str = "all"
    rate: float = 0.0
    readers_per_bookie: int = 2
    timeout_s: float = 10.0
    partition_bytes: int = 64 * 2**20
    partition_entries: int = 250_000
    include_unexpected: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str], environment: Mapping[str, str] = NOTHING) -> "LedgersOptions":
        """Parse `options`. Raises BadRequest with the option's name and its valid values."""
        names = ("entries", "rate", "readers_per_bookie", "timeout_s", "partition_bytes", "partition_entries")
        given = GivenOptions(options, environment, (*COMMON, *names, "include_unexpected"))
        return cls(
            zookeeper=given.zookeeper(),
            security=given.security(),
            access=given.access(),
            ledgers_root=given.text("ledgers_root", LEDGERS_ROOT_DEFAULT),
            entries=given.one_of("entries", ENTRIES, "all"),
            rate=given.size("rate", 0.0),
            readers_per_bookie=given.count("readers_per_bookie", 2),
            timeout_s=given.seconds("timeout_s", 10.0),
            partition_bytes=int(given.size("partition_bytes", 64 * 2**20)) or 1,
            partition_entries=given.count("partition_entries", 250_000),
            include_unexpected=given.one_of("include_unexpected", ("true", "false"), "false") == "true",
        )


def named_files(given: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the options about credentials, each from `given` or, if it is missing or empty there, from its variable.
    Those that are set nowhere are omitted."""
    found = {
        name: given.get(name) or environment.get(variable, "")
        for name, variable in {**VARIABLES, **ZOOKEEPER_OPTIONS}.items()
    }
    return {name: value for name, value in found.items() if value}


def parse_size(text: str, *, name: str = "size") -> float:
    """Convert a size or a rate to bytes or bytes/s: `20MiB/s` is 20971520. Raises BadRequest."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadRequest(f"option {name} must be a number of bytes, perhaps with B, KiB, MiB or GiB", value=text)
    return float(match[1]) * _UNITS[(match[2] or "").lower()]


class GivenOptions:
    """Options as the user gave them. Spark passes option names in lower case, whatever the user wrote."""

    def __init__(self, options: Mapping[str, str], environment: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._environment = environment
        self._options = {name.lower(): value for name, value in options.items()}
        for name in self._options:
            if name in SECRETS and name not in known:
                raise BadRequest(
                    f"option {name} does not exist, because Spark prints options: name a file, in token_file"
                )
            if name not in known and name != "path":
                raise BadRequest(f"unknown option {name}; known options: {', '.join(known)}")

    def text(self, name: str, default: str) -> str:
        return self._options.get(name, default)

    def zookeeper(self) -> str:
        value = self._options.get("zookeeper", "")
        if not value:
            raise BadRequest("option zookeeper is missing: HOST:PORT of the cluster's ZooKeeper")
        return value

    def security(self) -> SecurityFiles:
        return SecurityFiles.of(self._options, self._environment)

    def access(self) -> AccessFiles:
        given = {variable: self._options.get(name, "") for name, variable in ZOOKEEPER_OPTIONS.items()}
        return AccessFiles.of({**self._environment, **{name: value for name, value in given.items() if value}})

    def one_of(self, name: str, values: tuple[str, ...], default: str) -> str:
        value = self._options.get(name, default).lower()
        if value not in values:
            raise BadRequest(f"option {name} must be one of {', '.join(values)}", value=value)
        return value

    def count(self, name: str, default: int, *, least: int = 1) -> int:
        text = self._options.get(name, str(default))
        if not text.isdecimal() or int(text) < least:
            raise BadRequest(f"option {name} must be a whole number of at least {least}", value=text)
        return int(text)

    def seconds(self, name: str, default: float) -> float:
        text = self._options.get(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < 86_400:
            raise BadRequest(f"option {name} must be seconds, above 0", value=text)
        return value

    def size(self, name: str, default: float) -> float:
        text = self._options.get(name)
        return default if text is None else parse_size(text, name=name)
