"""Find orphaned ledgers: ledgers that no topic, cursor or schema references any more.

Deleting a referenced ledger loses acknowledged messages; keeping an orphan costs only disk space. A ledger is therefore
kept if there is any doubt:

| fate       | the ledger                                                               | deleted             |
|------------|--------------------------------------------------------------------------|---------------------|
| REFERENCED | is named by a topic or a cursor                                          | never               |
| YOUNG      | is younger than the grace period, or of unknown age: its creator may     | never               |
|            | still add a reference                                                    |                     |
| UNCERTAIN  | belongs to an existing or unknown topic or schema, and only data that is | never               |
|            | not read here shows whether it is in use (compaction, schemas, delay     |                     |
|            | buckets); or it has an unknown component                                 |                     |
| UNREADABLE | has metadata that cannot be read                                         | never               |
| FOREIGN    | was created by another application, or does not name its creator         | only on request     |
| ORPHAN     | was created by a broker, and no existing topic, cursor or schema         | yes                 |
|            | refers to it                                                             |                     |

Ledgers are listed before the references are read, so a reference that is added to a listed ledger in the meantime is
found. A reference that cannot be read ends the search: an incomplete list of references must not declare any ledger an
orphan. Before a ledger is deleted, the references of its topic are read again (`still_orphan`).
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, TypeVar

from bindery_core.errors import BadVersion, Corrupt, NoSuchLedger, NoSuchNode
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import LedgerId
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.versioned import Versioned
from bindery_pulsar import znode_layout

T = TypeVar("T")
OUR_APPLICATIONS: Final = frozenset({"pulsar", "bindery"})
"""Values of the custom metadata `application` for ledgers that brokers create."""
SCHEMAS_ROOT: Final = "/schemas"
READS_IN_FLIGHT: Final = 64
"""Maximum number of topics or ledgers read at a time."""

_TOPIC_KEYS: Final = ("pulsar/managed-ledger", "pulsar/compactedTopic", "pulsar/delayedIndexTopic")
"""Custom metadata keys whose value names a topic, as `T/N/persistent/<encoded>` or `persistent://T/N/<local>`."""
_SCHEMA_KEY: Final = "pulsar/schemaId"
_INDIRECT_COMPONENTS: Final = frozenset({"compacted-ledger", "delayed-index-bucket", "schema"})
"""Components whose references are stored inside ledgers."""


class Fate(StrEnum):
    REFERENCED = "referenced"
    YOUNG = "young"
    UNCERTAIN = "uncertain"
    UNREADABLE = "unreadable"
    FOREIGN = "foreign"
    ORPHAN = "orphan"


class TopicCodec(Protocol):
    """Decodes znodes that brokers wrote. Both methods raise Corrupt."""

    def topic_ledgers(self, data: bytes) -> Iterable[int]: ...

    def cursor_ledgers(self, data: bytes) -> Iterable[int]: ...


class Ledgers(Protocol):
    """The part of the ledger client that the search uses."""

    def list_ledgers(self) -> AsyncIterator[LedgerId]: ...

    async def metadata_versioned(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]: ...


@dataclass(frozen=True, slots=True)
class References:
    """Everything that references ledgers in the cluster."""

    named: Mapping[int, str]
    """Ledger id -> the topic, or topic and cursor, that references it."""
    topics: frozenset[str]
    """Managed ledger names, `T/N/persistent/<encoded>`."""
    schemas: frozenset[str]
    """Schema ids, `T/N/<encoded>`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A ledger and its fate."""

    ledger_id: LedgerId
    fate: Fate
    why: str
    application: str = ""
    topic: str = ""
    """Topic to which the ledger belongs according to its custom metadata."""
    created_ms: int | None = None
    state: str = ""
    size: int | None = None
    """Payload bytes of all replicas; None: unknown, because the ledger is not closed."""
    custom: Mapping[str, str] = field(default_factory=dict)


async def read_references(store: MetadataStore, codec: TopicCodec) -> References:
    """Read every topic, cursor and schema. Raises MetadataUnavailable, and Corrupt with the path of a reference that
    cannot be read."""
    named: dict[int, str] = {}
    topics: set[str] = set()
    root = znode_layout.MANAGED_LEDGERS_ROOT
    for tenant in await _children(store, root):
        for namespace in await _children(store, f"{root}/{tenant}"):
            for domain in await _children(store, f"{root}/{tenant}/{namespace}"):
                parent = f"{tenant}/{namespace}/{domain}"
                parts = await _children(store, f"{root}/{parent}")
                for batch in _in_steps([f"{parent}/{part}" for part in parts]):
                    for found in await asyncio.gather(*(_of_topic(store, codec, name) for name in batch)):
                        named.update(found)
                topics.update(f"{parent}/{part}" for part in parts)
    schemas = set()
    for tenant in await _children(store, SCHEMAS_ROOT):
        for namespace in await _children(store, f"{SCHEMAS_ROOT}/{tenant}"):
            for name in await _children(store, f"{SCHEMAS_ROOT}/{tenant}/{namespace}"):
                schemas.add(f"{tenant}/{namespace}/{name}")
    return References(named, frozenset(topics), frozenset(schemas))


async def survey(
    store: MetadataStore, ledgers: Ledgers, codec: TopicCodec, *, now_ms: int, older_than_ms: int
) -> AsyncIterator[Finding]:
    """Yield every ledger with its fate, in ascending order of ids. Raises the same errors as `read_references`."""
    ids = [ledger_id async for ledger_id in ledgers.list_ledgers()]
    references = await read_references(store, codec)
    for batch in _in_steps(ids):
        for finding in await asyncio.gather(
            *(_finding(ledgers, references, ledger_id, now_ms, older_than_ms) for ledger_id in batch)
        ):
            if finding is not None:
                yield finding


async def still_orphan(store: MetadataStore, codec: TopicCodec, finding: Finding) -> bool:
    """Return True if the topic of the ledger still does not reference it. Call this just before deleting the ledger.
    Raises the same errors as `read_references`."""
    if not finding.topic:
        return True
    return int(finding.ledger_id) not in await _of_topic(store, codec, finding.topic)


async def _of_topic(store: MetadataStore, codec: TopicCodec, name: str) -> dict[int, str]:
    """Return the ledgers that a topic and its cursors reference; none if the topic does not exist."""
    path = f"{znode_layout.MANAGED_LEDGERS_ROOT}/{name}"
    named: dict[int, str] = {}
    try:
        cursors = await store.children(path)
        data = (await store.get(path)).data
    except NoSuchNode:
        return {}
    for cursor in cursors:
        try:
            cursor_data = (await store.get(f"{path}/{cursor}")).data
        except NoSuchNode:
            continue  # the subscription was deleted meanwhile
        for ledger_id in _decoded(codec.cursor_ledgers, cursor_data, f"{path}/{cursor}"):
            named[ledger_id] = f"{name}, subscription {cursor}"
    for ledger_id in _decoded(codec.topic_ledgers, data, path):
        named[ledger_id] = name
    return named


def _decoded(decode: "_Decode", data: bytes, path: str) -> list[int]:
    try:
        return list(decode(data)) if data else []
    except Corrupt as error:
        raise Corrupt(
            f"cannot read the ledger references in {path}: {error}; therefore no ledger is reported as an orphan",
            path=path,
        ) from error


class _Decode(Protocol):
    def __call__(self, data: bytes, /) -> Iterable[int]: ...


async def _finding(
    ledgers: Ledgers, references: References, ledger_id: LedgerId, now_ms: int, older_than_ms: int
) -> Finding | None:
    try:
        found = await ledgers.metadata_versioned(ledger_id)
    except NoSuchLedger:
        return None  # deleted since it was listed
    except (Corrupt, BadVersion) as error:
        return Finding(ledger_id, Fate.UNREADABLE, f"its metadata cannot be read: {error}")
    return judge(ledger_id, found, references, now_ms=now_ms, older_than_ms=older_than_ms)


def judge(
    ledger_id: LedgerId, found: Versioned[LedgerMetadata], references: References, *, now_ms: int, older_than_ms: int
) -> Finding:
    """Decide the fate of one ledger. Pure."""
    metadata = found.value
    custom = {name: value.decode(errors="backslashreplace") for name, value in metadata.custom.items()}
    application = custom.get("application", "")
    component = custom.get("component", "")
    topic = next((_managed_ledger_name(custom[key]) for key in _TOPIC_KEYS if key in custom), "")
    # the later of both clocks counts, so that a wrong clock cannot make a young ledger look old
    created_ms = max((at for at in (metadata.ctime_ms, found.created_ms) if at), default=None)

    def fate(fate: Fate, why: str) -> Finding:
        is_closed = metadata.state is LedgerState.CLOSED
        return Finding(
            ledger_id,
            fate,
            why,
            application,
            topic,
            created_ms,
            metadata.state.name.lower(),
            metadata.length * metadata.write_quorum if is_closed else None,
            custom,
        )

    name = references.named.get(ledger_id)
    if name is not None:
        return fate(Fate.REFERENCED, f"referenced by {name}")
    if created_ms is None or now_ms - created_ms < older_than_ms:
        return fate(Fate.YOUNG, "younger than the grace period" if created_ms else "its creation time is unknown")
    if application not in OUR_APPLICATIONS:
        return fate(Fate.FOREIGN, f"created by {application}" if application else "has no creator in its metadata")
    if component in _INDIRECT_COMPONENTS:
        owner = custom.get(_SCHEMA_KEY, "") if component == "schema" else topic
        there = references.schemas if component == "schema" else references.topics
        if not owner:
            return fate(Fate.UNCERTAIN, f"{component} of an unknown topic")
        if owner in there:
            return fate(Fate.UNCERTAIN, f"{component} of {owner}, which exists")
        return fate(Fate.ORPHAN, f"{component} of {owner}, which no longer exists")
    if application == "pulsar" and component not in ("", "managed-ledger"):
        return fate(Fate.UNCERTAIN, f"unknown component: {component}")
    if not topic:
        return fate(Fate.ORPHAN, "no topic and no subscription references it")
    state = "exists but does not reference it" if topic in references.topics else "no longer exists"
    return fate(Fate.ORPHAN, f"created for {topic}, which {state}")


def _managed_ledger_name(text: str) -> str:
    """Return the managed ledger name `T/N/persistent/<encoded>` for either form of a topic name."""
    domain, separator, rest = text.partition("://")
    parts = rest.split("/", 2)
    if not separator or len(parts) != 3:
        return text
    return f"{parts[0]}/{parts[1]}/{domain}/{znode_layout.encode_name(parts[2])}"


def _in_steps(items: list[T]) -> Iterable[list[T]]:
    return (items[at : at + READS_IN_FLIGHT] for at in range(0, len(items), READS_IN_FLIGHT))


async def _children(store: MetadataStore, path: str) -> list[str]:
    try:
        return await store.children(path)
    except NoSuchNode:
        return []
