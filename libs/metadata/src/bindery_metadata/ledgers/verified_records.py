"""Store when an audit last verified each ledger. The next audit may skip it, and operators see the age of the result.

| node below /bindery/audit | value                                          | kept                                    |
|---------------------------|------------------------------------------------|-----------------------------------------|
| verified/<g>              | JSON: {"<id>": [level, verified_at_ms, run_id, | until an audit finds that the ledger is |
|                           | metadata_version], ...}, ids as decimal text   | deleted, or has defects                 |

<g>: the ledger id divided by LEDGERS_PER_NODE, decimal. A record applies to a closed ledger with the recorded metadata
version: if the metadata has changed since, some replicas may not have been checked. No decision about data depends on a
record, so an unreadable node counts as empty and is logged.
"""

import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import AlreadyExists, Corrupt, MetadataUnavailable, NoSuchNode, VersionConflict
from bindery_core.ids import LedgerId

from bindery_metadata.layout.layout import BINDERY_ROOT
from bindery_metadata.stores import json_node
from bindery_metadata.stores.store import MetadataStore

LEDGERS_PER_NODE: Final = 1_000
"""Number of consecutive ledger ids whose records share a node. At about 60 bytes each, they are far below the size
limit of a node."""
ATTEMPTS_MAX: Final = 20
"""Maximum number of compare-and-set attempts of one change."""
LEVELS: Final = ("quick", "standard", "deep")
"""Audit levels, from the least to the most thorough."""

_log = logging.getLogger(__name__)
_Texts = dict[str, tuple[str, int, str, int]]


@dataclass(frozen=True, slots=True)
class Verified:
    """One verified ledger. At `verified_at_ms` (ms since 1970), an audit of this `level` found every replica intact."""

    ledger_id: LedgerId
    level: str
    verified_at_ms: int
    run_id: str
    metadata_version: int


class VerifiedRecords:
    """Reads and writes the records. Every method may raise MetadataUnavailable."""

    def __init__(self, store: MetadataStore, *, root: str = BINDERY_ROOT) -> None:
        self._store = store
        self._root = f"{root}/audit/verified"

    async def get(self, ledger_id: LedgerId) -> Verified | None:
        """Return the record of a ledger, or None if no audit is known to have verified the ledger."""
        records, _ = await self._read(ledger_id // LEDGERS_PER_NODE)
        return records.get(ledger_id)

    async def list(self) -> AsyncIterator[Verified]:
        """Yield all records, ascending by ledger id."""
        for group in await self._groups():
            records, _ = await self._read(group)
            for ledger_id in sorted(records):
                yield records[ledger_id]

    async def put_all(self, records: Iterable[Verified], *, gone: Collection[int] = ()) -> None:
        """Replace older records by `records`, and delete the records of the ledgers `gone` (deleted, or with defects).

        Raises MetadataOutcomeUnknown if a response was lost; writing again is harmless.
        """
        changes: dict[int, dict[int, Verified | None]] = {}
        for ledger_id in gone:
            changes.setdefault(ledger_id // LEDGERS_PER_NODE, {})[ledger_id] = None
        for record in records:
            changes.setdefault(record.ledger_id // LEDGERS_PER_NODE, {})[record.ledger_id] = record
        for group, wanted in sorted(changes.items()):
            await self._change(group, wanted)

    async def _change(self, group: int, wanted: Mapping[int, Verified | None]) -> None:
        path = f"{self._root}/{group}"
        for _ in range(ATTEMPTS_MAX):
            records, version = await self._read(group)
            before = dict(records)
            for ledger_id, record in wanted.items():
                if record is None:
                    records.pop(LedgerId(ledger_id), None)
                elif _is_news(record, records.get(LedgerId(ledger_id))):
                    records[LedgerId(ledger_id)] = record
            if records == before:
                return
            try:
                if version is None:
                    await self._store.create(path, _encode(records), make_parents=True)
                elif records:
                    await self._store.set(path, _encode(records), version=version)
                else:
                    await self._store.delete(path, version=version)
                return
            except (AlreadyExists, NoSuchNode, VersionConflict):
                continue
        raise MetadataUnavailable("the records of verified ledgers keep changing", path=path, attempts=ATTEMPTS_MAX)

    async def _groups(self) -> Iterable[int]:
        try:
            names = await self._store.children(self._root)
        except NoSuchNode:
            return []
        return sorted(int(name) for name in names if name.isdecimal() and len(name) <= 19)

    async def _read(self, group: int) -> tuple[dict[LedgerId, Verified], int | None]:
        """Return the records and the version of their node; None: there is no node."""
        path = f"{self._root}/{group}"
        try:
            node = await self._store.get(path)
        except NoSuchNode:
            return {}, None
        try:
            texts = json_node.decode(node.data, _Texts, path=path)
            found = {LedgerId(int(text)): Verified(LedgerId(int(text)), *fields) for text, fields in texts.items()}
            return found, node.stat.version
        except (Corrupt, ValueError) as error:
            _log.warning("verified_node_unreadable", extra={"path": path, "error": str(error)})
            return {}, node.stat.version


def _is_news(record: Verified, standing: Verified | None) -> bool:
    """Return whether `record` replaces the stored one: the metadata version differs, or it is later and at least as
    thorough."""
    if standing is None or record.metadata_version != standing.metadata_version:
        return True
    deeper = LEVELS.index(record.level) >= LEVELS.index(standing.level) if standing.level in LEVELS else True
    return deeper and record.verified_at_ms > standing.verified_at_ms


def _encode(records: Mapping[LedgerId, Verified]) -> bytes:
    return json_node.encode(
        {str(r.ledger_id): (r.level, r.verified_at_ms, r.run_id, r.metadata_version) for r in records.values()}
    )
