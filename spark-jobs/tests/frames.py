"""Small tables for the checks: rows with defaults, and DataFrames of them."""

import random
import struct
from collections import defaultdict
from typing import Any

from bindery_spark.audit.checks.finding_rows import Run
from bindery_spark.reading import blocks
from bindery_spark.schemas import BLOCKS, BOOKIES, CURSORS, FINDINGS, LEDGERS, MARKS, REPLICAS, TOPICS
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

NOW_MS = 1_800_000_000_000
DAY_MS = 86_400_000
RUN = Run("r1", NOW_MS)


def ledger(
    ledger_id: int, segments: list[tuple[int, list[str]]], *, last: int | None, qw: int = 0, **more: Any
) -> dict:
    """`segments`: (first entry, ensemble); `last`: the last entry, None: the ledger is open."""
    firsts = [first for first, _ in segments]
    ends = [*(first - 1 for first in firsts[1:]), last]
    size = len(segments[0][1])
    return {
        "ledger_id": ledger_id,
        "state": "open" if last is None else "closed",
        "ensemble_size": size,
        "write_quorum": qw or size,
        "ack_quorum": 1,
        "digest_type": "crc32c",
        "last_entry_id": last,
        "length": None if last is None else 10 * (last + 1),
        "created_ms": NOW_MS - DAY_MS,
        "custom": {},
        "segments": [(first, end, ensemble) for (first, ensemble), end in zip(segments, ends, strict=True)],
        "metadata_version": 1,
        "problem": None,
        **more,
    }


def copy(ledger_id: int, entry_id: int, bookie: str, status: str = "good", **more: Any) -> dict:
    """One row of REPLICAS; `status`: good, missing, corrupt, damaged or unknown."""
    is_good = status == "good"
    return {
        "ledger_id": ledger_id,
        "segment": 0,
        "entry_id": entry_id,
        "bookie": bookie,
        "expected": True,
        "present": {"missing": False, "unknown": None, "damaged": None}.get(status, True),
        "digest_ok": {"good": True, "corrupt": False}.get(status),
        "ledger_length": 10 * (entry_id + 1) if is_good else None,
        "payload_length": 10 if is_good else None,
        "payload_crc32c": 1000 + entry_id if is_good else None,
        "lac": entry_id - 1 if is_good else None,
        "error": {"unknown": "unreachable: refused", "damaged": "io_error: it could not read it"}.get(status),
        **more,
    }


def random_copy(rng: random.Random, ledger_id: int, entry_id: int, name: str, faults: float, more: dict) -> dict:
    """A row of REPLICAS with a random fault, with the probability `faults`. Bookie `gone` has no known copies."""
    if name == "gone":
        return copy(ledger_id, entry_id, name, "unknown", **more)
    if rng.random() >= faults:
        return copy(ledger_id, entry_id, name, **more, lac=rng.randint(-1, entry_id))
    match rng.choice(["missing", "corrupt", "damaged", "unknown", "payload", "length", "ledger_length"]):
        case "payload":
            return copy(ledger_id, entry_id, name, **more, payload_crc32c=rng.randint(1, 2))
        case "length":
            return copy(ledger_id, entry_id, name, **more, payload_length=rng.randint(11, 12))
        case "ledger_length":
            return copy(ledger_id, entry_id, name, **more, ledger_length=rng.randint(1, 2))
        case status:
            return copy(ledger_id, entry_id, name, status, **more)


def bookie(name: str, **more: Any) -> dict:
    return {
        "bookie": name,
        "registration": "writable",
        "intent": "active",
        "cookie": True,
        "rack": None,
        "free_bytes": 1,
        "total_bytes": 2,
        **more,
    }


def mark(ledger_id: int, **more: Any) -> dict:
    return {
        "ledger_id": ledger_id,
        "bookies": ["a"],
        "reason": "bookie_lost",
        "marked_at_ms": NOW_MS - DAY_MS,
        "attempts": 0,
        "locked": False,
        **more,
    }


def topic(name: str, ledgers: list[tuple[int, int, int, int | None]], problem: str | None = None) -> dict:
    """`ledgers`: (id, entries, bytes, closed_ms)."""
    return {"topic": name, "ledgers": ledgers, "problem": problem}


def cursor(name: str, subscription: str = "s", at: tuple[int, int] | None = None, ledger_id: int | None = None) -> dict:
    return {
        "topic": name,
        "subscription": subscription,
        "mark_delete_ledger": at and at[0],
        "mark_delete_entry": at and at[1],
        "cursor_ledger_id": ledger_id,
        "problem": None,
    }


