"""A naive second implementation of the checks of copies, in plain Python: entry by entry and copy by copy.

Tests compare its findings with those of `checks.copies`. Its input has the form of the rows in `frames`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from bindery_core.placement.write_set import write_set


def gone(bookies: Iterable[dict]) -> set[str]:
    bookies = list(bookies)
    any_cookie = any(b["cookie"] for b in bookies)
    return {
        b["bookie"]
        for b in bookies
        if b["registration"] == "absent"
        and (b["intent"] == "removed" or (any_cookie and not b["cookie"] and b["intent"] != "joining"))
    }


def _strangers(ledgers: list[dict], bookies: list[dict]) -> set[str]:
    """Bookies in the metadata without a cookie, if other bookies have one."""
    named = {name for row in ledgers for _, _, ensemble in row["segments"] for name in ensemble}
    return named - {b["bookie"] for b in bookies} if any(b["cookie"] for b in bookies) else set()


def status_of(row: dict, left: set[str]) -> str:
    if row["bookie"] in left:
        return "gone"
    if (row["error"] or "").startswith("io_error"):
        return "damaged"
    if row["present"] is None:
        return "unknown"
    if not row["present"]:
        return "missing"
    return "corrupt" if row["digest_ok"] is False else "good"


def copy_facts(replicas: list[dict], ledgers: list[dict], bookies: list[dict]) -> set[tuple]:
    """Return the findings that `checks.copies` must report, except ORPHAN_DATA, in the form of `frames.facts`."""
    left = gone(bookies) | _strangers(ledgers, bookies)
    by_id = {row["ledger_id"]: row for row in ledgers}
    entries: dict[tuple[int, int], list[dict]] = defaultdict(list)
    for row in replicas:
        if row["expected"]:
            entries[row["ledger_id"], row["entry_id"]].append({**row, "status": status_of(row, left)})
    bad: dict[tuple, set[int]] = defaultdict(set)
    lengths = set()
    for (ledger_id, entry_id), copies in entries.items():
        where = (ledger_id, copies[0]["segment"])
        good = [c for c in copies if c["status"] == "good"]
        for c in copies:
            if c["status"] == "missing":
                bad["MISSING_REPLICA", "under_replicated", *where, c["bookie"], bool(good)].add(entry_id)
            if c["status"] in ("corrupt", "damaged"):
                bad["DIGEST_MISMATCH", "corrupt", *where, c["bookie"], bool(good)].add(entry_id)
        if not good and all(c["status"] != "unknown" for c in copies):
            bad["ENTRY_LOST", "unreadable", *where, None, False].add(entry_id)
        payloads = Counter((c["payload_length"], c["payload_crc32c"]) for c in good)
        winner = _winner(payloads)
        for c in good:
            if len(payloads) > 1 and (c["payload_length"], c["payload_crc32c"]) != winner:
                bad["REPLICA_DIVERGENCE", "corrupt", *where, c["bookie"], False].add(entry_id)
        same = [c for c in good if (c["payload_length"], c["payload_crc32c"]) == winner]
        said = Counter(c["ledger_length"] for c in same)
        for c in same:
            if len(said) > 1 and c["ledger_length"] != _winner(said):
                bad["LENGTH_MISMATCH", "corrupt", *where, c["bookie"], False].add(entry_id)
        meta = by_id[ledger_id]
        is_end = meta["state"] == "closed" and entry_id == meta["last_entry_id"]
        if is_end and good and all(c["ledger_length"] != meta["length"] for c in good):
            lengths.add(("LENGTH_MISMATCH", "corrupt", *where, entry_id, entry_id, None))
    return lengths | {
        (kind, severity, ledger_id, segment, first, last, bookie)
        for (kind, severity, ledger_id, segment, bookie, _), ids in bad.items()
        for first, last in _runs(ids, by_id[ledger_id], segment, bookie)
    }


def _winner(votes: Counter) -> object:
    """The most common value; on a tie, a value that no copy has."""
    top = [value for value, n in votes.items() if n == max(votes.values())]
    return top[0] if len(top) == 1 else object()


def _runs(ids: set[int], meta: dict, segment: int, bookie: str | None) -> list[tuple[int, int]]:
    """Group `ids` into runs (first entry, last entry) of adjacent entries of a segment.

    With a `bookie`, two entries are adjacent if the bookie must store no entry between them.
    """
    first, end, ensemble = meta["segments"][segment]
    end = max(ids) if end is None else end
    held = [
        e
        for e in range(first, end + 1)
        if bookie is None
        or ensemble.index(bookie)
        in write_set(entry_id=e, ensemble_size=meta["ensemble_size"], write_quorum=meta["write_quorum"])
    ]
    runs: list[tuple[int, int]] = []
    before = None
    for at, e in enumerate(held):
        if e in ids:
            runs = [*runs[:-1], (runs[-1][0], e)] if before == at - 1 and runs else [*runs, (e, e)]
            before = at
    return runs
