"""Faults that an audit must find. Each method injects one into a real cluster and records the expected findings.

| fault              | method                                                                                          |
|--------------------|-------------------------------------------------------------------------------------------------|
| hole               | a copy is moved to the spare bookie without one entry                                           |
| flipped bits       | the entry's bytes in the entry log are changed while the bookie is stopped                      |
| forged payload     | a copy is moved to the spare bookie; one entry has another payload with a valid digest          |
| lost entry         | the only copy is moved without one entry                                                        |
| stale ensemble     | the metadata names a bookie that never existed                                                  |
| wrong length       | the metadata has another length                                                                 |
| orphan data        | a ledger whose znode is deleted                                                                 |
| orphan metadata    | a topic names a missing ledger; no topic names a ledger of a broker                             |
| ahead              | the position of a subscription is beyond the end of its topic                                   |
| false mark         | a complete ledger is marked                                                                     |
| open too long      | an open ledger was created more than a week ago                                                 |
| bad placement      | the metadata names one bookie twice                                                             |
| miscounted         | a topic counts more entries, or fewer bytes, than a ledger has, or has an open earlier ledger   |
| unreadable         | a ledger's znode has random bytes                                                               |
| claimed as healed  | the mark of a ledger with a hole is removed before the next audit                               |
| (legal)            | different LACs, and an entry beyond the end of a ledger: no finding                             |

A move leaves data on the old bookie, which is a finding of its own (ORPHAN_DATA, info).
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bindery_client.client import LedgerClient
from bindery_client.memory.memory_replicas import digester_of
from bindery_core.entry import pack
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import Status
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar.managed_ledger_codec import CursorInfo, CursorState, TopicInfo, encode_cursor, encode_topic
from bindery_pulsar.managed_ledger_records import LedgerRecord, Position

ENTRIES = 20
SIZE = 700
WEEK_MS = 7 * 86_400_000
GHOST = BookieId("ghost:3181")
NO_LEDGER = 999_999

Found = tuple[str, str, int | None, int | None, int | None, str | None]
"""(kind, severity, ledger id, first entry, last entry, bookie)."""


@dataclass
class Faults:
    """Creates ledgers with faults. `rng`: selects entries and bookies."""

    store: MetadataStore
    client: LedgerClient
    rng: random.Random
    wanted: set[Found] = field(default_factory=set)
    healable: set[LedgerId] = field(default_factory=set)
    claimed: set[LedgerId] = field(default_factory=set)
    """Ledgers of `healable` whose marks `claim_healed` removes."""
    payloads: dict[tuple[int, int], bytes] = field(default_factory=dict)

    # --- ledgers ------------------------------------------------------------------------------------------------------

    async def ledger(self, *, copies: int = 3, custom: dict[str, bytes] | None = None, close: bool = True) -> LedgerId:
        handle = await self.client.create(
            ensemble_size=copies, write_quorum=copies, ack_quorum=min(2, copies), custom=custom
        )
        for entry_id in range(ENTRIES):
            payload = self.rng.randbytes(SIZE + entry_id)
            self.payloads[handle.ledger_id, entry_id] = payload
            await handle.add(payload)
        if close:
            await handle.close()
        else:
            await handle.abandon()
        return handle.ledger_id

    async def move(self, ledger_id: LedgerId, change: Callable[[int, Any], bytes | None]) -> tuple[BookieId, BookieId]:
        """Move one bookie's copies to another. `change(entry id, replica)`: the new frame, or None for no copy."""
        metadata = await self.client.metadata(ledger_id)
        ensemble = metadata.segments[0].ensemble
        old = self.rng.choice(ensemble)
        new = self.rng.choice(sorted(set(await self.client.list_bookies()) - set(ensemble)))
        ids = [EntryId(i) for i in range(ENTRIES)]
        replicas = await self.client.read_replicas(ledger_id, metadata, old, ids, lambda replica: replica)
        frames = [frame for i, one in zip(ids, replicas, strict=True) if (frame := change(i, one)) is not None]
        statuses = await self.client.store_replicas(ledger_id, metadata, new, frames)
        assert set(statuses) == {Status.OK}
        await self._rename(ledger_id, old, new)
        self.wanted.add(("ORPHAN_DATA", "info", ledger_id, 0, ENTRIES - 1, old))
        return old, new

    async def _rename(self, ledger_id: LedgerId, old: BookieId, new: BookieId) -> None:
        def renamed(metadata: LedgerMetadata) -> LedgerMetadata:
            (segment,) = metadata.segments
            ensemble = tuple(new if bookie == old else bookie for bookie in segment.ensemble)
            return metadata.with_changes(segments=(replace(segment, ensemble=ensemble),))

        await self.client.update_metadata(ledger_id, renamed)

    # --- copies -------------------------------------------------------------------------------------------------------

    async def hole(self) -> None:
        ledger_id, lost = await self.ledger(), self.rng.randrange(1, ENTRIES - 1)
        _, new = await self.move(ledger_id, lambda i, one: None if i == lost else one.frame)
        self.wanted.add(("MISSING_REPLICA", "under_replicated", ledger_id, lost, lost, new))
        self.healable.add(ledger_id)

    async def hole_that_is_marked(self, marks: UnderreplicationManager) -> None:
        await self.hole()
        ledger_id = max(self.healable)
        await marks.mark(ledger_id)
        self.claimed.add(ledger_id)

    async def claim_healed(self, marks: UnderreplicationManager) -> None:
        """Remove marks like a worker, but without copying."""
        for ledger_id in self.claimed:
            held = await marks.lock(ledger_id)
            assert held is not None
            assert await marks.mark_replicated(held)

    async def forged_payload(self) -> None:
        ledger_id, forged = await self.ledger(), self.rng.randrange(ENTRIES)
        digester = digester_of(await self.client.metadata(ledger_id))

        def change(entry_id: int, one: Any) -> bytes:
            if entry_id != forged:
                return bytes(one.frame)
            payload = bytes(byte ^ 1 for byte in one.payload)
            return pack(
                digester, ledger_id=ledger_id, entry_id=entry_id, lac=one.lac, length=one.length, payload=payload
            )

        _, new = await self.move(ledger_id, change)
        self.wanted.add(("REPLICA_DIVERGENCE", "corrupt", ledger_id, forged, forged, new))

    async def lost_entry(self) -> None:
        ledger_id, lost = await self.ledger(copies=1), self.rng.randrange(ENTRIES)
        _, new = await self.move(ledger_id, lambda i, one: None if i == lost else one.frame)
        self.wanted.add(("ENTRY_LOST", "unreadable", ledger_id, lost, lost, None))
        self.wanted.add(("MISSING_REPLICA", "under_replicated", ledger_id, lost, lost, new))

    async def flip_bits(self, directory: Callable[[BookieId], Path], restart: Callable[[BookieId, Any], Any]) -> None:
        """`directory`: data of a bookie; `restart(bookie, work)`: stop the bookie, do the work, start it again."""
        ledger_id, damaged = await self.ledger(), self.rng.randrange(ENTRIES)
        bookie_id = self.rng.choice((await self.client.metadata(ledger_id)).segments[0].ensemble)
        payload = self.payloads[ledger_id, damaged]
        at = self.rng.randrange(len(payload))
        flipped = payload[:at] + bytes([payload[at] ^ 1 << self.rng.randrange(8)]) + payload[at + 1 :]

        def work() -> None:
            changed = 0
            for path in directory(bookie_id).rglob("*"):
                if path.is_file() and payload in (data := path.read_bytes()):
                    path.write_bytes(data.replace(payload, flipped))
                    changed += 1
            assert changed, "no file has the entry"

        await restart(bookie_id, work)
        self.wanted.add(("DIGEST_MISMATCH", "corrupt", ledger_id, damaged, damaged, bookie_id))
        self.healable.add(ledger_id)

    async def orphan_data(self) -> None:
        ledger_id = await self.ledger()
        ensemble = (await self.client.metadata(ledger_id)).segments[0].ensemble
        await self.store.delete(LedgersLayout().ledger(ledger_id), version=None)
        self.wanted |= {("ORPHAN_DATA", "warning", ledger_id, 0, ENTRIES - 1, bookie) for bookie in ensemble}

    # --- metadata -----------------------------------------------------------------------------------------------------

    async def stale_ensemble(self) -> None:
        ledger_id = await self.ledger()
        old = self.rng.choice((await self.client.metadata(ledger_id)).segments[0].ensemble)
        await self._rename(ledger_id, old, GHOST)
        self.wanted.add(("STALE_ENSEMBLE", "under_replicated", ledger_id, 0, ENTRIES - 1, GHOST))
        self.wanted.add(("ORPHAN_DATA", "info", ledger_id, 0, ENTRIES - 1, old))
        self.healable.add(ledger_id)

    async def wrong_length(self) -> None:
        ledger_id = await self.ledger()
        await self.client.update_metadata(ledger_id, lambda m: m.with_changes(length=m.length + 1))
        self.wanted.add(("LENGTH_MISMATCH", "corrupt", ledger_id, ENTRIES - 1, ENTRIES - 1, None))

    async def open_too_long(self) -> None:
        ledger_id = await self.ledger(close=False)
        made_ms = time.time_ns() // 1_000_000 - WEEK_MS - 60_000
        await self.client.update_metadata(ledger_id, lambda m: m.with_changes(ctime_ms=made_ms))
        self.wanted.add(("OPEN_TOO_LONG", "warning", ledger_id, None, None, None))

    async def unreadable_metadata(self) -> None:
        ledger_id = await self.ledger()
        await self.store.set(LedgersLayout().ledger(ledger_id), self.rng.randbytes(40), version=None)
        self.wanted.add(("METADATA_UNREADABLE", "unreadable", ledger_id, None, None, None))

    async def bad_placement(self) -> None:
        ledger_id = await self.ledger()
        twice, old = self.rng.sample((await self.client.metadata(ledger_id)).segments[0].ensemble, 2)
        await self._rename(ledger_id, old, twice)
        self.wanted.add(("BAD_PLACEMENT", "under_replicated", ledger_id, 0, ENTRIES - 1, twice))
        self.wanted.add(("ORPHAN_DATA", "info", ledger_id, 0, ENTRIES - 1, old))

    async def miscounted_topic(self) -> None:
        size = sum(SIZE + entry_id for entry_id in range(ENTRIES))
        more, fewer, still_open = await self.ledger(), await self.ledger(), await self.ledger(close=False)
        path = "/managed-ledgers/public/default/persistent/miscounted"
        ledgers = (
            LedgerRecord(ledger_id=more, entries=ENTRIES + self.rng.randint(1, 9), size=size, closed_ms=1),
            LedgerRecord(ledger_id=fewer, entries=ENTRIES, size=size - 1, closed_ms=2),
            LedgerRecord(ledger_id=still_open, entries=ENTRIES, size=size, closed_ms=3),
        )
        await self.store.create(path, encode_topic(TopicInfo(ledgers=ledgers)), make_parents=True)
        self.wanted.add(("TOPIC_INCONSISTENT", "corrupt", more, None, None, None))
        self.wanted |= {("TOPIC_INCONSISTENT", "warning", each, None, None, None) for each in (fewer, still_open)}

    async def orphan_metadata(self) -> None:
        """Create a topic with a missing ledger, a subscription beyond its end, and a ledger that no topic names."""
        path = "/managed-ledgers/public/default/persistent/broken"
        missing = LedgerRecord(ledger_id=NO_LEDGER, entries=5, size=50, closed_ms=1)
        await self.store.create(path, encode_topic(TopicInfo(ledgers=(missing,))), make_parents=True)
        ahead = CursorInfo(ledger_id=-1, state=CursorState(mark_delete=Position(NO_LEDGER + 1, 0)))
        await self.store.create(f"{path}/ahead", encode_cursor(ahead))
        self.wanted.add(("ORPHAN_METADATA", "unreadable", NO_LEDGER, None, None, None))
        self.wanted.add(("CURSOR_INCONSISTENT", "warning", NO_LEDGER + 1, None, None, None))
        unnamed = await self.ledger(custom={"application": b"bindery", "component": b"managed-ledger"})
        self.wanted.add(("ORPHAN_METADATA", "warning", unnamed, None, None, None))

    async def false_mark(self, marks: UnderreplicationManager) -> None:
        ledger_id = await self.ledger()
        bookie = (await self.client.metadata(ledger_id)).segments[0].ensemble[0]
        await marks.mark(ledger_id, [bookie])
        self.wanted.add(("FALSE_MARK", "warning", ledger_id, None, None, None))

    # --- legal --------------------------------------------------------------------------------------------------------

    async def legal(self) -> None:
        """Different LACs, and an entry beyond the end on one bookie."""
        ledger_id = await self.ledger()
        metadata = await self.client.metadata(ledger_id)
        bookie = metadata.segments[0].ensemble[0]
        digester = digester_of(metadata)
        beyond = pack(
            digester,
            ledger_id=ledger_id,
            entry_id=ENTRIES,
            lac=ENTRIES - 1,
            length=metadata.length + 4,
            payload=b"more",
        )
        assert await self.client.store_replicas(ledger_id, metadata, bookie, [beyond]) == [Status.OK]
        other = await self.ledger()
        digester = digester_of(await self.client.metadata(other))

        def with_old_lac(entry_id: int, one: Any) -> bytes:
            return pack(
                digester, ledger_id=other, entry_id=entry_id, lac=-1, length=one.length, payload=bytes(one.payload)
            )

        await self.move(other, with_old_lac)
