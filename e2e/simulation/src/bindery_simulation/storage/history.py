"""Record what a client sent to one bookie, and what the bookie acknowledged.

Bodies are unique, so that the one that is stored can be identified if an entry was added several times. `sent` keeps
the order of the adds: a later body may replace an acknowledged body, an earlier body never does.
"""

from dataclasses import dataclass, field, replace

Key = tuple[int, int]
"""(ledger id, entry id)."""


@dataclass(slots=True)
class History:
    """Adds, fences, explicit LACs and deletions. Acknowledgements do not apply to a later ledger with the same id."""

    sent: dict[Key, list[bytes]] = field(default_factory=dict)
    """Bodies of each entry in the order of sending. Bodies are only added, so that snapshots share them."""
    acknowledged: dict[Key, int] = field(default_factory=dict)
    """Index into `sent` of the last acknowledged body."""
    fenced: set[int] = field(default_factory=set)
    keyed: set[int] = field(default_factory=set)
    """Ledgers whose master key the bookie must have stored, because it acknowledged a request."""
    lac_packets: dict[int, list[bytes]] = field(default_factory=dict)
    lac_acknowledged: dict[int, int] = field(default_factory=dict)
    deletions: dict[int, int] = field(default_factory=dict)
    """Number of deletions by ledger. No promise holds for requests that began before the last deletion."""
    hidden: dict[Key, int] = field(default_factory=dict)
    """Number of the first bodies of each entry that were deleted. They must not be read before a crash."""
    erased: dict[Key, int] = field(default_factory=dict)
    """Number of the first bodies of each entry whose deletion was flushed. They must never be read again."""
    next_id: dict[int, int] = field(default_factory=dict)
    unanswered: set[tuple[Key, int]] = field(default_factory=set)
    """(key, number of the body) of adds in progress. An add that waits for space may be stored after a deletion."""

    def snapshot(self) -> "History":
        """Return a copy of the current state. Data to which items are only added is shared."""
        return History(
            self.sent,
            dict(self.acknowledged),
            set(self.fenced),
            set(self.keyed),
            self.lac_packets,
            dict(self.lac_acknowledged),
            self.deletions,
            {},
            dict(self.erased),
            dict(self.next_id),
        )

    def copy(self) -> "History":
        """Return a copy for one case: entries that are added to it are not added to this history."""
        return replace(
            self,
            sent=dict(self.sent),
            acknowledged=dict(self.acknowledged),
            keyed=set(self.keyed),
            next_id=dict(self.next_id),
        )

    def send(self, key: Key, body: bytes) -> int:
        """Record a body and return its number."""
        bodies = self.sent.setdefault(key, [])
        bodies.append(body)
        self.next_id[key[0]] = max(self.next_id.get(key[0], 0), key[1] + 1)
        return len(bodies) - 1

    def acknowledge(self, key: Key, number: int) -> None:
        self.acknowledged[key] = max(number, self.acknowledged.get(key, -1))
        self.keyed.add(key[0])

    def delete(self, ledger_id: int) -> None:
        """Withdraw all promises for the ledger."""
        self.deletions[ledger_id] = self.deletions.get(ledger_id, 0) + 1
        for key, bodies in self.sent.items():
            if key[0] == ledger_id:
                self.acknowledged.pop(key, None)
                self.hidden[key] = len(bodies)
        for key, number in self.unanswered:
            if key[0] == ledger_id:
                self.hidden[key] = min(number, self.hidden[key])
        self.fenced.discard(ledger_id)
        self.keyed.discard(ledger_id)
        self.lac_acknowledged.pop(ledger_id, None)

    def crashed(self) -> None:
        """Record a crash, which may undo deletions that were not flushed."""
        self.hidden = dict(self.erased)

    def ledger_ids(self) -> list[int]:
        return sorted({key[0] for key in self.sent} | self.fenced | self.lac_packets.keys())
