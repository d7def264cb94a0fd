"""What copies say: each kind by hand and hundreds of random worlds against the naive oracle, in one DataFrame, since a
Spark job costs more than its rows."""

import random

import pytest
from bindery_spark.audit.checks.faults import Copy, faults_of
from frames import copy, ledger
from oracle import copy_facts, status_of

pytestmark = pytest.mark.timeout(600)  # a busy machine takes minutes for what is seconds otherwise


def _random_copy(rng: random.Random, ledger_id: int, entry_id: int, name: str, faults: float, more: dict) -> dict:
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


def test_one_entry_at_a_time_the_oracle_agrees_on_thousands_of_them() -> None:
    """The same as above without Spark, for many more mixtures of copies of one entry."""
    rng = random.Random(11)
    meta = ledger(1, [(0, ["a", "b", "c", "d"])], last=9)
    for _ in range(5_000):
        rows = [_random_copy(rng, 1, 0, name, 0.6, {}) for name in ["a", "b", "c", "d"]]
        copies = [
            Copy(r["bookie"], status_of(r, set()), r["payload_length"], r["payload_crc32c"], r["ledger_length"])
            for r in rows
        ]
        assert {(fault.kind, fault.bookie) for fault in faults_of(copies)} == {
            (kind, name) for kind, _, _, _, _, _, name in copy_facts(rows, [meta], [])
        }
