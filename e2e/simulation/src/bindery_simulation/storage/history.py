"""History: what a client sent to one bookie, and what it was promised.

Bodies are unique, so that of two adds of one entry it is known which one is stored. The order of `sent` is the order of
the adds: an acknowledged body may be overtaken by a later one, never by an earlier one.
"""

from dataclasses import dataclass, field

Key = tuple[int, int]
"""(ledger id, entry id)."""


@dataclass(slots=True)
class History:
    """Invariant: an acknowledgement counts for the ledger that was written to, not for one of the same id later."""

    sent: dict[Key, list[bytes]] = field(default_factory=dict)
    """Bodies in the order of sending. Grows only: photographs share it."""
    acknowledged: dict[Key, int] = field(default_factory=dict)
    """Index into `sent` of the last acknowledged body."""
    fenced: set[int] = field(default_factory=set)
    keyed: set[int] = field(default_factory=set)
    """Ledgers whose master key must be known: something of them was acknowledged."""
    lac_packets: dict[int, list[bytes]] = field(default_factory=dict)
    lac_acknowledged: dict[int, int] = field(default_factory=dict)
    deletions: dict[int, int] = field(default_factory=dict)
    """How often each ledger was deleted: what was begun before the last time is promised no longer."""
    hidden: dict[Key, int] = field(default_factory=dict)
    """So many first bodies of an entry were deleted: they are not seen again before a crash."""
    erased: dict[Key, int] = field(default_factory=dict)
    """So many first bodies were deleted and the deletion flushed: they are not seen again."""
    next_id: dict[int, int] = field(default_factory=dict)
    unanswered: set[tuple[Key, int]] = field(default_factory=set)
    """(key, number) of adds under way: one that waits for room may be taken after a deletion, as a late writer's."""

    def photograph(self) -> "History":
        """As of now. Shares what only grows."""
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

    def send(self, key: Key, body: bytes) -> int:
        """The body's number."""
        bodies = self.sent.setdefault(key, [])
        bodies.append(body)
        self.next_id[key[0]] = max(self.next_id.get(key[0], 0), key[1] + 1)
        return len(bodies) - 1

    def acknowledge(self, key: Key, number: int) -> None:
        self.acknowledged[key] = max(number, self.acknowledged.get(key, -1))
        self.keyed.add(key[0])

    def delete(self, ledger_id: int) -> None:
        """Nothing of the ledger is promised any more."""
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
        """A deletion that was not flushed may be forgotten."""
        self.hidden = dict(self.erased)

    def ledger_ids(self) -> list[int]:
        return sorted({key[0] for key in self.sent} | self.fenced | self.lac_packets.keys())