def blocks_of(rows: list[dict], ledgers: list[dict], *, span: int = 4) -> list[dict]:
    """The copies `rows` as rows of BLOCKS, with `span` slots each."""
    sizes = {row["ledger_id"]: (row["ensemble_size"], row["write_quorum"]) for row in ledgers}
    found: dict[tuple, dict[int, dict]] = defaultdict(dict)
    for row in rows:
        size, quorum = sizes.get(row["ledger_id"], (1, 1))
        step = 1 if size == quorum else size
        if row["expected"]:
            place = row["entry_id"] // (span * step), row["entry_id"] % step, step
            found[row["ledger_id"], row["segment"], row["bookie"], *place][row["entry_id"]] = row
    found_blocks = []
    for (ledger_id, segment, name, block, stripe, step), entries in found.items():
        slots = range(min(entries), max(entries) + 1, step)
        states = bytes(_state(entries[slot]) if slot in entries else blocks.UNREPORTED for slot in slots)
        known = [entries[slot] for slot, state in zip(slots, states, strict=True) if state == blocks.READ]
        packed = b"".join(
            struct.pack(">IIq", row["payload_crc32c"], row["payload_length"], row["ledger_length"]) for row in known
        )
        reasons = [row["error"] for row in entries.values() if _state(row) == blocks.UNKNOWN]
        found_blocks.append(
            blocks.block_row(
                ledger_id=ledger_id,
                segment=segment,
                block=block,
                stripe=stripe,
                bookie=name,
                first=slots[0],
                step=step,
                states=states,
                facts=packed,
                reason=min(reasons, default=None),
            )
        )
    beside = [
        blocks.unexpected_row(
            ledger_id=row["ledger_id"],
            segment=row["segment"],
            bookie=row["bookie"],
            first=row["entry_id"],
            last=row["entry_id"],
            copies=1 if row["present"] else 0,
            reason=row["error"],
        )
        for row in rows
        if not row["expected"]
    ]
    return [*found_blocks, *beside]


def _state(row: dict) -> int:
    if (row["error"] or "").startswith(blocks.DAMAGE):
        return blocks.DAMAGED
    if row["present"] is None:
        return blocks.UNKNOWN
    if not row["present"]:
        return blocks.MISSING
    return {True: blocks.READ, False: blocks.CORRUPT, None: blocks.LISTED}[row["digest_ok"]]


class Tables:
    """DataFrames of rows as dicts."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def _frame(self, rows: list[dict], schema: StructType) -> DataFrame:
        ordered = [tuple(row[name] for name in schema.names) for row in rows]
        return self._spark.createDataFrame(ordered, schema).coalesce(1)

    def replicas(self, *rows: dict) -> DataFrame:
        return self._frame(list(rows), REPLICAS)

    def blocks(self, rows: list[dict], ledgers: list[dict]) -> DataFrame:
        """BLOCKS of the copies `rows`, which are rows of REPLICAS."""
        return self._frame(blocks_of(rows, ledgers), BLOCKS)

    def ledgers(self, *rows: dict) -> DataFrame:
        return self._frame(list(rows), LEDGERS)

    def bookies(self, *rows: dict) -> DataFrame:
        return self._frame(list(rows), BOOKIES)

    def marks(self, *rows: dict) -> DataFrame:
        return self._frame(list(rows), MARKS)

    def topics(self, *rows: dict) -> DataFrame:
        return self._frame(list(rows), TOPICS)

    def cursors(self, *rows: dict) -> DataFrame:
        return self._frame(list(rows), CURSORS)

    def findings(self, *rows: dict) -> DataFrame:
        return self._frame(list(rows), FINDINGS)

    def ids(self, *ledger_ids: int) -> DataFrame:
        return self._spark.createDataFrame([(i,) for i in ledger_ids], "ledger_id long")


def finding(kind: str, ledger_id: int | None, **more: Any) -> dict:
    return {
        "run_id": "r1",
        "ledger_id": ledger_id,
        "segment": None,
        "first_entry": None,
        "last_entry": None,
        "bookie": None,
        "kind": kind,
        "severity": "warning",
        "expected": None,
        "found": None,
        "evidence_hash": "0",
        "first_seen_ms": NOW_MS,
        "repairable": False,
        "action": None,
        **more,
    }


def facts(found: DataFrame) -> set[tuple]:
    """The columns of findings that tests compare. Also checks that the columns are those of FINDINGS."""
    assert [(f.name, f.dataType) for f in found.schema] == [(f.name, f.dataType) for f in FINDINGS]
    rows = found.collect()
    compared = {(r.kind, r.severity, r.ledger_id, r.segment, r.first_entry, r.last_entry, r.bookie) for r in rows}
    assert len(compared) == len(rows), "a finding is reported twice"
    return compared
