"""Faults of one entry, without Spark: thousands of random mixtures of copies compared with the naive oracle."""

import random
import zlib

from bindery_spark.audit.checks.faults import Copy, faults_of
from frames import ledger, random_copy
from oracle import copy_facts, status_of


def test_the_most_common_value_is_expected_or_equality_if_there_is_none() -> None:
    def expected(*copies: Copy) -> list[tuple[str, str | None, str]]:
        return [(str(fault.kind), fault.bookie, fault.expected) for fault in faults_of(copies)]

    first, second = Copy("a", "good", 10, 1, 100), Copy("b", "good", 10, 1, 100)
    other_payload, other_length = Copy("c", "good", 10, 2, 100), Copy("c", "good", 10, 1, 99)
    assert expected(first, second, other_payload) == [("REPLICA_DIVERGENCE", "c", "the payload of most copies")]
    assert {text for _, _, text in expected(first, other_payload)} == {"equal payloads"}
    assert expected(first, second, other_length) == [("LENGTH_MISMATCH", "c", "ledger length 100, as in most copies")]
    assert expected(first, other_length) == [
        ("LENGTH_MISMATCH", "a", "equal ledger lengths"),
        ("LENGTH_MISMATCH", "c", "equal ledger lengths"),
    ]
    without_length = Copy("c", "good", 10, 1, None)
    assert expected(first, second, without_length) == []


def test_faults_agree_with_the_oracle_for_random_copies() -> None:
    rng = random.Random(11)
    meta = ledger(1, [(0, ["a", "b", "c", "d"])], last=9)
    for _ in range(5_000):
        rows = [random_copy(rng, 1, 0, name, 0.6, {}) for name in ["a", "b", "c", "d"]]
        copies = [
            Copy(r["bookie"], status_of(r, set()), r["payload_length"], r["payload_crc32c"], r["ledger_length"])
            for r in rows
        ]
        assert {(fault.kind, fault.bookie) for fault in faults_of(copies)} == {
            (kind, name) for kind, _, _, _, _, _, name in copy_facts(rows, [meta], [])
        }


def test_a_fault_has_evidence_only_if_its_kind_does_not_describe_it() -> None:
    def evidence(*copies: Copy) -> dict[str, int]:
        return {str(fault.kind): fault.evidence for fault in faults_of(copies)}

    good = Copy("a", "good", 10, 1, 100)
    for status in ("missing", "corrupt", "damaged"):
        assert set(evidence(good, Copy("b", status)).values()) == {0}
    first = evidence(good, good, Copy("b", "good", 10, 2, 100))
    assert first["REPLICA_DIVERGENCE"] == zlib.crc32(b"payload of 10 bytes, crc32c 00000002")
    assert evidence(good, good, Copy("b", "good", 10, 1, 99)) == {"LENGTH_MISMATCH": zlib.crc32(b"ledger length 99")}
    lost = evidence(Copy("b", "missing"), Copy("a", "corrupt"))
    assert lost["ENTRY_LOST"] == zlib.crc32(b"a corrupt, b missing")


def test_a_fault_is_repairable_only_if_there_is_a_good_copy() -> None:
    for status in ("missing", "corrupt", "damaged"):
        for other, is_repairable in ((Copy("a", "good"), True), (Copy("a", "unknown"), False)):
            (fault,) = faults_of([other, Copy("b", status)])
            assert fault.repairable is is_repairable
    assert not any(fault.repairable for fault in faults_of([Copy("a", "good", 1, 1, 1), Copy("b", "good", 1, 2, 1)]))
